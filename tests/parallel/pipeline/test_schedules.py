"""Schedules by name: where stages sit, how many micro-batches, and that torch's schedules take them."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from lnn_lightning.parallel.errors import LayoutError, StepError
from lnn_lightning.parallel.pipeline.schedules import SCHEDULES, Placement, place

STAGES_PER_RANK = {
    "naive": [1],
    "gpipe": [1, 2, 3],
    "1f1b": [1, 2, 3],
    "interleaved": [2, 3],
    "zero_bubble": [1, 2, 3],
    "zbv": [2],
}
PLACEMENTS = [
    place(name, ranks, each) for name, many in STAGES_PER_RANK.items() for each in many for ranks in (2, 3, 4)
]


def label(placement: Placement) -> str:
    return f"{placement.name}-{placement.ranks}x{placement.stages_per_rank}"


# ------------------------------------------------------------------------------------------------ placement


def test_names() -> None:
    assert list(SCHEDULES) == ["naive", "gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"]


@pytest.mark.parametrize(
    ("name", "ranks", "given", "stages_per_rank"),
    [
        ("1f1b", 4, 1, 1),
        ("1f1b", 4, 2, 2),
        ("interleaved", 2, 1, 2),
        ("interleaved", 2, 3, 3),
        ("zbv", 2, 1, 2),
        ("zbv", 4, 2, 2),
        ("zero_bubble", 4, 1, 1),
        ("naive", 4, 1, 1),
    ],
)
def test_stages_per_rank(name: str, ranks: int, given: int, stages_per_rank: int) -> None:
    placement = place(name, ranks, given)
    assert (placement.name, placement.ranks, placement.stages_per_rank) == (name, ranks, stages_per_rank)
    assert placement.num_stages == ranks * stages_per_rank


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_rank_is_one_stage(name: str) -> None:
    placement = place(name, 1, 1)
    assert placement.num_stages == 1
    assert placement.stages_of(0) == (0,)
    assert place("interleaved", 1, 3).num_stages == 1


def test_stages_go_round_or_down_and_up() -> None:
    assert [place("interleaved", 3, 2).stages_of(rank) for rank in range(3)] == [(0, 3), (1, 4), (2, 5)]
    assert [place("zbv", 3, 2).stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert [place("zero_bubble", 3, 1).rank_of(stage) for stage in range(3)] == [0, 1, 2]
    assert place("zbv", 3, 2).rank_of(5) == 0, "the last stage of a V is on the first rank"


@pytest.mark.parametrize("placement", PLACEMENTS, ids=label)
def test_every_stage_is_on_one_rank(placement: Placement) -> None:
    owned = [placement.stages_of(rank) for rank in range(placement.ranks)]
    assert sorted(stage for stages in owned for stage in stages) == list(range(placement.num_stages))
    assert all(placement.rank_of(stage) == rank for rank, stages in enumerate(owned) for stage in stages)
    assert all(len(stages) == placement.stages_per_rank for stages in owned)


@pytest.mark.parametrize(
    ("name", "ranks", "stages_per_rank", "words"),
    [
        (
            "1f2b",
            2,
            1,
            ["`schedule='1f2b'` is unknown", "'naive', 'gpipe', '1f1b', 'interleaved', 'zero_bubble', 'zbv'"],
        ),
        ("pipedream", 2, 1, ["`schedule='pipedream'` is unknown"]),
        ("zbv", 2, 3, ["`schedule='zbv'`", "exactly two stages a rank"]),
        ("naive", 2, 2, ["`schedule='naive'`", "one stage a rank", "`stages_per_rank=2`"]),
        ("1f1b", 2, 0, ["`stages_per_rank`", "at least 1, got 0"]),
        ("1f1b", 2, 1.5, ["`stages_per_rank`", "got 1.5"]),
        ("1f1b", 1, -1, ["`stages_per_rank`", "got -1"]),
    ],
)
def test_refusals(name: str, ranks: int, stages_per_rank: Any, words: list[str]) -> None:
    with pytest.raises(LayoutError) as caught:
        place(name, ranks, stages_per_rank)
    for word in words:
        assert word in str(caught.value)


# ------------------------------------------------------------------------------------------------ micro-batches


@pytest.mark.parametrize(
    ("name", "ranks", "batch_size", "wanted", "count"),
    [
        ("1f1b", 2, 32, "auto", 8),
        ("1f1b", 2, 4, "auto", 4),
        ("1f1b", 4, 32, "auto", 16),
        ("1f1b", 2, 7, 4, 1),
        ("1f1b", 2, 6, 4, 3),
        ("1f1b", 2, 9, 4, 3),
        ("1f1b", 2, 10, 4, 2),
        ("1f1b", 2, 1, 8, 1),
        ("gpipe", 2, 15, 6, 5),
        ("naive", 2, 32, "auto", 1),
        ("naive", 2, 32, 8, 1),
        ("interleaved", 2, 6, 3, 3),
        ("interleaved", 2, 10, 5, 2),
        ("interleaved", 3, 8, 8, 8),
        ("interleaved", 3, 7, 7, 1),
        ("zero_bubble", 2, 15, 5, 3),
        ("zbv", 2, 15, 5, 5),
        ("1f1b", 1, 32, "auto", 1),
        ("1f1b", 1, 32, 4, 4),
    ],
)
def test_microbatches(name: str, ranks: int, batch_size: int, wanted: int | str, count: int) -> None:
    assert place(name, ranks, 1).microbatches(batch_size, wanted) == count


def test_without_a_batch_dimension() -> None:
    placement = place("1f1b", 2, 1)
    assert placement.microbatches(None, 1) == 1
    assert place("naive", 2, 1).microbatches(None, "auto") == 1
    assert place("1f1b", 1, 1).microbatches(None, "auto") == 1
    for wanted in ("auto", 4):
        with pytest.raises(StepError, match=r"no batch dimension.*microbatches=1"):
            placement.microbatches(None, wanted)


class FakeStage(SimpleNamespace):
    """What torch's schedules look at when they are made."""

    def __init__(self, stage: int, placement: Placement) -> None:
        super().__init__(
            stage_index=stage,
            num_stages=placement.num_stages,
            group_size=placement.ranks,
            group_rank=placement.rank_of(stage),
            is_first=stage == 0,
            is_last=stage == placement.num_stages - 1,
            submod=nn.Identity(),
        )


