"""Streams of random numbers that differ between tensor ranks, and one that does not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lnn_lightning.parallel.tensor.randomness import forked_rng
from tests.helpers.ranks import run_ranks

CPU = torch.device("cpu")
DEVICES = [CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]


def rand(device: torch.device, n: int = 8) -> Tensor:
    return torch.rand(n, device=device)


def streams(device: torch.device, rank: int, inside: int = 3) -> tuple[Tensor, list[Tensor]]:
    """What is drawn outside and inside of three forks, `inside` numbers each."""
    torch.manual_seed(7)
    outside, own = [rand(device)], []
    for _ in range(3):
        with forked_rng(device, rank):
            own.append(rand(device, inside))
        outside.append(rand(device))
    return torch.cat(outside), own


@pytest.mark.parametrize("device", DEVICES)
def test_the_outside_is_the_same_on_every_rank(device: torch.device) -> None:
    outside, _ = streams(device, 0)
    assert outside.unique().numel() == outside.numel()
    for rank, inside in ((0, 3), (1, 3), (2, 1000), (0, 1)):
        assert torch.equal(streams(device, rank, inside)[0], outside)


@pytest.mark.parametrize("device", DEVICES)
def test_the_inside_is_each_ranks_own(device: torch.device) -> None:
    numbers = torch.cat([x for rank in range(4) for x in streams(device, rank)[1]] + [streams(device, 0)[0]])
    assert numbers.unique().numel() == numbers.numel(), "nothing is drawn twice"
    again = [x for rank in range(4) for x in streams(device, rank)[1]]
    assert torch.equal(torch.cat(again), numbers[: 4 * 3 * 3]), "but the same from the same state"


@pytest.mark.parametrize("device", DEVICES)
def test_the_stream_outside_moves(device: torch.device) -> None:
    torch.manual_seed(7)
    unforked = rand(device)
    torch.manual_seed(7)
    with forked_rng(device, 0):
        pass
    assert not torch.equal(rand(device), unforked)


@pytest.mark.parametrize("device", DEVICES)
def test_nested_and_failing(device: torch.device) -> None:
    def run(rank: int, fail: bool) -> tuple[Tensor, list[Tensor]]:
        torch.manual_seed(7)
        own = []
        try:
            with forked_rng(device, rank):
                own.append(rand(device))
                with forked_rng(device, rank):
                    own.append(rand(device))
                if fail:
                    raise KeyError
                own.append(rand(device))
        except KeyError:
            pass
        return rand(device), own

    first, second, failed = run(0, False), run(1, False), run(1, True)
    assert torch.equal(first[0], second[0]) and torch.equal(first[0], failed[0])
    numbers = torch.cat([*first[1], *second[1]])
    assert numbers.unique().numel() == numbers.numel()


def test_other_generators_are_left_alone() -> None:
    own = torch.Generator().manual_seed(3)
    expected = torch.rand(4, generator=torch.Generator().manual_seed(3))
    with forked_rng(CPU, 1):
        assert torch.equal(torch.rand(4, generator=own), expected)
    before = torch.get_rng_state()
    with forked_rng(torch.device("meta"), 1):
        pass
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("mode", [FakeTensorMode, TorchDispatchMode, lambda: torch.device("meta")])
def test_modes_do_not_matter(mode: Callable[[], Any]) -> None:
    torch.manual_seed(7)
    with forked_rng(CPU, 1):
        expected = torch.get_rng_state()
    after = torch.get_rng_state()
    torch.manual_seed(7)
    with mode():
        context = forked_rng(CPU, 1)
        context.__enter__()
        inside = torch.default_generator.get_state()
        context.__exit__(None, None, None)
    assert torch.equal(inside, expected) and torch.equal(torch.get_rng_state(), after)


class Dropping(nn.Module):
    """Dropout of whole and of cut activations in turn."""

    def __init__(self, device: torch.device, rank: int) -> None:
        super().__init__()
        self.rank, self.device = rank, device
        self.linear = nn.Linear(8, 8, device=device)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        whole = F.dropout(self.linear(x), 0.5)
        with forked_rng(self.device, self.rank):
            cut = F.dropout(torch.tanh(whole) + 1.0, 0.5)
        return F.dropout(whole + 1.0, 0.5), cut


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_draw_the_same_again(reentrant: bool, device: torch.device) -> None:
    seen = []
    for recompute in (False, True):
        torch.manual_seed(5)
        model = Dropping(device, 1)
        x = torch.ones(16, 8, device=device, requires_grad=True)
        whole, cut = checkpoint(model, x, use_reentrant=reentrant) if recompute else model(x)
        rand(device)  # the state has moved on when backward recomputes
        (whole * cut).sum().backward()
        seen.append((whole, cut, x.grad, model.linear.weight.grad, rand(device)))
    for plain, recomputed in zip(*seen, strict=True):
        assert torch.equal(plain, recomputed)
    assert seen[0][2].abs().sum() > 0


def _dropping(rank: int, world_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(5)
    model = Dropping(CPU, rank)
    whole, cut = model(torch.ones(64, 8))
    if rank == 1:
        assert dist.get_rank() == 1
        with forked_rng(CPU, rank):
            torch.rand(100)
    else:
        with forked_rng(CPU, rank):
            pass
    return whole.detach(), cut.detach(), model.linear(torch.ones(1, 8)).detach(), torch.rand(4)


def test_on_ranks() -> None:
    first, second = run_ranks(_dropping, 2)
    assert torch.equal(first[0], second[0]), "whole activations drop the same"
    kept = [x[1] != 0 for x in (first, second)]
    agree = float((kept[0] == kept[1]).double().mean())
    assert 0.4 < agree < 0.6, "cut ones do not"
    assert torch.equal(first[3], second[3])
