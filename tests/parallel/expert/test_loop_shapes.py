"""Loops over experts on fake tensors: results and what is left in attributes by shape, whoever holds the experts."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from lnn_lightning.parallel.expert.loop_shapes import loop_without_data
from lnn_lightning.parallel.step.standin import replace_tensors, stand_in_for
from tests.zoo.experts import BLOCKS, HIDDEN, BalancedMoE, EveryTokenMoE, SkippingMoE
from tests.zoo.language import WIDTH


class Listing(BalancedMoE):
    """Also puts its loss on a list."""

    def __init__(self) -> None:
        super().__init__(noise=0.1)
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)
        self.losses.append(self.aux_loss)  # type: ignore[arg-type]
        return *out, "text"


def fake_call(block: Any, batch: int, length: int) -> Any:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        x = torch.randn(batch, length, WIDTH, requires_grad=True)
        return loop_without_data(block, block.forward, list(block.experts.children()), (x,), {}, name="the block")


@pytest.mark.parametrize("name", BLOCKS)
def test_as_the_block(name: str) -> None:
    block = BLOCKS[name]()
    real = copy.deepcopy(block)(torch.randn(3, 5, WIDTH))
    state = torch.get_rng_state()
    fakes = fake_call(block, 3, 5)
    assert torch.equal(state, torch.get_rng_state())
    fakes, real = ((each,) if isinstance(each, Tensor) else each for each in (fakes, real))
    for fake, one in zip(fakes, real, strict=True):
        assert isinstance(fake, FakeTensor) and fake.requires_grad
        assert (fake.shape, fake.dtype) == (one.shape, one.dtype)


@pytest.mark.parametrize("divided", [False, True])
def test_attributes(divided: bool) -> None:
    block = Listing()
    if divided:
        for expert in block.experts[1:]:
            replace_tensors(expert, lambda _, tensor: stand_in_for(tensor))
    losses = block.losses
    out, logits, text = fake_call(block, 2, 4)
    assert out.shape == (2, 4, WIDTH) and logits.shape == (8, 4) and text == "text"
    assert isinstance(block.aux_loss, FakeTensor) and block.aux_loss.shape == () and block.aux_loss.requires_grad
    assert block.losses is losses and [type(each) for each in losses] == [FakeTensor]
    assert block.calls == 0 and not block.load.any()


def test_router_elsewhere() -> None:
    """As it was with other shapes; like the first argument if it never was."""
    block = Listing()
    fresh = copy.deepcopy(block)
    fake_call(block, 2, 4)
    for one in (block, fresh):
        replace_tensors(one, lambda _, tensor: stand_in_for(tensor))
    out, logits, text = fake_call(block, 3, 5)
    assert out.shape == (3, 5, WIDTH) and logits.shape == (15, 4) and text == "text"
    assert fake_call(fresh, 3, 5).shape == (3, 5, WIDTH)


@pytest.mark.parametrize(("make", "rows"), [(SkippingMoE, 2 * 15), (EveryTokenMoE, 4 * 15)])
def test_operations_are_counted(make: Any, rows: int) -> None:
    with FlopCounterMode(display=False) as counter:
        fake_call(make(), 3, 5)
    assert counter.get_total_flops() >= 2 * rows * 2 * WIDTH * HIDDEN
