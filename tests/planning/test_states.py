"""Optimizer state, counted without data."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lnn_lightning.planning.states import held, optimizer_bytes, storage_bytes


class Own(torch.optim.Optimizer):
    """A user's, with state of its own and an attribute."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.rank = 3

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("low", p.new_zeros(p.shape[0], self.rank))
                    p.sub_(p.grad * float(self.state[p]["low"].sum()))


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        lambda p: torch.optim.AdamW(p, fused=True, amsgrad=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.1),
        torch.optim.Adagrad,
        torch.optim.Adafactor,
        Own,
    ],
)
def test_state_is_what_a_step_makes(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    module = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
    module[1].weight.requires_grad_(False)
    optimizer = make([{"params": list(module[0].parameters())}, {"params": list(module[1].parameters())}])
    tensors = {id(p): held(p, p.requires_grad) for p in module.parameters()}
    expected = optimizer_bytes([optimizer], tensors, None)
    module(torch.randn(3, 8)).sum().backward()
    optimizer.step()
    made_at_once = isinstance(optimizer, torch.optim.Adagrad)  # for parameters that do not learn, too
    states = [state for p, state in optimizer.state.items() if p.requires_grad or made_at_once]
    assert expected == storage_bytes(tree_leaves(states))


def test_dealt_out_whole() -> None:
    module = nn.Linear(8, 8)
    tensors = {id(p): held(p, True) for p in module.parameters()}
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    assert [optimizer_bytes([optimizer], tensors, (rank, 2)) for rank in (0, 1)] == [64 * 4, 8 * 4]


def test_uneven_rows() -> None:
    parameter = nn.Parameter(torch.zeros(5, 3))
    rows = [held(parameter, True, 4, rank) for rank in range(4)]
    assert [each.shape for each in rows] == [(2, 3), (2, 3), (1, 3), (0, 3)]
    assert {each.bytes for each in rows} == {24}  # the last ones are padded
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    found = [optimizer_bytes([optimizer], {id(parameter): each}, (rank, 4)) for rank, each in enumerate(rows)]
    assert found == [24, 24, 12, 0]


def test_an_optimizer_that_cannot_step() -> None:
    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise ValueError("no")

    parameter = nn.Parameter(torch.zeros(2))
    with pytest.raises(RuntimeError, match="Broken did not step on tensors without data .*no"):
        optimizer_bytes([Broken([parameter], lr=0.1)], {id(parameter): held(parameter, True)}, None)
