"""Every rule: an operation on parts gives what it gives on wholes, in values, in shapes and in gradients."""

import pickle
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lnn_lightning.parallel.tensor.axis import Spec, TensorAxis, scatter, take_part
from lnn_lightning.parallel.tensor.layers import Role, run_linear
from lnn_lightning.parallel.tensor.region import Region, in_region
from lnn_lightning.parallel.tensor.sharded import RULES, ShardingError, is_sharded, whole, wrap
from tests.helpers.ranks import run_ranks
from tests.parallel.tensor.parts import KINDS, Comparison
from tests.parallel.tensor.product_forms import ATTENTION, LOSSES, NORMS, PRODUCTS
from tests.parallel.tensor.rule_forms import (
    CUT_FORMS,
    JOIN_FORMS,
    SHAPE_FORMS,
    along_forms,
    elementwise_forms,
    name_of,
    reduction_forms,
    rules_named,
)

OTHER_NAMES = {"nelement", "ndimension", "is_tensor", "is_grad_enabled", "is_autocast_enabled", "cuda"}
"""Of functions that are told to `__torch_function__` by another name, or not at all; and one that needs a GPU."""
RANDOM = rules_named("random")
WITHOUT_VALUES = [torch.Tensor.short]
"""A dtype that gloo does not send, so that it cannot be gathered to be compared."""


