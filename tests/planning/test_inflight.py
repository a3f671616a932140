"""Micro-batches in flight, from the schedules' own order of work."""

import pytest

from lnn_lightning.parallel.pipeline.schedules import place
from lnn_lightning.planning.inflight import peak_bytes


def peaks(schedule: str, ranks: int, microbatches: int, stages_per_rank: int = 1, split: bool = False) -> list[int]:
    """Micro-batches that each rank holds at most."""
    placement = place(schedule, ranks, stages_per_rank)
    one = dict.fromkeys(range(placement.num_stages), 1)
    splits = dict.fromkeys(one, split)
    return [peak_bytes(placement, rank, microbatches, one, splits) for rank in range(ranks)]


@pytest.mark.parametrize("microbatches", [1, 2, 4, 8])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_one_stage_a_rank(ranks: int, microbatches: int) -> None:
    expected = [min(ranks - rank, microbatches) for rank in range(ranks)]
    if microbatches < ranks:  # torch's 1F1B refuses so few: GPipe's order
        expected = [microbatches] * ranks
    assert peaks("1f1b", ranks, microbatches) == expected
    assert peaks("gpipe", ranks, microbatches) == [1 if ranks == 1 else microbatches] * ranks


def test_interleaved_holds_more_on_the_first_ranks() -> None:
    """PTD-P, section 2.2: all micro-batches of a warm-up over the rank's stages."""
    found = peaks("interleaved", 2, 8, 2)
    assert found == sorted(found, reverse=True) and found[0] == (2 - 1) * 2 + (2 - 1) * 2 + 1


def test_weight_backward_made_later_holds_longer() -> None:
    whole, split = (peaks("zero_bubble", 4, 8, split=each) for each in (False, True))
    assert all(later >= sooner for later, sooner in zip(split, whole, strict=True)) and split != whole


def test_bytes_by_stage() -> None:
    placement = place("interleaved", 2, 2)
    assert peak_bytes(placement, 1, 2, {1: 10, 3: 1}) == 21  # 1F0 1F1 3F0 3B0 3F1 ...
