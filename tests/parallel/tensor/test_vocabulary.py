"""Losses and embeddings cut over the vocabulary, against torch's own on the whole one."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lnn_lightning.parallel.tensor import vocabulary
from lnn_lightning.parallel.tensor.vocabulary import VocabularyPart, vocabulary_part
from tests.helpers.ranks import run_ranks

TOTALS = [12, 11, 4, 1]
"""Divides by two and by three; does not; leaves the last of three ranks nothing; leaves all but one nothing."""

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 4e-2, torch.float16: 4e-3}


def local(whole: Tensor, part: VocabularyPart, dim: int, padding: float = 1e3) -> Tensor:
    """This rank's columns as a leaf, with padding that must not count: it would win every maximum."""
    real = whole.detach().narrow(dim, min(part.start, part.total), part.real)
    shape = [part.size if d == dim else n for d, n in enumerate(real.shape)]
    columns = real.new_full(shape, padding)
    columns.narrow(dim, 0, part.real).copy_(real)
    return columns.requires_grad_(whole.requires_grad)


def difference(value: Tensor, expected: Tensor) -> float:
    if value.shape != expected.shape or value.dtype != expected.dtype:
        return float("inf")
    value, expected = value.double(), expected.double()
    if not torch.equal(value.isnan(), expected.isnan()):
        return float("inf")
    finite = expected.isfinite()
    if not torch.equal(value[~finite].nan_to_num(7.0), expected[~finite].nan_to_num(7.0)):
        return float("inf")
    value, expected = value[finite], expected[finite]
    if value.numel() == 0:
        return 0.0
    return float((value - expected).abs().max() / expected.abs().max().clamp(min=1e-3))


