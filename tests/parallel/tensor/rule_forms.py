"""Ways to call every function that has a rule: with positions and keywords, negative dimensions, in place, mixed."""

# ruff: noqa: E501 - tables: a case a line

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lnn_lightning.parallel.tensor.sharded import RULES

T = Tensor
Form = tuple[str, Callable[..., Any]]
DIMS: list[Any] = [0, 1, 2, -1, -2, -3, (0, 1), [1, 2], (0, -1), (), None]


def name_of(function: Any) -> str:
    owner = getattr(getattr(function, "__self__", None), "__name__", "") or getattr(function, "__qualname__", "")
    return f"{owner}:{getattr(function, '__name__', function)}"


def in_place(function: Any) -> bool:
    name = getattr(function, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name != "__invert__")


def keeping(function: Any) -> Callable[..., Any]:
    """The function on a fresh tensor; for one in place, what became of that, too."""

    def run(first: Any, *others: Any, **options: Any) -> Any:
        fresh = first * 1 if isinstance(first, Tensor) and in_place(function) else first
        return function(fresh, *others, **options), fresh

    return run if in_place(function) else function


def rules_named(*names: str) -> list[Any]:
    return [function for function, rule in RULES.items() if rule.__name__.strip("_") in names]


# ------------------------------------------------------------------ elementwise


def elementwise_forms(function: Any) -> Iterator[tuple[str, int, Callable[..., Any]]]:
    """Name, number of tensors, and a function of them; a form that the function does not have fails on wholes."""
    f = keeping(function)
    yield "x", 1, lambda x: f(x)
    yield "x, 0.5", 1, lambda x: f(x, 0.5)
    yield "x, 2", 1, lambda x: f(x, 2)
    yield "x, 0.3, 0.6", 1, lambda x: f(x, 0.3, 0.6)
    yield "input=x", 1, lambda x: function(input=x)
    yield "2, x", 1, lambda x: function(2, x)
    yield "x, y", 2, lambda x, y: f(x, y)
    yield "y, x", 2, lambda x, y: f(y, x)
    yield "x, other=y", 2, lambda x, y: f(x, other=y)
    yield "input=y, other=x", 2, lambda x, y: function(input=y, other=x)
    yield "x, min=y", 2, lambda x, y: f(x, min=y)
    yield "x, y, alpha", 2, lambda x, y: f(x, y, alpha=2)
    yield "x, y, 0.5", 2, lambda x, y: f(x, y, 0.5)
    yield "x, y > 0.5, 0.5", 2, lambda x, y: f(x, y > 0.5, 0.5)
    yield "y > 0.5, x, y", 2, lambda x, y: function(y > 0.5, x, y)
    yield "x > 0.5, x, 0.0", 1, lambda x: function(x > 0.5, x, 0.0)
    yield "x, y, x", 2, lambda x, y: f(x, y, x)
    yield "y, x, x", 2, lambda x, y: f(y, x, x)
    yield "rounding", 2, lambda x, y: f(x, y, rounding_mode="floor")


# ------------------------------------------------------------------ along dimensions


Cell = tuple[Any, list[Form]]


def reduction_forms(function: Any) -> Iterator[Cell]:
    """For each dimension the ways to say it; last the forms that name none, as one `Ellipsis`."""
    for dim in DIMS:
        yield (
            dim,
            [
                ("x, dim", lambda x, d=dim: function(x, d)),
                ("x, dim=", lambda x, d=dim: function(x, dim=d)),
                ("x, dim, True", lambda x, d=dim: function(x, d, True)),
                ("x, dim, False", lambda x, d=dim: function(x, d, False)),
                ("x, dim, True, True", lambda x, d=dim: function(x, d, True, True)),
                ("x, dim, keepdim", lambda x, d=dim: function(x, dim=d, keepdim=True)),
                ("x, axis=", lambda x, d=dim: function(x, axis=d)),
                ("x, axis=, keepdims", lambda x, d=dim: function(x, axis=d, keepdims=True)),
                ("x, dim, unbiased", lambda x, d=dim: function(x, d, unbiased=False)),
                ("x, dim, correction", lambda x, d=dim: function(x, dim=d, correction=0)),
                ("x, dim, dtype", lambda x, d=dim: function(x, d, dtype=torch.float32)),
                ("x, 2, dim", lambda x, d=dim: function(x, 2, d)),
                ("x, 2, dim, True", lambda x, d=dim: function(x, 2, d, True)),
                ("x, 2.0, dim=, keepdim", lambda x, d=dim: function(x, 2.0, dim=d, keepdim=True)),
                ("input=x, dim=", lambda x, d=dim: function(input=x, dim=d)),
            ],
        )
    yield (
        ...,
        [
            ("x", lambda x: function(x)),
            ("x, True", lambda x: function(x, True)),
            ("x, unbiased=False", lambda x: function(x, unbiased=False)),
            ("x, dtype", lambda x: function(x, dtype=torch.float32)),
            ("x, y", lambda x: function(x, x * x)),
            ("x, other=y", lambda x: function(x, other=x * x)),
            ("x bool", lambda x: function(x > 0.5)),
            ("x bool, -1", lambda x: function(x > 0.5, -1)),
            ("x int, 1", lambda x: function((x > 0.5).long(), 1)),
        ],
    )


