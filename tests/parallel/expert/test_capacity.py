"""Capacity against the literal loop of GShard's algorithm 1."""

import pytest
import torch

from lnn_lightning.parallel.expert.capacity import capacity_of, within_capacity


def _literal(expert: list[list[int]], experts: int, capacity: int) -> list[list[int]]:
    taken = [[-1] * len(row) for row in expert]
    room = [capacity] * experts
    for choice in range(len(expert[0])):
        for token, row in enumerate(expert):
            each = row[choice]
            if 0 <= each < experts and room[each]:
                room[each] -= 1
                taken[token][choice] = each
    return taken


@pytest.mark.parametrize("capacity", [0, 1, 3, 100])
def test_first_choices_come_before_second_ones_and_those_in_order(capacity: int) -> None:
    expert = torch.randint(-1, 6, (40, 3), generator=torch.Generator().manual_seed(capacity))
    assert within_capacity(expert, None, 5, capacity).tolist() == _literal(expert.tolist(), 5, capacity)


def test_weights_tell_which_choice_is_the_first() -> None:
    random = torch.Generator().manual_seed(0)
    expert, weights = torch.randint(0, 3, (30, 2), generator=random), torch.rand(30, 2, generator=random)
    swapped = weights[:, 1] > weights[:, 0]
    sorted_by_weight = torch.where(swapped[:, None], expert.flip(1), expert)
    wanted = torch.tensor(_literal(sorted_by_weight.tolist(), 3, 4))
    wanted = torch.where(swapped[:, None], wanted.flip(1), wanted)
    assert torch.equal(within_capacity(expert, weights, 3, 4), wanted)


def test_no_tokens_and_rounding() -> None:
    assert within_capacity(torch.zeros(0, 2, dtype=torch.long), None, 3, 4).shape == (0, 2)
    assert capacity_of(10, 4, 2, 1.0) == 5
    assert capacity_of(10, 4, 1, 1.25) == 4  # 3.125, rounded up
    assert capacity_of(50, 11, 1, 1.1) == 5 and capacity_of(100, 33, 1, 3 * 1.1) == 10  # no more in floating point
    assert capacity_of(1, 8, 1, 1e-9) == 1
