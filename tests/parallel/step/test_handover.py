"""Gradients made in training_step, handed over in backward."""

import pytest
import torch
from torch import Tensor, nn

from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.step.handover import GradientHandover


def parameters(count: int = 2) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2)) for _ in range(count)]


def step(
    owned: list[nn.Parameter],
    value: float,
    scale: float = 1.0,
    onto_old: bool = False,
    drop_old: bool = False,
    skip: int | None = None,
) -> Tensor:
    """What the engine does: a schedule that adds `value * scale` to every gradient but that of parameter `skip`."""
    handover = GradientHandover(owned, scale, onto_old=onto_old, drop_old=drop_old)
    for index, parameter in enumerate(owned):
        if index != skip:
            made = torch.full((2,), value * scale)
            parameter.grad = made if parameter.grad is None else parameter.grad + made
    handover.collect()
    return handover.loss(torch.tensor(value))


def gradients(owned: list[nn.Parameter]) -> list[float | None]:
    return [None if p.grad is None else float(p.grad[0]) for p in owned]


def test_delivered_by_backward_and_not_before() -> None:
    owned = parameters()
    loss = step(owned, 3.0)
    assert gradients(owned) == [None, None]
    assert float(loss.detach()) == 3.0
    assert loss.requires_grad
    for parameter in owned:  # Lightning's order: training_step, zero_grad, backward
        parameter.grad = None
    loss.backward()
    assert gradients(owned) == [3.0, 3.0]


def test_zero_grad_between_step_and_backward_zeroes_the_old_ones_only() -> None:
    owned = parameters()
    optimizer = torch.optim.SGD(owned, lr=1.0)
    step(owned, 1.0).backward()
    loss = step(owned, 2.0)
    assert gradients(owned) == [1.0, 1.0], "the old ones are still there to look at"
    optimizer.zero_grad(set_to_none=False)
    loss.backward()
    assert gradients(owned) == [2.0, 2.0]


def test_accumulation_adds() -> None:
    owned = parameters()
    for value in (1.0, 2.0, 4.0):
        step(owned, value).backward()
    assert gradients(owned) == [7.0, 7.0]


@pytest.mark.parametrize("scale", [1.0, 0.5, 1024.0])
@pytest.mark.parametrize("factor", [1.0, 0.25, -1.0])
def test_factor_between_step_and_backward(scale: float, factor: float) -> None:
    """Lightning multiplies by the scale the gradients were made with; the rest is the user's."""
    owned = parameters()
    loss = step(owned, 3.0, scale)
    (loss * scale * factor).backward()
    assert gradients(owned) == [3.0 * scale * factor] * 2


def test_a_parameter_without_gradient_keeps_the_old_one() -> None:
    owned = parameters()
    step(owned, 1.0, skip=1).backward()
    assert gradients(owned) == [1.0, None]
    step(owned, 2.0, skip=0).backward()
    assert gradients(owned) == [1.0, 2.0]
    (step(owned, 2.0, skip=0) * 2).backward()
    assert gradients(owned) == [1.0, 6.0]


def test_the_same_tensor_stays_the_gradient() -> None:
    """Buckets and the user's references look at it."""
    owned = parameters(1)
    step(owned, 1.0).backward()
    held = owned[0].grad
    step(owned, 2.0).backward()
    assert owned[0].grad is held
    assert held is not None
    assert float(held[0]) == 3.0


def test_dropping_frees_the_old_ones_at_once() -> None:
    owned = parameters(1)
    step(owned, 1.0).backward()
    loss = step(owned, 2.0, drop_old=True)
    assert gradients(owned) == [None]
    loss.backward()
    assert gradients(owned) == [2.0]


def test_onto_old_has_delivered_already() -> None:
    """Where the step reduces the gradients of the whole window at once."""
    owned = parameters()
    step(owned, 1.0).backward()
    loss = step(owned, 2.0, scale=0.5, onto_old=True)
    assert gradients(owned) == [2.0, 2.0]
    (loss * 0.5).backward()
    assert gradients(owned) == [2.0, 2.0]
    loss = step(owned, 2.0, onto_old=True)
    with pytest.raises(StepError, match="multiplied by 3 between training_step and backward"):
        (loss * 3).backward()


def test_no_backward_no_gradient() -> None:
    """The user's hook skips the backward."""
    owned = parameters()
    step(owned, 1.0)
    assert gradients(owned) == [None, None]
    step(owned, 2.0).backward()
    assert gradients(owned) == [2.0, 2.0]


def test_the_loss_is_a_copy() -> None:
    owned = parameters()
    handover = GradientHandover(owned, 1.0, onto_old=False, drop_old=False)
    handover.collect()
    value = torch.tensor(2.0, dtype=torch.float64)
    loss = handover.loss(value)
    value.zero_()
    assert float(loss.detach()) == 2.0
    assert loss.dtype == torch.float64
    loss.backward()
    assert gradients(owned) == [None, None]


def test_nothing_here() -> None:
    """A stage whose parameters are all frozen, or none."""
    loss = step([], 1.0)
    loss.backward()
    assert float(loss.detach()) == 1.0
