"""Which data rank updates what, and that the user's optimizer stays."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lnn_lightning.optim.shares import OptimizerShare, deal
from tests.helpers.ranks import run_ranks


def test_dealt_largest_first_to_who_has_least() -> None:
    loads = [0, 0]
    assert deal([1, 5, 3, 3], loads) == [0, 0, 1, 1]
    assert sorted(loads) == [6, 6]
    assert deal([2], loads) == [0], "goes on where it was"


class WholeMatrix(torch.optim.Optimizer):
    """Not elementwise: each step divides by the norm of the parameter's gradient."""

    def __init__(self, params: Any, lr: float, note: str) -> None:
        super().__init__(params, {"lr": lr, "note": note})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= group["lr"] * parameter.grad / parameter.grad.norm()


def _trained(rank: int, world_size: int, share: bool, set_to_none: bool) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 700), nn.Linear(700, 500), nn.Linear(500, 3))
    late = nn.Linear(3, 3)
    optimizer = WholeMatrix(model.parameters(), lr=0.1, note="a signature of its own")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    shared = OptimizerShare(optimizer, dist.group.WORLD if share else None)
    shared.adopt()
    held = sum(p.numel() for p in optimizer.param_groups[0]["params"])
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": list(late.parameters()), "lr": 0.3})
            scheduler.base_lrs.append(0.3)
            shared.adopt()
        optimizer.zero_grad(set_to_none=set_to_none)
        everything = [*model.parameters(), *(late.parameters() if step >= 2 else ())]
        assert all(p.grad is None or not p.grad.any() for p in everything), "dropped on all ranks"
        late(model(torch.ones(2, 5))).square().sum().backward()
        optimizer.step()
        scheduler.step()
    return held, [p.detach().clone() for p in [*model.parameters(), *late.parameters()]]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_any_optimizer_with_its_scheduler_and_late_groups(set_to_none: bool) -> None:
    (whole, expected), *_ = run_ranks(_trained, 1, False, set_to_none)
    results = run_ranks(_trained, 3, True, set_to_none)
    assert sum(held for held, _ in results) == whole and max(held for held, _ in results) < whole
    for _, parameters in results:
        assert all(torch.equal(got, one) for got, one in zip(parameters, expected, strict=True))
