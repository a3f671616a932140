"""Gradients made inside ``training_step``, handed over in ``backward``.

Lightning's order is training_step, zero_grad, backward, step: gradients that a schedule makes within training_step
would be wiped. They are kept aside, and the loss given back is a leaf whose backward adds them to ``parameter.grad``,
so that zero_grad, accumulation, loss scaling and the user's hooks see what they expect.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lnn_lightning.parallel.errors import StepError


class _Deliver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, deliver: Callable[[Tensor], None]) -> Tensor:
        ctx.deliver = deliver
        return loss.detach().clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.deliver(gradient)
        return None, None, None


class GradientHandover:
    """Gradients of one step on their way.

    Args:
        parameters: parameters on this rank.
        scale: factor on the loss that the gradients were made with.
        onto_old: the step adds to the gradients of the accumulation window so far, since it reduces all of them.
        drop_old: nobody needs the gradients of the last window any more; free them before new ones are made.
        seen: what optimizers have in place of a parameter (a piece of it): if they dropped its gradient, it is dropped.
        delivered: called when ``parameter.grad`` is complete.
        fixed_scale: some gradients of the window are not among these yet, so all must be scaled as they were made.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        scale: float,
        onto_old: bool,
        drop_old: bool,
        seen: Callable[[nn.Parameter], nn.Parameter] = lambda parameter: parameter,
        delivered: Callable[[], None] = lambda: None,
        fixed_scale: bool = False,
    ) -> None:
        self._fixed_scale = onto_old or fixed_scale
        self._parameters, self._scale, self._onto_old = list(parameters), scale, onto_old
        self._seen, self._delivered = seen, delivered
        self._new: list[Tensor | None] = []
        self._old: list[Tensor | None] = []
        if not onto_old:
            self._old = [None if drop_old or seen(p).grad is None else p.grad for p in self._parameters]
            for parameter in self._parameters:
                parameter.grad = None

    def collect(self) -> None:
        """Behind the schedule: takes the new gradients away and puts the old ones back."""
        if self._onto_old:
            return
        self._new = [parameter.grad for parameter in self._parameters]
        for parameter, old in zip(self._parameters, self._old, strict=True):
            parameter.grad = old
        self._old = []

    def loss(self, value: Tensor) -> Tensor:
        """The loss to give back; its backward delivers."""
        anchor = torch.zeros((), device=value.device, requires_grad=True)
        return _Deliver.apply(anchor, value, self._deliver)

    def _deliver(self, gradient: Tensor) -> None:
        factor = float(gradient) / self._scale
        # the factor was computed in the loss's own precision (1/3 in half precision is no third)
        exact = math.isclose(factor, 1.0, rel_tol=2 * torch.finfo(gradient.dtype).eps)
        if self._fixed_scale and not exact:
            raise StepError(
                f"The loss was multiplied by {factor:g} between training_step and backward while gradients were "
                "accumulated. Multiply it inside of training_step."
            )
        if self._onto_old:
            self._delivered()
            return
        for parameter, new in zip(self._parameters, self._new, strict=True):
            if new is None:
                continue
            if factor != 1.0:
                new.mul_(factor)
            if parameter.grad is None or self._seen(parameter).grad is None:
                parameter.grad = new
            else:
                parameter.grad.add_(new)
        self._new = []
        self._delivered()
