"""Parameters in a file: which are in memory when."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lnn_lightning.memory.offload.gradients import GradientPages
from lnn_lightning.memory.offload.pages import PageFile
from lnn_lightning.memory.offload.parameters import ParameterPages
from lnn_lightning.parallel.step.extension import UnitRun
from lnn_lightning.parallel.step.trace import Call
from tests.memory.offload.test_pages import in_memory

BLOCKS, WIDTH, PREFETCH = 12, 128, 2
OF_A_BLOCK = WIDTH * WIDTH * 4


class Watched(torch.autograd.Function):
    """Notes how many blocks are in memory when the backward comes by."""

    @staticmethod
    def forward(ctx: object, x: Tensor, seen: list[float]) -> Tensor:
        ctx.seen = seen  # type: ignore[attr-defined]
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.seen.append(in_memory() / OF_A_BLOCK)  # type: ignore[attr-defined]
        return gradient, None


def run(blocks: list[nn.Linear], pages: ParameterPages, x: Tensor, seen: list[float], recompute: bool) -> Tensor:
    for index, block in enumerate(blocks):

        def body(value: Tensor, block: nn.Linear = block) -> Tensor:
            value = block(Watched.apply(value, seen)).tanh()
            seen.append(in_memory() / OF_A_BLOCK)
            return value

        def call(value: Tensor, index: int = index, body: object = body, block: nn.Linear = block) -> Tensor:
            of = UnitRun(0, 0, Call(index, str(index), str(index), parameters=frozenset({f"{index}.weight"})), block)
            return pages.call(of, body, (value,), {})  # type: ignore[arg-type]

        x = checkpoint(call, x, use_reentrant=False) if recompute else call(x)
    return x


@pytest.mark.parametrize("recompute", [False, True])
def test_only_those_in_use_and_the_next_are_in_memory(recompute: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    blocks = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)]
    plain = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)]
    for one, other in zip(blocks, plain, strict=True):
        other.load_state_dict(one.state_dict())
    pages = ParameterPages(PageFile(tmp_path), PREFETCH)
    for index, block in enumerate(blocks):
        block.weight.data = pages.take(f"{index}.weight", block.weight.data)
    assert pages.nbytes == BLOCKS * OF_A_BLOCK and in_memory() == 0
    x = torch.randn(4, WIDTH, requires_grad=True)
    for step in range(2):
        seen: list[float] = []
        pages.begin(1, training=True)
        loss = run(blocks, pages, x, seen, recompute).square().sum()
        assert len(seen) == BLOCKS and max(seen) <= 1 + PREFETCH
        with pages.backward(0, 0):
            loss.backward()
        pages.finish()
        assert in_memory() == 0
        assert max(seen) <= 1 + PREFETCH + (1 if step == 0 else 0), "the first forward learns the order"
        assert min(seen) >= 1 and len(seen) == 2 * BLOCKS  # a recomputation stops at what it needs
        value = x.detach()
        for block in plain:
            value = block(value).tanh()
        value.square().sum().backward()
        for one, other in zip(blocks, plain, strict=True):
            assert torch.equal(one.weight.grad, other.weight.grad)  # type: ignore[arg-type]
            for weight in (one.weight, other.weight):
                weight.data.sub_(weight.grad, alpha=0.01)
    pages.begin(1, training=False)
    with torch.no_grad():
        run(blocks, pages, x, seen := [], recompute=False)
    pages.finish()
    assert max(seen) <= 1 + PREFETCH and in_memory() == 0
    # nobody told that these are looked at
    assert all(torch.equal(one.weight, other.weight) for one, other in zip(blocks, plain, strict=True))


def test_gradients_leave_memory_as_they_are_made_and_windows_do_not_mix(tmp_path: Path) -> None:
    blocks = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)]
    gradients = GradientPages(PageFile(tmp_path), [block.weight for block in blocks])
    x = torch.randn(4, WIDTH)

    def step(factor: float) -> list[Tensor]:
        gradients.begin(2, training=True)
        for part in range(2):
            value = x[2 * part : 2 * part + 2]
            for block in blocks:
                value = block(value)
            with gradients.backward(0, part):
                (value.sum() * factor).backward()
            assert in_memory() == 0
        return [block.weight.grad for block in blocks]  # type: ignore[misc]

    first = step(1.0)
    expected = [each.clone() for each in first]
    for block in blocks:  # what accumulates across steps is put aside meanwhile
        block.weight.grad = None
    second = step(2.0)
    for one, two, was in zip(first, second, expected, strict=True):
        assert torch.equal(one, was) and torch.allclose(two, 2 * was)
    places = sum(len(each) for each in gradients._places.values())
    del first, second, one, two
    for block in blocks:
        block.weight.grad = None
    step(1.0)
    assert sum(len(each) for each in gradients._places.values()) == places == 2 * BLOCKS  # used again