def values(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Distinct numbers between 0.1 and 0.9."""
    rng = torch.Generator().manual_seed(11 + seed)
    made = 0.1 + 0.8 * torch.rand(shape, dtype=torch.float64, generator=rng)
    return (made * 10).to(dtype) if not (dtype.is_floating_point or dtype.is_complex) else made.to(dtype)


def compare_elementwise(compare: Comparison) -> None:
    """Each form in the first dtype that it takes."""
    shape, spec = KINDS["last"]
    for function in rules_named("elementwise", "made_like", "converted"):
        if function in WITHOUT_VALUES:
            compare.seen.keys_seen.add(function)
            continue
        for form, count, call in elementwise_forms(function):
            if getattr(function, "__name__", "") == "empty_like":
                call = _shape_of(call)
            for dtype in (torch.float64, torch.int64, torch.bool, torch.complex128):
                x, y = values(shape, 0, dtype), values(shape, 1, dtype)
                name = f"{name_of(function)}({form}) {dtype}"
                if not compare.check(name, call, [x, y][:count], [spec, spec][:count]):
                    if compare.misspelt and form != "x":  # `~` says that of a dtype
                        break
                    continue
                if count == 2:
                    compare.check(f"{name}, y whole", call, [x, y], [spec, None])
                    compare.check(f"{name}, x whole", call, [x, y], [None, spec])
                    compare.check(f"{name}, y a parameter", call, [x, y[0, 0]], [spec, None], parameters=True)
                break


def _shape_of(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: tuple(call(*given).shape)


def mixed_pairs() -> Iterator[tuple[str, list[Tensor], list[Spec | None]]]:
    """Operands divided in every pair of ways, with fewer and with more dimensions."""
    shape = (6, 6, 12)
    specs = [None, Spec(0, (6,)), Spec(1, (6,)), Spec(2, (12,)), Spec(2, (6, 6)), Spec(1, (6,), sequence=True)]
    for one in specs:
        for other in specs:
            if one is None and other is None:
                continue
            yield f"{one} {other}", [values(shape), values(shape, 1)], [one, other]
    for dims in ((12,), (1,), (6, 12), (6, 1), (1, 12), (1, 6, 1), (6, 1, 1), (2, 6, 6, 12), ()):
        for one in specs[1:]:
            yield f"{one} whole {dims}", [values(shape), values(dims, 1)], [one, None]
    yield "last of fewer dims", [values(shape), values((12,), 1)], [Spec(2, (12,)), Spec(0, (12,))]
    yield "last of fewer dims in sections", [values(shape), values((12,), 1)], [Spec(2, (12,)), Spec(0, (6, 6))]
    yield "padded", [values((2, 11)), values((2, 11), 1)], [Spec(1, (11,)), Spec(1, (11,))]
    yield "padded and whole", [values((2, 11)), values((11,), 1)], [Spec(1, (11,)), None]


# a parameter is used once in each: used on parts and on wholes, planners refuse it
MIXED: list[tuple[str, Callable[..., Any]]] = [
    ("+", lambda x, y: x + y),
    ("r-", lambda x, y: y - x),
    ("*", lambda x, y: x * y),
    ("r/", lambda x, y: y / x),
    ("**", lambda x, y: x**y),
    ("//", lambda x, y: x // y),
    ("r%", lambda x, y: y % x),
    ("<", lambda x, y: x < y),
    ("where", lambda x, y: torch.where(x > 0.5, x, y)),
    ("r where", lambda x, y: torch.where(y > 0.5, x, 0.0)),
    ("add_", lambda x, y: (x * 1).add_(y)),
    ("r mul_", lambda x, y: (y * 1).mul_(x)),
    ("copy_", lambda x, y: (x * 1).copy_(y)),
    ("masked_fill", lambda x, y: x.masked_fill(y > 0.5, -1.0)),
    ("masked_fill_", lambda x, y: (x * 1).masked_fill_(y > 0.5, 0.0)),
    ("maximum", lambda x, y: torch.maximum(x, y)),
    ("max", lambda x, y: torch.max(x, y)),
    ("min", lambda x, y: torch.min(y, x)),
    ("max other", lambda x, y: torch.max(x, other=y)),
    ("lerp", lambda x, y: x.lerp(y, 0.3)),
    ("r lerp", lambda x, y: torch.lerp(y, x, x)),
    ("addcmul", lambda x, y: torch.addcmul(x, x, y, value=0.3)),
    ("addcdiv", lambda x, y: torch.addcdiv(y, x, x)),
    ("+=", lambda x, y: _added(x, y)),
    ("setitem", lambda x, y: _set(x, y)),
    ("type_as", lambda x, y: x.type_as(y)),
    ("to", lambda x, y: y.to(x)),
    ("logaddexp", lambda x, y: torch.logaddexp(x, y)),
    ("atan2", lambda x, y: torch.atan2(y, x)),
    ("changed after it was gathered", lambda x, y: _changed(x, y)),
    ("stacked", lambda x, y: torch.stack((x, y), -1)),
]


def _added(x: Tensor, y: Tensor) -> Tensor:
    x = x * 1
    x += y
    x *= 3
    x -= x * x
    x /= x + 1
    return x


def _set(x: Tensor, y: Tensor) -> Tensor:
    y = y * 1
    y[..., :1] = x[..., :1]
    return y


def _changed(x: Tensor, y: Tensor) -> Any:
    x = x * 1
    before = F.linear(x, torch.ones(2, x.size(-1), dtype=x.dtype)), x.cumsum(-1), x.flip(0)
    x.mul_(y)
    return before, F.linear(x, torch.ones(2, x.size(-1), dtype=x.dtype)), x.cumsum(-1), x.flip(0)


def compare_mixed(compare: Comparison) -> None:
    """Wholes as activations with each pair, and in turn as parameters inside and outside of units."""
    for number, (pair, inputs, specs) in enumerate(mixed_pairs()):
        for turn, (form, call) in enumerate(MIXED, start=number):
            compare.check(f"{form} {pair}", call, inputs, specs)
            if turn % 2:
                compare.check(f"{form} {pair}, parameters", call, inputs, specs, parameters=True)
            if not turn % 2:
                compare.check(f"{form} {pair}, outside", call, inputs, specs, parameters=True, inside=False)


def compare_dimensions(compare: Comparison) -> None:
    """Each function along each dimension of each kind of part, in two of the ways to say so: each way in its turn."""
    compare.every = 1
    reducing = rules_named("sum", "reduced", "over_vocabulary", "pairs")
    along = rules_named("along", "softmax")
    functions = [*((each, reduction_forms) for each in reducing), *((each, along_forms) for each in along)]
    for nth, (function, forms) in enumerate(functions):
        unfit: set[Any] = set()
        for number, (kind, (shape, spec)) in enumerate(KINDS.items()):
            for place, (dim, ways) in enumerate(forms(function)):
                if compare.size > 2 and (nth + number + place) % 2:
                    continue
                turn = (number + place) % len(ways)
                left = len(ways) if dim is ... else 2 if compare.size == 2 else 1
                for way, call in ways[turn:] + ways[:turn]:
                    if left == 0:
                        break
                    if (way, type(dim)) in unfit:
                        continue
                    if compare.check(f"{name_of(function)}({way}) {dim} {kind}", call, [values(shape)], [spec]):
                        left -= 1
                    elif compare.misspelt:
                        unfit.add((way, type(dim)))


def compare_shapes(compare: Comparison) -> None:
    suit: set[str] = set()
    for kind, (shape, spec) in KINDS.items():
        for form, call in SHAPE_FORMS + CUT_FORMS:
            if compare.check(f"{form} {kind}", call, [values(shape)], [spec]):
                suit.add(form)
        for form, call in JOIN_FORMS:
            for other in (spec, None):
                compare.check(f"{form} {kind} {other}", call, [values(shape), values(shape, 1)], [spec, other])
            if compare.check(f"{form} {kind} reversed", call, [values(shape), values(shape, 1)], [None, spec]):
                suit.add(form)
    for form, _ in SHAPE_FORMS + CUT_FORMS + JOIN_FORMS:
        if form not in suit and not any(letter.isdigit() for letter in form):
            compare.found.append(f"{form}: fails on every whole")


def compare_products(compare: Comparison) -> None:
    for product in PRODUCTS + NORMS + ATTENTION + LOSSES:
        inputs = [values(shape, seed) for seed, (shape, _) in enumerate(product.operands)]
        specs = [spec for _, spec in product.operands]
        for parameters, inside in ((False, True), (True, True), (True, False)):
            name = f"{product.name}, {'parameters' if parameters else 'values'}{'' if inside else ' outside'}"
            if not compare.check(name, product.function, inputs, specs, product.local, parameters, inside):
                compare.found.append(f"{name}: fails on wholes")


def compare_random(compare: Comparison) -> None:
    """Whole values are not comparable: shapes, what is kept, and that the ranks draw differently."""
    shape, spec = (4, 8, 600), Spec(2, (600,))
    axis = TensorAxis(compare.size, compare.rank, dist.group.WORLD)
    for function in RANDOM:
        name = name_of(function)
        torch.manual_seed(1)
        sign = -1.0 if "rrelu" in name else 1.0
        part = wrap(take_part(torch.full(shape, sign), spec, axis.size, axis.rank).clone(), spec, axis)
        options: dict[str, Any] = {}
        of_nn = getattr(function, "__module__", "") == "torch.nn.functional"
        if "rrelu" in name:
            options = {"training": True}
        elif "dropout" in name:
            options = {"p": 0.5, "training" if of_nn else "train": True}
        elif "bernoulli_" in name or "geometric_" in name:
            options = {"p": 0.1}
        elif "bernoulli" in name:
            part.mul_(0.5)
        drawn = function(part, **options)
        compare.count += 1
        if not is_sharded(drawn) or tuple(drawn.shape) != shape:
            compare.found.append(f"{name}: not a part of {shape}")
            continue
        with torch._C.DisableTorchFunctionSubclass():
            parts = [each.clone() for each in axis.all_gather(drawn.clone())]
            if "dropout" in name and "alpha" not in name and not set(drawn.unique().tolist()) <= {0.0, 2.0}:
                compare.found.append(f"{name}: values {drawn.unique()}")
        if any(torch.equal(parts[0], other) for other in parts[1:]):
            compare.found.append(f"{name}: the same on all ranks")
        if not torch.equal(torch.rand(3), _after_one(1)):
            compare.found.append(f"{name}: the ranks' common stream went on by more than a number")
    x = values((2, 4, 12))
    for call in (
        lambda x: F.dropout(x, 0.0),
        lambda x: F.dropout(x, 0.5, False),
        lambda x: F.dropout(x, training=False),
    ):
        compare.check("no dropout", call, [x], [Spec(2, (12,))], local=True)
    whole_dropout = lambda x: F.dropout1d(x, 0.5)  # noqa: E731 - has no rule: on wholes, with the ranks' common stream
    compare.check("dropout of channels", whole_dropout, [x], [Spec(2, (12,))])


def _after_one(seed: int) -> Tensor:
    torch.manual_seed(seed)
    torch.empty((), dtype=torch.int64).random_()
    return torch.rand(3)


def compare_layers(compare: Comparison) -> None:
    """A linear layer's parts, and values that change in place between two layers that read them."""
    size, rank = compare.size, compare.rank
    inside = TensorAxis(size, rank, dist.group.WORLD, inside=True)
    weights = [values((12, 6), seed) for seed in (1, 2)]
    column = Role("column", (12,))

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        if not compare_layers.divided:  # type: ignore[attr-defined]
            return F.linear(x, weight)
        return run_linear(x, take_part(weight, Spec(0, (12,)), size, rank), None, column, inside)

    def twice(x: Tensor) -> Any:
        x = x * 1
        return layer(x, weights[0]), layer(x, weights[1])

    def changed(x: Tensor) -> Any:
        x = x * 1
        first = layer(x, weights[0])
        x += 0.5
        return first, layer(x, weights[1])

    def residual(x: Tensor) -> Tensor:
        x = x * 1
        for weight in weights:
            x += layer(x, weight)[..., :6] * 1.0
        return x

    for name, call in (("twice", twice), ("changed", changed), ("residual", residual)):
        for kind, spec in (("whole", None), ("tokens", Spec(1, (6,), sequence=True))):
            x = values((2, 6, 6))
            compare_layers.divided = False  # type: ignore[attr-defined]
            expected = x.clone().requires_grad_()
            outs = call(expected)
            outs = outs if isinstance(outs, tuple) else (outs,)
            torch.autograd.backward(sum((out * out).sum() for out in outs))
            compare_layers.divided = True  # type: ignore[attr-defined]
            leaf = x.clone().requires_grad_()
            given = leaf if spec is None else wrap(scatter(leaf, inside, spec), spec, inside)
            compare.count += 1
            try:
                with in_region(Region(1 if spec is not None else None)):
                    ours = call(given)
                    ours = ours if isinstance(ours, tuple) else (ours,)
                    ours = tuple(whole(out) for out in ours)
                torch.autograd.backward(sum((out * out).sum() for out in ours))
            except Exception as error:  # noqa: BLE001 - reported
                compare.found.append(f"layers {name} {kind}: {type(error).__name__}: {str(error)[:150]}")
                continue
            pairs = [*zip(ours, outs, strict=True), (leaf.grad, expected.grad)]
            if any(not torch.allclose(one, other, 1e-10) for one, other in pairs):
                compare.found.append(f"layers {name} {kind}: {[float((a - b).abs().max()) for a, b in pairs]}")


GROUPS = {
    "elementwise": compare_elementwise,
    "mixed": compare_mixed,
    "dimensions": compare_dimensions,
    "shapes": compare_shapes,
    "products": compare_products,
    "random": compare_random,
    "layers": compare_layers,
}
QUICK = ("shapes", "random", "layers")
SIZES = [2, pytest.param(3, marks=pytest.mark.slow)]


def compare_group(rank: int, size: int, group: str) -> tuple[list[str], int, int, list[int]]:
    compare = Comparison(rank, size)
    GROUPS[group](compare)
    return compare.found, compare.count, compare.refused, compare.untested()


@cache
def compared(size: int, group: str) -> list[tuple[list[str], int, int, list[int]]]:
    return run_ranks(compare_group, size, group, timeout=600)


@pytest.mark.parametrize(
    "group", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in GROUPS]
)
@pytest.mark.parametrize("size", SIZES)
def test_parts_give_what_wholes_give(size: int, group: str) -> None:
    for found, count, refused, _ in compared(size, group):
        assert count > 5
        assert refused <= count // 8, f"{refused} of {count} are refused: only writes may be"
        assert not found, f"{len(found)} of {count}:\n" + "\n".join(found)


