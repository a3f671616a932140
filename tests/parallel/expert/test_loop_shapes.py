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


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_weights_elsewhere(meta: bool, known: bool) -> None:
    """On another pipeline stage, or not made yet."""
    block = Listing()
    if known:
        fake_call(block, 2, 4)
    if meta:
        block.to("meta")
    else:
        replace_tensors(block, lambda _, tensor: stand_in_for(tensor))
    before = dict(block.named_parameters())
    out, logits, text = fake_call(block, 3, 5)
    assert out.shape == (3, 5, WIDTH) and logits.shape == (15, 4) and text == "text"
    assert all(isinstance(each, FakeTensor) for each in (out, logits))
    assert all(each is before[name] for name, each in block.named_parameters())


def test_on_the_meta_device() -> None:
    """As in a trial of the planner."""
    block = Listing().to("meta")
    experts = list(block.experts.children())
    with torch.device("meta"):
        x = torch.randn(3, 5, WIDTH, requires_grad=True)
        out, logits, text = loop_without_data(block, block.forward, experts, (x,), {}, name="the block")
    assert out.is_meta and out.shape == (3, 5, WIDTH) and logits.is_meta and logits.shape == (15, 4)
    assert out.requires_grad and text == "text"


@pytest.mark.parametrize(("make", "rows"), [(SkippingMoE, 2 * 15), (EveryTokenMoE, 4 * 15)])
def test_operations_are_counted(make: Any, rows: int) -> None:
    with FlopCounterMode(display=False) as counter:
        fake_call(make(), 3, 5)
    assert counter.get_total_flops() >= 2 * rows * 2 * WIDTH * HIDDEN