def along_forms(function: Any) -> Iterator[Cell]:
    """As `reduction_forms`."""
    f = keeping(function)
    for dim in DIMS:
        yield (
            dim,
            [
                ("x, dim", lambda x, d=dim: f(x, d)),
                ("x, dim=", lambda x, d=dim: f(x, dim=d)),
                ("x, 1, dim", lambda x, d=dim: f(x, 1, d)),
                ("x, 2, dim=", lambda x, d=dim: f(x, 2, dim=d)),
                ("x, dim, dtype", lambda x, d=dim: f(x, d, dtype=torch.float32)),
                ("x, dim, float32", lambda x, d=dim: f(x, d, torch.float32)),
                ("input=x, dim=", lambda x, d=dim: function(input=x, dim=d)),
            ],
        )
    yield ..., [("x", lambda x: f(x))]


# ------------------------------------------------------------------ shapes


# (name, function); the shapes of the wholes are those of `parts.KINDS`: forms that do not suit one fail there
def _hooked(x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: gradient * 2)
    x.retain_grad()
    return x * 3


def _leaf(x: Tensor) -> bool:
    x.requires_grad_().register_post_accumulate_grad_hook(lambda leaf: None)
    return x.requires_grad


SHAPE_FORMS: list[Form] = [
    ("shape", lambda x: (tuple(x.shape), tuple(x.size()), x.size(0), x.size(-1), x.size(dim=1), len(x))),
    ("numbers", lambda x: (x.numel(), x.nelement(), torch.numel(x), x.dim(), x.ndimension(), x.ndim, x.nbytes)),
    ("kinds", lambda x: (x.is_floating_point(), torch.is_floating_point(x), x.is_complex(), torch.is_complex(x))),
    ("kinds 2", lambda x: (x.element_size(), x.is_inference(), x.is_signed(), torch.is_tensor(x), x.type())),
    ("strides", lambda x: x.contiguous().is_contiguous() and torch.result_type(x, 1.0)),
    ("as_strided", lambda x: x.contiguous().as_strided(x.shape, x.contiguous().stride())),
    ("type", lambda x: (x.type(torch.float32), x.type(x.dtype))),
    ("new", lambda x: (x.new_zeros(x.shape) + x, x.new_ones(2, 3), x.new_full((2,), 3.0), x.new_tensor([1.0]))),
    ("asked of the part", lambda x: (x.get_device(), x.is_pinned(), x.is_shared(), x._is_view() or True, x.storage_offset() * 0)),
    ("storage", lambda x: (x.untyped_storage().nbytes() > 0, x.data_ptr() != 0, isinstance(hash(x), int))),
    ("graph", lambda x: ((x * 1).requires_grad_() * 2, _hooked(x * 1))),
    ("leaf", lambda x: _leaf(x.detach() * 1)),
    ("words", lambda x: (bool(repr(x)), bool(f"{x}"), bool(str(x)))),
    ("copied", lambda x: copy.deepcopy(x.detach())),
    ("iterated", lambda x: [each * 2 for each in x] + [each for each in x.transpose(0, 1)]),
    ("converted", lambda x: (x.to(torch.float32), x.to("cpu"), x.type_as(x), x.cpu(), x.to(x), x.float().double())),
    ("new_empty", lambda x: tuple(x.new_empty(x.shape).shape)),
    ("data", lambda x: (x * 1).data),
    ("real of", lambda x: torch.complex(x, x).real),
    ("imag of", lambda x: torch.complex(x, x * x).imag),
    ("mH", lambda x: (x.mH, x.adjoint())),
    ("H", lambda x: x.flatten(1).H),
    ("detach", lambda x: x.detach()),
    ("bool", lambda x: bool((x.sum() * 0).bool())),
    ("item", lambda x: x.sum().item()),
    ("tolist", lambda x: x.detach().tolist()[0][0][0]),
    ("numpy", lambda x: float(x.detach().numpy().sum())),
    *[
        (f"view {sizes}", lambda x, s=sizes: (x.view(*s), x.view(s), x.reshape(*s), torch.reshape(x, s)))
        for sizes in [
            (2, 4, 3, 4), (2, 4, 6, 2), (2, 4, 2, 6), (2, 4, 12, 1), (2, 4, -1), (8, 12), (8, -1), (2, 48), (-1,), (96,),
            (2, 2, 2, 12), (1, 2, 4, 12), (2, 1, 4, 12), (2, 4, 3, 6), (2, 4, 3, 2, 3), (2, 4, 6, 3), (8, 3, 6), (2, 4, 2, 9),
            (2, 4, 4, 6), (2, 4, 24, 1), (2, 6, 20), (2, 6, 2, 2, 5), (12, 4, 5), (2, 3, 2, 4, 5), (2, 24, 5), (12, 5), (2, 30),
            (2, 6, 5, 1), (8, 11), (88,), (2, 2, 2, 11), (6, 12), (24, 3), (6, 2, 2, 3), (3, 2, 4, 3), (72,),
        ]
    ],
    ("view kwargs", lambda x: (x.reshape(shape=(2, -1)), torch.reshape(input=x, shape=(2, -1)))),
    ("view dtype", lambda x: x.detach().view(torch.int64)),
    ("view_as", lambda x: (x.view_as(torch.empty(x.shape)), x.reshape_as(torch.empty(2, x.numel() // 2)))),
    ("view_as part", lambda x: (x.flatten(1).view_as(x.flatten(1) * 2), x.flatten(1).reshape_as(x))),
    ("view_as of whole", lambda x: torch.ones(x.numel()).reshape_as(x)),
    ("flatten", lambda x: (x.flatten(), x.flatten(1), x.flatten(0, 1), x.flatten(-2), torch.flatten(x, start_dim=1))),
    ("flatten one", lambda x: (x.flatten(1, 1), torch.flatten(x, 0, -2), x.flatten(end_dim=1))),
    *[(f"unflatten {d} {s}", lambda x, d=d, s=s: (x.unflatten(d, s), torch.unflatten(x, dim=d, sizes=s)))
      for d, s in [(-1, (3, 4)), (2, (-1, 4)), (2, (6, 2)), (2, (3, -1)), (2, (3, 6)), (1, (3, 2)), (1, (2, -1)), (0, (2, 3))]],
    ("complex", lambda x: torch.view_as_complex(x.unflatten(-1, (-1, 2)))),
    ("complex pairs", lambda x: torch.view_as_complex(torch.stack((x, x * x), -1)) * 1j),
    ("complex back", lambda x: torch.view_as_real(torch.view_as_complex(torch.stack((x, x * x), -1)))),
    *[(f"transpose {a} {b}", lambda x, a=a, b=b: (x.transpose(a, b), torch.transpose(x, dim0=a, dim1=b), x.swapaxes(a, b),
       torch.swapaxes(x, a, b), x.swapdims(a, b), torch.swapdims(x, a, b))) for a, b in [(0, 1), (1, 2), (-1, -2), (0, -1), (1, 1)]],
    ("permute", lambda x: (x.permute(2, 0, 1), x.permute((1, 2, 0)), torch.permute(x, (-1, 0, 1)), x.permute(dims=(0, 2, 1)))),
    ("permute heads", lambda x: (x.permute(0, 2, 1, 3), torch.permute(x, dims=(3, 1, 0, 2)))),
    *[(f"movedim {a} {b}", lambda x, a=a, b=b: (x.movedim(a, b), torch.movedim(x, a, b), x.moveaxis(a, b), torch.moveaxis(x, a, b)))
      for a, b in [(0, 1), (-1, 1), (2, 0), ((0, 1), (1, 2)), (1, 1)]],
    ("turned", lambda x: (x.mT, x.select(0, 0).flatten(1).t(), torch.t(x[0].flatten(1)), x[0].flatten(1).T, x.adjoint())),
    *[(f"unsqueeze {d}", lambda x, d=d: (x.unsqueeze(d), torch.unsqueeze(x, d), torch.unsqueeze(x, dim=d)))
      for d in (0, 1, 2, 3, -1, -2, -3, -4)],
    ("squeeze", lambda x: (x.unsqueeze(1).squeeze(), x.unsqueeze(1).squeeze(1), x.unsqueeze(0).squeeze(dim=0), torch.squeeze(x))),
    ("squeeze more", lambda x: (x[None, None].squeeze((0, 1)), x.unsqueeze(-1).squeeze(-1), x.squeeze(1), torch.squeeze(x, -1))),
    ("expand", lambda x: (x.expand(3, *x.shape), x.unsqueeze(1).expand(-1, 5, *([-1] * (x.ndim - 1))))),
    ("expand more", lambda x: (x.expand((2, *x.shape)), torch.broadcast_to(x, (2, *x.shape)), x.broadcast_to((2, *x.shape)))),
    ("expand_as", lambda x: (x[:1].expand_as(x), x.expand_as(torch.empty(2, *x.shape)), torch.ones(1).expand_as(x))),
    ("expand kwargs", lambda x: x.expand(size=(3, *x.shape))),
    ("repeat", lambda x: (x.repeat(2, *([1] * x.ndim)), x.repeat([2] + [1] * (x.ndim - 1)), x.repeat(*([1] * (x.ndim - 1)), 2))),
    ("tile", lambda x: (x.tile(2, 1), x.tile((1, 2)), torch.tile(x, (2, 1, 1)), torch.tile(x, dims=(3,)))),
    *[(f"repeat_interleave {d}", lambda x, d=d: (x.repeat_interleave(2, d), torch.repeat_interleave(x, 3, dim=d),
       torch.repeat_interleave(x, repeats=2, dim=d))) for d in (0, 1, 2, -1)],
    ("repeat_interleave all", lambda x: (x.repeat_interleave(2), torch.repeat_interleave(x, torch.tensor([1, 2]), dim=0))),
]  # fmt: skip

CUT_FORMS: list[Form] = [
    *[(f"split {n} {d}", lambda x, n=n, d=d: (x.split(n, d), torch.split(x, n, dim=d), torch.functional.split(x, n, d)))
      for n in (1, 2, 4, 5, 6, 12, [6, 6], [12, 6, 6], [6, 6, 6], [2, 4], [12, 12], [18, 6], [12, 6]) for d in (0, 1, 2, -1)],
    ("split kwargs", lambda x: (x.split(split_size=2, dim=1), torch.split(x, split_size_or_sections=2, dim=-1), x.split(1))),
    *[(f"split_with_sizes {d}", lambda x, d=d, s=s: (x.split_with_sizes(s, d), torch.split_with_sizes(x, s, dim=d)))
      for d, s in [(2, [6, 6, 6]), (-1, [12, 6, 6]), (1, [2, 2]), (1, [2, 4]), (2, [6, 6])]],
    *[(f"chunk {n} {d}", lambda x, n=n, d=d: (x.chunk(n, d), torch.chunk(x, n, dim=d), x.chunk(chunks=n, dim=d)))
      for n in (1, 2, 3, 4, 5) for d in (0, 1, 2, -1, -2)],
    *[(f"unbind {d}", lambda x, d=d: (x.unbind(d), torch.unbind(x, dim=d), torch.unbind(x, d))) for d in (0, 1, 2, -1)],
    ("unbind first", lambda x: (x.unbind(), torch.unbind(x), list(x), [len(each) for each in x])),
    *[(f"narrow {d} {s} {n}", lambda x, d=d, s=s, n=n: (x.narrow(d, s, n), torch.narrow(x, d, s, n), x.narrow(dim=d, start=s, length=n),
       torch.narrow(x, d, start=s, length=n)))
      for d in (0, 1, 2, -1) for s, n in [(0, 2), (0, 6), (6, 6), (12, 6), (1, 1), (0, 12), (-2, 2)]],
    ("narrow other order", lambda x: (x.narrow(start=0, length=6, dim=2), x.narrow(length=6, start=6, dim=-1))),
    ("narrow tensor", lambda x: x.narrow(0, torch.tensor(1), 1)),
    *[(f"select {d} {i}", lambda x, d=d, i=i: (x.select(d, i), torch.select(x, d, i), x.select(dim=d, index=i)))
      for d in (0, 1, 2, -1, -2) for i in (0, 1, -1)],
    ("select other order", lambda x: x.select(index=1, dim=2)),
    *[(f"[{text}]", lambda x, i=index: x[i]) for text, index in [
        ("0", 0), (":, 1", (slice(None), 1)), ("..., 0", (..., 0)), ("..., :6", (..., slice(6))), ("..., 6:", (..., slice(6, None))),
        ("..., 6:12", (..., slice(6, 12))), ("..., 12:", (..., slice(12, None))), ("..., -6:", (..., slice(-6, None))),
        ("..., ::2", (..., slice(None, None, 2))), ("..., 1::2", (..., slice(1, None, 2))), (":, ::2", (slice(None), slice(None, None, 2))),
        ("None", None), (":, None", (slice(None), None)), ("..., None", (..., None)), ("None, ..., None, 0", (None, ..., None, 0)),
        ("0, :, None, :3", (0, slice(None), None, slice(3))), ("...", ...), (":2", slice(2)), (":, :2", (slice(None), slice(2))),
        (":, 1:, ...", (slice(None), slice(1, None), ...)), ("..., 3:9", (..., slice(3, 9))), ("..., 5:2", (..., slice(5, 2))),
        ("True", True), ("list", [0, 1]), (":, list", (slice(None), [1, 0])), ("..., list", (..., [1, 0, 3])), ("-1", -1), ("..., -1", (..., -1)),
        ("tensor", torch.tensor([1, 0])), ("..., tensor", (..., torch.tensor([1, 0]))), (":, -2:", (slice(None), slice(-2, None))),
        ("..., ::3", (..., slice(None, None, 3))), ("..., 2::3", (..., slice(2, None, 3))), ("..., :-1", (..., slice(None, -1))),
    ]],
    ("[mask]", lambda x: x[x > 0.5]),
    ("[rows]", lambda x: x[x.sum(dim=tuple(range(1, x.ndim))) > 0]),
    ("whole[part]", lambda x: torch.arange(10.0)[(x * 3).long()]),
    *[(f"roll {d}", lambda x, d=d: (x.roll(1, d), torch.roll(x, 1, d), torch.roll(x, shifts=1, dims=d), x.flip(d), torch.flip(x, (d,)),
       x.flip(dims=(d,)))) for d in (0, 1, 2, -1)],
    ("roll all", lambda x: (x.roll(1), torch.roll(x, (1, 2), (0, 1)), x.flip(0, 1), x.flip((1, 2)))),
    *[(f"pad {p}", lambda x, p=p: (F.pad(x, p), F.pad(x, pad=p, value=2.0), F.pad(x, p, "constant", 1.0), F.pad(x, p, mode="constant")))
      for p in [(1, 0), (0, 0, 1, 2), (0, 0, 0, 0, 1, 1), (0, -1), (0, 0, 0, -1), (-1, 1)]],
    ("pad modes", lambda x: (F.pad(x, (1, 1), mode="reflect"), F.pad(x, (1, 1), "circular"), F.pad(x, (1, 1), mode="replicate"))),
    ("pad input", lambda x: F.pad(input=x, pad=(1, 1))),
    *[(f"index_select {d}", lambda x, d=d: (x.index_select(d, torch.tensor([1, 0])), torch.index_select(x, d, index=torch.tensor([1]))))
      for d in (0, 1, 2, -1)],
    ("index_select other order", lambda x: x.index_select(index=torch.tensor([1, 0]), dim=2)),
    ("gather", lambda x: (x.gather(-1, torch.zeros(*x.shape[:-1], 1, dtype=torch.long)), x.unfold(1, 2, 1))),
]  # fmt: skip

JOIN_FORMS: list[Form] = [
    *[(f"cat {d}", lambda x, y, d=d: (torch.cat((x, y), d), torch.cat([y, x], dim=d), torch.concat((x, y, x), d), torch.cat((x, y), axis=d),
       torch.concatenate((x, y), dim=d), torch.cat(tensors=[x, y], dim=d))) for d in (0, 1, 2, -1, -2)],
    *[(f"stack {d}", lambda x, y, d=d: (torch.stack((x, y), d), torch.stack([y, x], dim=d), torch.stack(tensors=(x, y), dim=d)))
      for d in (0, 1, 2, 3, -1, -2)],
    ("default dim", lambda x, y: (torch.cat((x, y)), torch.stack((x, y)))),
    ("cat empty", lambda x, y: torch.cat((torch.empty(0, dtype=x.dtype), x, y), 1)),
    ("cat unlike", lambda x, y: (torch.cat((x, y[:, :1]), 1), torch.cat((x[..., :2], y), -1))),
    ("hstack", lambda x, y: (torch.hstack((x, y)), torch.vstack((x, y)), torch.column_stack((x, y)))),
]  # fmt: skip
