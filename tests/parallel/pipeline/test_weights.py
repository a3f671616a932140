"""Micro-batches and data ranks weighed so that the result is the whole batch's."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.pipeline.weights import Weights, weigh
from lnn_lightning.parallel.step.losses import LossCall
from lnn_lightning.parallel.step.plan import Plan
from lnn_lightning.parallel.step.trace import Trace
from tests.helpers.ranks import RanksFailed, run_ranks

CPU = torch.device("cpu")
CLASSES = 3
FAKE_MODE = FakeTensorMode(allow_non_fake_inputs=True)

Batch = dict[str, Tensor]


def call(leaf: int | None = 1, weighted: bool = False, inside: bool = False) -> LossCall:
    return LossCall(ignore_index=-100, batch_leaf=leaf, weighted=weighted, inside=inside)


def losses_of(part: Batch, logits: Tensor) -> Tensor:
    return F.cross_entropy(logits, part["y"])


def weigh_parts(
    parts: list[Batch],
    calls: list[LossCall],
    form: Any = "mean",
    step: Callable[[Batch, Tensor], Any] = losses_of,
    tail_error: Exception | None = None,
) -> tuple[Weights, int]:
    """The weights, and how many dry runs were needed."""
    runs = []

    @contextmanager
    def dry_run(index: int) -> Iterator[Callable[[], Any]]:
        runs.append(index)
        with FAKE_MODE:
            absent = torch.empty(len(parts[index]["y"]), CLASSES)
        yield lambda: step(parts[index], absent)

    plan = Plan(Trace([], losses=calls, tail_error=tail_error), (), (), FAKE_MODE, CPU)
    batch = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    weights = weigh(batch, parts, [plan] * len(parts), dry_run, form, dist.group.WORLD, CPU)
    return weights, len(runs)


def parts_of(*targets: list[int]) -> list[Batch]:
    return [{"x": torch.zeros(len(each), 2), "y": torch.tensor(each)} for each in targets]


def one_rank(rank: int, world_size: int, what: str) -> Any:
    """What a rank gets in the case `what`."""
    ignored = parts_of([0, 1], [-100, 2]) if rank == 0 else parts_of([-100, -100], [1, 2])
    complete = parts_of([0, 1], [1, 2])
    if what == "complete":
        return weigh_parts(complete, [call()])
    if what == "ignored on both":
        return weigh_parts(ignored, [call()])
    if what == "ignored on one":
        return weigh_parts(ignored if rank == 0 else complete, [call()])
    if what == "ignored alike":
        return weigh_parts(parts_of([-100, 1], [1, -100]), [call()])
    if what == "other sizes":
        return weigh_parts(parts_of([0], [1], [2]) if rank == 0 else parts_of([0]), [call()])
    if what == "other sizes, ignored":
        return weigh_parts(parts_of([0, 1, 2], [-100, 2, 2]) if rank == 0 else parts_of([-100, 1]), [call()])
    if what == "sum":
        return weigh_parts(complete, [], "sum")
    if what == "sum, other sizes":
        return weigh_parts(parts_of([0], [1], [2]) if rank == 0 else parts_of([0]), [], "sum")
    if what == "other form":
        return weigh_parts(ignored, [call()], "other")
    if what == "computed targets":
        doubled = lambda part, logits: F.cross_entropy(logits, (part["y"] + 1) % 2)  # noqa: E731
        return weigh_parts(complete, [call(leaf=None)], step=doubled)
    if what == "two losses":

        def two(part: Batch, logits: Tensor) -> Tensor:
            return F.cross_entropy(logits, part["y"]) + F.cross_entropy(logits, part["y"].clamp(min=0), ignore_index=0)

        return weigh_parts(ignored, [call(), call(leaf=None)], step=two)
    if what == "class weights":
        weight = torch.tensor([1.0, 2.0, 4.0])
        weighted = lambda part, logits: F.cross_entropy(logits, part["y"], weight=weight)  # noqa: E731
        return weigh_parts(parts_of([0, 0], [1, 2]), [call(weighted=True)], step=weighted)
    if what == "tail fails behind":

        def fails(part: Batch, logits: Tensor) -> None:
            F.cross_entropy(logits, part["y"])
            raise ValueError("looks at what is not here")

        return weigh_parts(ignored, [call()], step=fails)
    if what == "tail not followed":
        return weigh_parts(ignored, [call()], tail_error=ValueError("no"))
    if what == "tail fails before":

        def fails_early(part: Batch, logits: Tensor) -> None:
            raise ValueError("looks at what is not here")

        return weigh_parts(ignored, [call()], step=fails_early)
    if what == "inside, ignored":
        return weigh_parts(ignored, [call(inside=True)])
    if what == "inside, complete":
        return weigh_parts(complete, [call(inside=True)])
    raise KeyError(what)


CASES = [
    *("complete", "ignored on both", "ignored on one", "ignored alike", "other sizes", "other sizes, ignored", "sum"),
    *("sum, other sizes", "other form", "computed targets", "two losses", "class weights", "tail fails behind"),
    *("tail not followed", "inside, complete"),
]


def _all_cases(rank: int, world_size: int) -> dict[str, Any]:
    return {what: one_rank(rank, world_size, what) for what in CASES}


@cache
def _results() -> list[dict[str, Any]]:
    return run_ranks(_all_cases, 2)


def all_weights(what: str) -> list[tuple[Weights, int]]:
    """By rank; all cases are run in one job."""
    return [found[what] for found in _results()]


def test_complete_targets_cost_no_dry_run() -> None:
    for weights, runs in all_weights("complete"):
        assert weights.microbatch == 0.5
        assert weights.losses is None
        assert runs == 0


@pytest.mark.parametrize(
    ("what", "valid"),
    [("ignored on both", [3, 2]), ("ignored on one", [3, 4]), ("ignored alike", None)],
)
def test_ignored_targets_of_unequal_number(what: str, valid: list[int] | None) -> None:
    """Data ranks average: sum over the targets here, times ranks over all valid targets."""
    for weights, runs in all_weights(what):
        assert weights.microbatch == 0.5
        assert runs == 2, "every rank counts if one must"
        if valid is None:
            assert weights.losses is None, "the same number everywhere"
            continue
        assert weights.losses is not None
        (factor,) = weights.losses
        assert factor * weights.microbatch == pytest.approx(2 / sum(valid))


def test_data_ranks_with_batches_of_other_sizes() -> None:
    first, second = (weights for weights, _ in all_weights("other sizes"))
    # three samples in three parts, and one: a quarter of the batch each, and the data ranks average
    assert first.microbatch == pytest.approx(2 * 3 / 4 / 3)
    assert second.microbatch == pytest.approx(2 * 1 / 4 / 1)
    assert first.losses is None or first.losses[0] * first.microbatch == pytest.approx(2 / 4)
    assert second.losses is None or second.losses[0] * second.microbatch == pytest.approx(2 / 4)


def test_other_sizes_and_ignored_targets() -> None:
    for weights, _ in all_weights("other sizes, ignored"):
        assert weights.losses is not None
        assert weights.losses[0] * weights.microbatch == pytest.approx(2 / (3 + 2 + 1))


@pytest.mark.parametrize("what", ["sum", "sum, other sizes"])
def test_a_sum_undoes_the_average_over_data_ranks(what: str) -> None:
    for weights, runs in all_weights(what):
        assert weights.microbatch == 2.0
        assert weights.losses is None
        assert runs == 0


def test_another_form_is_averaged() -> None:
    for weights, runs in all_weights("other form"):
        assert (weights.microbatch, weights.losses, runs) == (0.5, None, 0)


def test_computed_targets_are_counted() -> None:
    """None is ignored after all: means are right."""
    for weights, runs in all_weights("computed targets"):
        assert (weights.microbatch, weights.losses, runs) == (0.5, None, 2)


def test_each_loss_has_its_own_number() -> None:
    for weights, _ in all_weights("two losses"):
        assert weights.losses is not None
        assert len(weights.losses) == 2
        # targets [0, 1, -100, 2] and [-100, -100, 1, 2]: 5 valid, and 4 that are not zero once clamped
        for factor, valid in zip(weights.losses, [5, 4], strict=True):
            assert factor * weights.microbatch == pytest.approx(2 / valid)


def test_class_weights_count() -> None:
    for weights, _ in all_weights("class weights"):
        assert weights.losses is not None
        assert weights.losses[0] * weights.microbatch == pytest.approx(2 / (2 * (1 + 1 + 2 + 4)))


def test_an_error_behind_the_losses_does_no_harm() -> None:
    for weights, _ in all_weights("tail fails behind"):
        assert weights.losses is not None
        assert weights.losses[0] * weights.microbatch == pytest.approx(2 / 5)


def test_a_tail_that_could_not_be_followed_is_left_alone() -> None:
    for weights, runs in all_weights("tail not followed"):
        assert (weights.microbatch, weights.losses, runs) == (0.5, None, 0)


def test_an_error_before_the_losses_is_refused() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(one_rank, 1, "tail fails before")
    assert "could not be followed to its loss" in caught.value.tracebacks[0]
    assert "looks at what is not here" in caught.value.tracebacks[0]


def test_ignored_targets_within_a_block() -> None:
    for weights, runs in all_weights("inside, complete"):
        assert (weights.microbatch, weights.losses, runs) == (0.5, None, 0)
    with pytest.raises(RanksFailed) as caught:
        run_ranks(one_rank, 1, "inside, ignored")
    text = caught.value.tracebacks[0]
    assert StepError.__name__ in text
    assert "A block computes a mean loss itself" in text
    assert "(-100)" in text
    assert "`microbatches=1`" in text


def test_one_rank_one_part_needs_nothing() -> None:
    (weights, runs), *_ = run_ranks(_whole, 1)
    assert weights == Weights(1.0)
    assert runs == 0


def _whole(rank: int, world_size: int) -> Any:
    return weigh_parts(parts_of([0, -100, 2, -100]), [call(inside=True)])
