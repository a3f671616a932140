"""Decisions made once: under recomputation by the strategy's settings and by ``torch.utils.checkpoint``."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lnn_lightning.memory.recompute_blocks import Segment
from lnn_lightning.memory.saved_tensors import Encoded, Saved, SavedTensors
from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.step.extension import UnitRun
from lnn_lightning.parallel.step.remember import Decisions, checkpoints_remember, in_second_run, remembered
from lnn_lightning.parallel.step.trace import Call


class Log(list[Any]):
    """A list that a recomputation does not put back, as it does with what modules note about themselves."""


class Fickle(nn.Module):
    """Chooses other rows every time it is asked, and draws random numbers in choosing."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, width, width))
        self.asked = Log()
        self.used = Log()
        self.second = Log()
        self.more = False

    def choose(self) -> Tensor:
        self.asked.append(torch.randint(0, 6, (5,)))
        return self.asked[-1]

    def forward(self, x: Tensor) -> Tensor:
        self.second.append(in_second_run())
        chosen = remembered(self.choose)
        self.used.append(chosen)
        if self.more and in_second_run():
            remembered(self.choose)
        x = torch.tanh(torch.einsum("nd,nde->ne", x, self.weight[chosen]))
        return torch.tanh(nn.functional.dropout(x, 0.5)) * 2  # the masks of both runs are the same


def by_segment(block: nn.Module, x: Tensor) -> Tensor:
    return Segment().run(UnitRun(0, 0, Call(0, "block", "block"), block), block, (x,), {})


def by_checkpoint(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)


def by_reentrant(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=True)


WAYS = [by_segment, by_checkpoint, by_reentrant]


def gradients(way: Callable[[nn.Module, Tensor], Tensor] | None, batches: int = 2, **settings: Any) -> Any:
    """Gradients of several micro-batches, of which all forwards are made before all backwards."""
    torch.manual_seed(0)
    block, x = Fickle(), torch.randn(batches, 5, 4, requires_grad=True)
    vars(block).update(settings)
    with checkpoints_remember():
        outs = [block(each) if way is None else way(block, each) for each in x]
        state = torch.get_rng_state()
        for out in outs:
            out.square().sum().backward()
    assert torch.equal(torch.get_rng_state(), state)
    return block, [x.grad, block.weight.grad]


@pytest.mark.parametrize("way", WAYS)
def test_decided_once(way: Any) -> None:
    expected = gradients(None)[1]
    block, got = gradients(way)
    assert len(block.asked) == 2 and block.second == [False, False, True, True]
    assert all(torch.equal(a, b) for a, b in zip(block.used, block.asked * 2, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_checkpoint_alone_decides_twice() -> None:
    """What the context is for: the choice draws random numbers that torch puts back, so only the second call shows."""
    torch.manual_seed(0)
    block = Fickle()
    by_checkpoint(block, torch.randn(5, 4, requires_grad=True)).sum().backward()
    assert len(block.asked) == 2


@pytest.mark.parametrize("way", WAYS)
def test_more_decisions_than_before(way: Any) -> None:
    with pytest.raises(StepError, match=r"decides more often than in its first run \(1 times"):
        gradients(way, more=True)


def test_twice_backward() -> None:
    block, x = Fickle(), torch.randn(5, 4, requires_grad=True)
    out = by_segment(block, x).square().sum()
    first = torch.autograd.grad(out, x, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(out, x)[0])
    assert len(block.asked) == 1 and block.second == [False, True, True]


@pytest.mark.parametrize("outer", WAYS)
@pytest.mark.parametrize("inner", [by_checkpoint, by_reentrant])
def test_within_one_another(outer: Any, inner: Any) -> None:
    """A block of three, the middle one of which is recomputed within the recomputation."""

    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(Fickle() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.parts[0](x)
            return self.parts[2](inner(self.parts[1], x))

    def run(way: Any) -> tuple[Any, list[Any]]:
        torch.manual_seed(1)
        block, x = Three(), torch.randn(5, 4, requires_grad=True)
        with checkpoints_remember():
            (block(x) if way is None else way(block, x)).square().sum().backward()
        return block, [x.grad, *(part.weight.grad for part in block.parts)]

    expected = run(None)[1]
    block, got = run(outer)
    assert all(len(part.asked) == 1 for part in block.parts)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_several_blocks_of_a_segment() -> None:
    """One decision each, also where an error ended the first run of another segment."""
    torch.manual_seed(2)
    blocks, segment, x = [Fickle() for _ in range(3)], Segment(), torch.randn(5, 4, requires_grad=True)
    with pytest.raises(RuntimeError):
        by_segment(blocks[0], torch.randn(5, 3))
    y = x
    for index, block in enumerate(blocks):
        block.asked.clear()
        y = segment.run(UnitRun(0, 0, Call(index, f"{index}", f"{index}"), block), block, (y,), {})
    y.sum().backward()
    assert [len(block.asked) for block in blocks] == [1, 1, 1]


def test_failed_checkpoint_leaves_nothing_open() -> None:
    with checkpoints_remember():
        block = Fickle()
        for way in (by_checkpoint, by_reentrant):
            with pytest.raises(RuntimeError):
                way(block, torch.randn(5, 3, requires_grad=True))
        decisions = Decisions()
        with decisions.first():
            remembered(lambda: torch.ones(1))
        assert len(decisions._kept) == 1
    assert not in_second_run()


def test_kept_as_what_is_saved() -> None:
    """What is kept goes through the saved-tensor hooks around, and a change in place is noticed."""
    seen: list[int] = []

    class Halves:
        def encode(self, tensor: Tensor, saved: Saved) -> Encoded | None:
            if tensor.dtype != torch.int64:
                return None
            seen.append(tensor.numel())
            return Encoded("16 bits", [tensor.to(torch.int16)], lambda kept: kept[0].long())

    class Choosing(nn.Module):
        def __init__(self, spoils: bool) -> None:
            super().__init__()
            self.spoils, self.weight = spoils, nn.Parameter(torch.randn(300, 4))

        def forward(self, x: Tensor) -> Tensor:
            chosen = remembered(lambda: torch.randperm(300))
            x = x * self.weight[chosen]
            if self.spoils and not in_second_run():
                chosen.zero_()
            return x

    for spoils in (False, True):
        block, x = Choosing(spoils), torch.randn(300, 4, requires_grad=True)
        with SavedTensors(encoders=[Halves()]).forward(0, 0):
            y = by_segment(block, x)
        assert seen == [300] * (1 + spoils)
        if not spoils:
            y.sum().backward()
            assert torch.equal(x.grad.sort(0)[0], block.weight.sort(0)[0])
            continue
        with pytest.raises(RuntimeError, match="inplace operation"):
            y.sum().backward()


def test_no_gradient() -> None:
    """What autograd would save in deciding would be missing in the second run."""
    weight = torch.ones(2, requires_grad=True)
    with Decisions().first():
        assert not remembered(lambda: weight.sigmoid()).requires_grad