def orders(placement: Placement, count: int) -> dict[int, list[Any]]:
    """What every rank does, from the schedules of torch that the placement builds."""
    result = {}
    for rank in range(placement.ranks):
        schedule = placement.build([FakeStage(stage, placement) for stage in placement.stages_of(rank)], count)
        assert schedule._n_microbatches == count
        assert schedule.scale_grads is False
        result[rank] = schedule.pipeline_order[rank]
    return result


@pytest.mark.parametrize("placement", PLACEMENTS, ids=label)
def test_torch_takes_every_number_chosen(placement: Placement) -> None:
    """Every stage runs every micro-batch forward and backward once, on the rank that the placement says."""
    for batch_size in (1, 2, 3, 5, 6, 7, 8, 9, 12, 13):
        for wanted in (1, 2, 3, 4, 5, 7, 8, 16, "auto"):
            count = placement.microbatches(batch_size, wanted)
            assert batch_size % count == 0
            assert wanted == "auto" or count <= wanted
            for rank, actions in orders(placement, count).items():
                if placement.stages_per_rank == 1 and placement.name == "1f1b":
                    continue  # what torch writes down there is not what it runs
                done: dict[str, list[tuple[int, int]]] = {kind: [] for kind in ("F", "B", "I", "W")}
                for action in actions:
                    if action is not None and action.computation_type.value in done:
                        done[action.computation_type.value].append((action.stage_index, action.microbatch_index))
                expected = sorted((stage, index) for stage in placement.stages_of(rank) for index in range(count))
                assert sorted(done["F"]) == expected
                assert sorted(done["B"] + done["I"]) == expected
                assert sorted(done["I"]) == sorted(done["W"])
                assert bool(done["I"]) <= placement.kind.splits_backward


@pytest.mark.parametrize(
    ("name", "stages_per_rank", "count", "kind"),
    [
        ("naive", 1, 1, "ScheduleGPipe"),
        ("gpipe", 1, 4, "ScheduleGPipe"),
        ("gpipe", 2, 4, "ScheduleLoopedBFS"),
        ("1f1b", 1, 4, "Schedule1F1B"),
        ("1f1b", 1, 1, "ScheduleGPipe"),
        ("1f1b", 2, 4, "ScheduleInterleaved1F1B"),
        ("interleaved", 2, 4, "ScheduleInterleaved1F1B"),
        ("zero_bubble", 1, 4, "ScheduleInterleavedZeroBubble"),
        ("zbv", 2, 4, "ScheduleZBVZeroBubble"),
    ],
)
def test_which_of_torchs_schedules_runs(name: str, stages_per_rank: int, count: int, kind: str) -> None:
    placement = place(name, 2, stages_per_rank)
    stages = [FakeStage(stage, placement) for stage in placement.stages_of(0)]
    assert type(placement.build(stages, count)).__name__ == kind