class Compare:
    """Collects what differs between a function on the whole and on the parts."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.count = 0

    def tensors(self, name: str, value: Tensor, expected: Tensor, tolerance: float) -> None:
        self.count += 1
        if not (error := difference(value, expected)) <= tolerance:
            self.found.append(f"{name}: {error:.1e}, {value.flatten()[:4]} for {expected.flatten()[:4]}")

    def functions(
        self,
        name: str,
        whole: Tensor,
        part: VocabularyPart,
        dim: int,
        expected: Callable[[Tensor], Tensor],
        mine: Callable[[Tensor], Tensor],
        sharded: bool = False,
        padding: float = 0.0,
        tolerance: float | None = None,
    ) -> None:
        """`expected(whole)` against `mine(columns)`, and the gradients of a random function of both."""
        whole = whole.detach().requires_grad_()
        columns = local(whole, part, dim)
        reference, value = expected(whole), mine(columns)
        tolerance = TOLERANCE[whole.dtype] if tolerance is None else tolerance
        given = torch.randn(reference.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        given = given.to(reference.dtype)
        reference.backward(given)
        whole_gradient = local(whole.grad, part, dim, padding=0.0)
        if sharded:
            value.backward(local(given, part, dim, padding=3.0))
            reference = local(reference.detach(), part, dim, padding=padding)
        else:
            value.backward(given)
        self.tensors(f"{name}, value", value.detach(), reference.detach(), tolerance)
        self.tensors(f"{name}, gradient", columns.grad, whole_gradient, tolerance)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def logits_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    return (4 * torch.randn(shape, dtype=torch.float64, generator=generator())).to(dtype)


LAYOUTS: dict[str, tuple[Callable[[int], tuple[int, ...]], int | None]] = {
    "(C)": (lambda c: (c,), None),
    "(N, C)": (lambda c: (7, c), None),
    "(N, C, d)": (lambda c: (3, c, 5), None),
    "(N, C, d, e)": (lambda c: (2, c, 3, 2), None),
    "(N, d, C)": (lambda c: (3, 5, c), -1),
}


def _cross_entropies(compare: Compare, group: Any) -> None:
    for total, (layout, (shape_of, dim)) in itertools.product(TOTALS, LAYOUTS.items()):
        part, shape = vocabulary_part(total, group), shape_of(total)
        where = (0 if len(shape) == 1 else 1) if dim is None else dim % len(shape)
        target = torch.randint(0, total, shape[:where] + shape[where + 1 :], generator=generator(2))
        some = torch.rand(target.shape, generator=generator(3)) < 0.4
        weights = torch.rand(total, dtype=torch.float64, generator=generator(4)) + 0.1
        targets = {
            "": (target, -100),
            "ignored": (target.masked_fill(some, -100), -100),
            "ignored class": (target, 0),
            "ignored beyond": (target.masked_fill(some, total), total),
            "all ignored": (torch.full_like(target, -1), -1),
        }
        options = itertools.product(targets.items(), (None, weights), ("mean", "sum", "none"), (0.0, 0.1, 1.0))
        for (kind, (labels, ignore)), weight, reduction, smoothing in options:
            given = {"ignore_index": ignore, "reduction": reduction, "label_smoothing": smoothing}
            compare.functions(
                f"cross_entropy {total} {layout} {kind} {weight is not None} {given}",
                logits_of(shape),
                part,
                where,
                lambda x, y=labels, w=weight, g=given, d=where: F.cross_entropy(
                    x.movedim(d, 1) if x.dim() > 1 else x, y, weight=w, **g
                ),
                lambda x, y=labels, w=weight, g=given, d=dim, p=part: vocabulary.cross_entropy(
                    x, y, p, dim=d, weight=w, **g
                ),
            )
            if smoothing:
                continue
            given.pop("label_smoothing")
            compare.functions(
                f"nll_loss {total} {layout} {kind} {weight is not None} {given}",
                logits_of(shape),
                part,
                where,
                lambda x, y=labels, w=weight, g=given, d=where: F.nll_loss(
                    x.movedim(d, 1) if x.dim() > 1 else x, y, weight=w, **g
                ),
                lambda x, y=labels, w=weight, g=given, d=dim, p=part: vocabulary.nll_loss(
                    x, y, p, dim=d, weight=w, **g
                ),
            )


def _dtypes(compare: Compare, group: Any) -> None:
    part = vocabulary_part(11, group)
    target = torch.randint(0, 11, (40,), generator=generator(2)).masked_fill(torch.arange(40) % 3 == 0, -100)
    weights = torch.rand(11, generator=generator(4)) + 0.1
    for dtype, smoothing, weight, reduction, autocast in itertools.product(
        TOLERANCE, (0.0, 0.1), (None, weights), ("mean", "sum", "none"), (False, True)
    ):
        given: dict[str, Any] = {"label_smoothing": smoothing, "reduction": reduction}
        given["weight"] = None if weight is None else weight.to(torch.float32 if autocast else dtype)
        if autocast and dtype == torch.float64 and weight is not None:
            given["weight"] = weight.double()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            compare.functions(
                f"cross_entropy {dtype} {smoothing} {weight is not None} {reduction} autocast {autocast}",
                logits_of((40, 11), dtype),
                part,
                1,
                lambda x, g=given: F.cross_entropy(x, target, **g),
                lambda x, g=given: vocabulary.cross_entropy(x, target, part, **g),
            )
    for dtype, autocast in itertools.product(TOLERANCE, (False, True)):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            _softmaxes(compare, part, logits_of((6, 11), dtype), -1, f"{dtype} autocast {autocast}")
    exact = F.cross_entropy(logits_of((40, 11), torch.bfloat16).double(), target)
    x = local(logits_of((40, 11), torch.bfloat16), part, 1)
    compare.tensors("bf16 sums in fp32", vocabulary.cross_entropy(x, target, part), exact.bfloat16(), 1e-2)


def _softmaxes(compare: Compare, part: VocabularyPart, x: Tensor, dim: int, name: str) -> None:
    name, dim_ = f"{name} {tuple(x.shape)} {dim}", dim % x.dim()
    compare.functions(
        f"log_softmax {name}",
        x,
        part,
        dim_,
        lambda x: F.log_softmax(x, dim),
        lambda x: vocabulary.log_softmax(x, part, dim),
        sharded=True,
        padding=-torch.inf,
    )
    compare.functions(
        f"softmax {name}",
        x,
        part,
        dim_,
        lambda x: F.softmax(x, dim),
        lambda x: vocabulary.softmax(x, part, dim),
        sharded=True,
    )
    compare.functions(
        f"float softmax {name}",
        x,
        part,
        dim_,
        lambda x: F.softmax(x, dim, dtype=torch.float32),
        lambda x: vocabulary.softmax(x, part, dim, dtype=torch.float32),
        sharded=True,
        tolerance=max(TOLERANCE[x.dtype], 1e-4),
    )
    for keepdim in (False, True):
        compare.functions(
            f"logsumexp {name} {keepdim}",
            x,
            part,
            dim_,
            lambda x, k=keepdim: torch.logsumexp(x, dim, keepdim=k),
            lambda x, k=keepdim: vocabulary.logsumexp(x, part, dim, keepdim=k),
        )
        mine = vocabulary.argmax(local(x, part, dim_), part, dim, keepdim)
        compare.tensors(f"argmax {name} {keepdim}", mine, x.argmax(dim, keepdim), 0.0)


def _all_softmaxes(compare: Compare, group: Any) -> None:
    for total in TOTALS:
        part = vocabulary_part(total, group)
        for shape, dim in (((total,), 0), ((3, total), -1), ((3, total, 4), 1), ((2, 3, total), 2)):
            _softmaxes(compare, part, logits_of(shape), dim, "")


def _special_values(compare: Compare, group: Any) -> None:
    part = vocabulary_part(11, group)
    ties = torch.zeros(4, 11)
    ties[1, [3, 7, 10]] = 1.0
    ties[2, 1:] = 1.0
    ties[3, [5, 6]] = 2.0
    compare.tensors("ties", vocabulary.argmax(local(ties, part, 1), part), ties.argmax(-1), 0.0)
    x = logits_of((8, 11))
    x[0, 2:] = -torch.inf  # only the first rank has any
    x[1, :10] = -torch.inf
    x[2, 4] = torch.nan
    x[3, [1, 9]] = torch.inf
    x[4, 8], x[4, 2] = torch.nan, torch.inf
    x[5] = -torch.inf
    compare.tensors("argmax of special values", vocabulary.argmax(local(x, part, 1), part), x.argmax(-1), 0.0)
    target = torch.tensor([0, 10, 1, 2, 3, 4, 5, 6])
    for rows in ([0, 1, 6], [0, 7], [2, 3, 4, 5]):
        for smoothing in (0.0, 0.1):
            compare.functions(
                f"cross_entropy of special values {rows} {smoothing}",
                x[rows],
                part,
                1,
                lambda x, r=rows, s=smoothing: F.cross_entropy(x, target[r], reduction="none", label_smoothing=s),
                lambda x, r=rows, s=smoothing: vocabulary.cross_entropy(
                    x, target[r], part, reduction="none", label_smoothing=s
                ),
            )
    mine = vocabulary.logsumexp(local(x, part, 1), part)
    compare.tensors("logsumexp of special values", mine, torch.logsumexp(x, -1), 1e-12)
    huge = 1e4 * logits_of((5, 11), torch.float32)
    compare.functions(
        "cross_entropy of large logits",
        huge,
        part,
        1,
        lambda x: F.cross_entropy(x, target[:5]),
        lambda x: vocabulary.cross_entropy(x, target[:5], part),
    )
    compare.functions(
        "uint8 targets",
        logits_of((8, 11)),
        part,
        1,
        lambda x: F.cross_entropy(x, target.to(torch.uint8)),
        lambda x: vocabulary.cross_entropy(x, target.to(torch.uint8), part),
    )
    compare.functions(
        "no samples",
        logits_of((0, 11)),
        part,
        1,
        lambda x: F.cross_entropy(x, target[:0], reduction="sum"),
        lambda x: vocabulary.cross_entropy(x, target[:0], part, reduction="sum"),
    )


def _embeddings(compare: Compare, group: Any) -> None:
    for total, sparse, by_frequency, padding, max_norm in itertools.product(
        TOTALS, (False, True), (False, True), (None, 0, -1), (None, 1.0)
    ):
        part = vocabulary_part(total, group)
        ids = torch.randint(0, total, (3, 5), generator=generator(5)) // 2
        ids[0, 0] = total - 1
        table = logits_of((total, 6)).requires_grad_()
        rows = local(table, part, 0, padding=100.0)
        given = torch.randn(3, 5, 6, dtype=torch.float64, generator=generator(6))
        options = {"padding_idx": padding, "max_norm": max_norm, "sparse": sparse, "scale_grad_by_freq": by_frequency}
        if sparse and by_frequency:
            continue  # torch has none
        expected = F.embedding(ids, table, **options)
        value = vocabulary.embedding(ids, rows, part, **options)
        expected.backward(given)
        value.backward(given)
        name = f"embedding {total} {options}"
        compare.tensors(name, value.detach(), expected.detach(), 1e-12)
        whole_gradient, gradient = table.grad, rows.grad
        if sparse:
            whole_gradient, gradient = whole_gradient.coalesce(), gradient.coalesce()
            indices = whole_gradient.indices()[0]
            here = indices[(indices >= part.start) & (indices < part.start + part.size)] - part.start
            compare.tensors(f"{name}, sparse rows", gradient.indices()[0], here, 0.0)
            whole_gradient, gradient = whole_gradient.to_dense(), gradient.to_dense()
        compare.tensors(f"{name}, gradient", gradient, local(whole_gradient, part, 0, padding=0.0), 1e-12)
        compare.tensors(f"{name}, weight", rows.detach(), local(table.detach(), part, 0, padding=100.0), 1e-12)


def _refusals(compare: Compare, group: Any) -> None:
    part = vocabulary_part(11, group)
    x, target = torch.zeros(2, part.size), torch.tensor([1, 2])
    wrong: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (IndexError, "out of bounds", lambda: vocabulary.cross_entropy(x, torch.tensor([1, 11]), part)),
        (IndexError, "out of bounds", lambda: vocabulary.cross_entropy(x, torch.tensor([-1, 0]), part)),
        (IndexError, "out of bounds", lambda: vocabulary.nll_loss(x, torch.tensor([1, 12]), part)),
        (IndexError, "out of bounds", lambda: vocabulary.embedding(torch.tensor(11), torch.zeros(part.size, 2), part)),
        (ValueError, "rows", lambda: vocabulary.embedding(target, torch.zeros(11, 2), part)),
        (ValueError, "padding_idx", lambda: vocabulary.embedding(target, torch.zeros(part.size, 2), part, 11)),
        (ValueError, "columns", lambda: vocabulary.cross_entropy(torch.zeros(2, 11), target, part)),
        (ValueError, "shape", lambda: vocabulary.cross_entropy(x, torch.tensor([1]), part)),
        (TypeError, "int64", lambda: vocabulary.cross_entropy(x, target.int(), part)),
        (TypeError, "class numbers", lambda: vocabulary.cross_entropy(x, x, part)),
        (ValueError, "reduction", lambda: vocabulary.cross_entropy(x, target, part, reduction="max")),
        (ValueError, "label_smoothing", lambda: vocabulary.cross_entropy(x, target, part, label_smoothing=2.0)),
        (ValueError, "shape", lambda: vocabulary.cross_entropy(x, target, part, weight=torch.ones(part.size))),
        (
            ValueError,
            "detach",
            lambda: vocabulary.cross_entropy(x, target, part, weight=torch.ones(11, requires_grad=True)),
        ),
    ]
    for kind, words, call in wrong:
        with pytest.raises(kind, match=words):
            call()


class _Counted:
    """Counts the collectives and the numbers they carry."""

    def __enter__(self) -> list[int]:
        self.sizes: list[int] = []
        self.original = dist.all_reduce

        def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.sizes.append(tensor.numel())
            return self.original(tensor, *args, **kwargs)

        dist.all_reduce = counted
        return self.sizes

    def __exit__(self, *_: Any) -> None:
        dist.all_reduce = self.original


def _communication(compare: Compare, group: Any) -> dict[str, list[int]]:
    part = vocabulary_part(12, group)
    x = logits_of((5, part.size)).requires_grad_()
    target = torch.arange(5)
    seen = {}
    for name, call in {
        "cross_entropy": lambda: vocabulary.cross_entropy(x, target, part),
        "smoothed": lambda: vocabulary.cross_entropy(x, target, part, label_smoothing=0.1),
        "nll_loss": lambda: vocabulary.nll_loss(x, target, part),
        "log_softmax": lambda: vocabulary.log_softmax(x, part),
        "logsumexp": lambda: vocabulary.logsumexp(x, part),
        "argmax": lambda: vocabulary.argmax(x, part),
        "embedding": lambda: vocabulary.embedding(target, x, vocabulary_part(5 * group.size(), group)),
    }.items():
        with _Counted() as sizes:
            value = call()
            sizes.append(-1)
            if value.requires_grad:
                value.sum().backward()
        seen[name] = sizes
    with FakeTensorMode(allow_non_fake_inputs=True), _Counted() as sizes:
        fake = torch.zeros(5, part.size, requires_grad=True)
        whole = vocabulary.embedding(torch.zeros(5, dtype=torch.int64), torch.zeros(part.size, 3), part)
        for value in (
            vocabulary.cross_entropy(fake, target, part, label_smoothing=0.1),
            vocabulary.nll_loss(fake, target, part, reduction="none"),
            vocabulary.log_softmax(fake, part),
            vocabulary.logsumexp(fake, part),
            whole,
        ):
            assert isinstance(value, FakeTensor)
        assert vocabulary.argmax(fake, part).shape == (5,) and whole.shape == (5, 3)
        seen["absent values"] = sizes
    return seen


def _all(rank: int, world_size: int) -> tuple[list[str], int, dict[str, list[int]]]:
    compare, group = Compare(), dist.group.WORLD
    for check in (_cross_entropies, _dtypes, _all_softmaxes, _special_values, _embeddings, _refusals):
        check(compare, group)
    return compare.found, compare.count, _communication(compare, group)


@pytest.mark.parametrize("ranks", [2, 3])
def test_as_on_the_whole_vocabulary(ranks: int) -> None:
    for found, count, sizes in run_ranks(_all, ranks):
        assert not found, f"{len(found)} of {count}:\n" + "\n".join(found[:20])
        assert count > 2000
        assert sizes == {
            "cross_entropy": [5, 2 * 5, -1],
            "smoothed": [5, 3 * 5, -1],
            "nll_loss": [5, -1],
            "log_softmax": [5, 5, -1, 5],
            "logsumexp": [5, 5, -1],
            "argmax": [2 * 5, 5, -1],
            "embedding": [5 * (12 // ranks), -1],
            "absent values": [],
        }, "only what one class is worth travels; nothing in the backward of a loss"


def test_parts() -> None:
    class Group:
        def __init__(self, rank: int) -> None:
            self._rank = rank

        def rank(self) -> int:
            return self._rank

        def size(self) -> int:
            return 3

    parts = [vocabulary_part(4, Group(rank)) for rank in range(3)]  # type: ignore[arg-type]
    assert [(part.start, part.size, part.real) for part in parts] == [(0, 2, 2), (2, 2, 2), (4, 2, 0)]