@pytest.mark.slow
def test_every_rule_is_tested() -> None:
    """By all of the groups together."""
    untested = set(range(len(RULES)))
    for group in GROUPS:
        untested &= set(compared(2, group)[0][3])
    names = {getattr(list(RULES)[number], "__name__", "") for number in untested}
    names = {name for name in names if not name.startswith("__")}  # operators are told as `add` and so on
    assert names <= OTHER_NAMES | HANDED_ON, names - OTHER_NAMES


HANDED_ON = {"acosh_", "asinh_", "atanh_", "sigmoid", "tanh"}
"""Functions that only call the method of the same name, or are another name of one that is tested."""

WRITES: tuple[Callable[[Tensor], Any], ...] = (
    lambda x: x.index_add_(1, torch.tensor([0]), torch.ones(2, 1)),
    lambda x: x.__setitem__((0, 0), 5.0),
    lambda x: x.scatter_(1, torch.full((2, 1), 4), 7.0),
    lambda x: x.index_fill_(1, torch.tensor([5]), 9.0),
)


def write(rank: int, size: int) -> list[bool]:
    axis, spec = TensorAxis(size, rank, dist.group.WORLD), Spec(1, (6,))
    same = []
    for call in WRITES:
        expected = torch.arange(12.0).view(2, 6)
        part = wrap(take_part(expected, spec, size, rank).clone(), spec, axis)
        call(expected)
        call(part)
        same.append(torch.equal(whole(part), expected))
    return same


def test_writes_that_have_no_rule_write_the_whole() -> None:
    assert run_ranks(write, 2) == [[True] * len(WRITES)] * 2


def refuse(rank: int, size: int) -> list[str]:
    axis, spec = TensorAxis(size, rank, dist.group.WORLD), Spec(1, (6,))
    messages = []
    for call in (lambda x: x.transpose_(0, 1), lambda x: x.resize_(3, 4), lambda x: pickle.dumps(x)):
        with pytest.raises(ShardingError) as caught:
            call(wrap(take_part(torch.ones(2, 6), spec, size, rank).clone(), spec, axis))
        messages.append(str(caught.value))
    return messages


def test_what_cannot_be_is_refused() -> None:
    """A part whose shape changes in place, or is pickled: the error names the operation, the shape and a way out."""
    for message in run_ranks(refuse, 2)[0]:
        assert "[2, 6]" in message and "tensor_parallel_plan" in message and "`" in message
