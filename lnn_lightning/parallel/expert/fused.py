"""Experts that are one module with stacked weights: their ``forward`` while they are shared out over ranks.

The module goes on computing with its own code, on the rows that were sent to this rank's experts, with weights of one;
what it returns goes back, and is weighted and added up where the tokens live. So the weights are not sent, and what
comes back is linear in them, as the module was when it was found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function

from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.expert.capacity import capacity_of, within_capacity
from lnn_lightning.parallel.expert.cuts import replaced_parameters, shares
from lnn_lightning.parallel.expert.dispatch import run_experts_beside
from lnn_lightning.parallel.expert.find import call_names
from lnn_lightning.parallel.expert.seam import SeamState, seam_of, without_values
from lnn_lightning.parallel.expert.shared import beside
from lnn_lightning.parallel.step.remember import remembered
from lnn_lightning.parallel.tensor.modules import Forward, is_suspended, own_forward
from lnn_lightning.parallel.tensor.sharded import is_sharded


def fused_forward(self: nn.Module, before: Forward, *args: Any, **kwargs: Any) -> Any:
    """``forward`` of a module that holds the stacked weights of its experts."""
    forward = own_forward(self, before)
    call = _arguments(self, args, kwargs)
    if call is None:
        if seam_of(self).is_active and not is_suspended():
            raise StepError(
                f"{seam_of(self).name!r} holds experts that are shared out over ranks, and is called otherwise than "
                f"with the tokens, their experts and the weights of these: {len(args)} values and {sorted(kwargs)}."
            )
        return forward(*args, **kwargs)
    stacked = tuple(each for each in self._parameters.values() if each is not None)
    return _on_values(self, forward, *call, *stacked)


def _on_values(
    module: nn.Module, forward: Callable[..., Tensor], hidden: Tensor, index: Tensor, weights: Tensor, *stacked: Tensor
) -> Tensor:
    given = (hidden, index, weights, *stacked)
    if any(
        is_sharded(each) for each in given
    ):  # a function without a rule gets the wholes, and the planner hears of it
        return handle_torch_function(_on_values, given, module, forward, *given)
    if any(without_values(each) for each in given):
        return without_data(hidden, index, weights, stacked)
    state = seam_of(module)
    if is_suspended() or not state.is_active:
        return forward(hidden, index, weights)
    return _shared_out(module, state, forward, hidden, index, weights)


@torch.compiler.disable
def _shared_out(
    module: nn.Module, state: SeamState, forward: Callable[..., Tensor], hidden: Tensor, index: Tensor, weights: Tensor
) -> Tensor:
    assert (axis := state.axis) is not None
    rows = hidden.reshape(-1, hidden.shape[-1])
    if index.shape != weights.shape or index.shape[:-1].numel() != len(rows):
        raise StepError(
            f"{state.name!r} holds experts that are shared out over ranks: it must be called with an expert and a "
            f"weight for each choice of each token, got {list(index.shape)} experts and {list(weights.shape)} weights "
            f"for {rows.shape[0]} tokens."
        )
    tokens, choices = rows.shape[0], index.shape[-1]
    factors = weights.reshape(tokens, choices)
    kept = chosen = remembered(lambda: index.reshape(tokens, choices))
    if state.capacity_factor is not None:
        room = capacity_of(tokens, state.experts, choices, state.capacity_factor)
        kept = remembered(lambda: within_capacity(chosen, factors.detach(), state.experts, room))
    if module.training:
        state.count(chosen, kept if kept is not chosen else None)
    if axis.size == 1 and axis.tensor is None and kept is chosen:
        return forward(hidden, index, weights)
    compute = partial(_run_local, module, state, forward, factors.dtype)
    bad = f"{state.name!r} was given weights of experts that are not finite: its router has overflowed, or its input"
    problem = (f"{bad} has.", ~factors.isfinite().all())
    meanwhile, expert = beside(module, hidden), kept.reshape(-1).long()
    found, _ = run_experts_beside(rows, expert, state.experts, axis, compute, meanwhile, problem=problem)
    found = found.view(tokens, choices, found.shape[-1]) * factors.unsqueeze(-1)
    return found.sum(1).to(hidden.dtype).view(hidden.shape)


def _run_local(
    module: nn.Module,
    state: SeamState,
    forward: Callable[..., Tensor],
    dtype: torch.dtype,
    rows: Tensor,
    counts: Sequence[int],
) -> Tensor:
    """The module's own code on rows that are sorted by this rank's experts."""
    stacked = [each for each in module._parameters.values() if each is not None]
    if rows.shape[0] == 0:
        return _Nothing.apply(rows, *stacked)
    numbers = torch.tensor(counts).to(rows.device, non_blocking=True)
    local = torch.repeat_interleave(numbers, output_size=rows.shape[0]).unsqueeze(1)
    ones = torch.ones(local.shape, dtype=dtype, device=rows.device)
    try:
        with _counting(module, state.experts, len(counts)), _sharing(module, state):
            return forward(rows, local, ones).to(rows.dtype)
    except Exception as error:
        if state.guard is None:
            raise
        state.guard.append(f"shared out, it fails ({type(error).__name__}: {error})")
        return _Nothing.apply(rows, *stacked)


@contextmanager
def _counting(module: nn.Module, experts: int, local: int) -> Iterator[None]:
    """The module's own numbers of experts are those of its share inside."""
    numbers = [
        name
        for name, value in vars(module).items()
        if "expert" in name and type(value) is int and value == experts and experts != local
    ]
    for name in numbers:
        vars(module)[name] = local
    try:
        yield
    finally:
        for name in numbers:
            vars(module)[name] = experts


def _sharing(module: nn.Module, state: SeamState) -> AbstractContextManager[None]:
    if not state.once or state.axis is None or state.axis.tensor is None:
        return nullcontext()
    return replaced_parameters(module, shares(module, state.once, state.axis.tensor.size))


class _Nothing(torch.autograd.Function):
    """No rows: no result, and gradients of zero, as stacked weights have where no token came to an expert."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, *stacked: Tensor) -> Tensor:
        ctx.save_for_backward(*stacked)
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        return gradient, *(torch.zeros_like(each) if needs else None for each, needs in needed)


def without_data(hidden: Tensor, index: Tensor, weights: Tensor, stacked: Sequence[Tensor]) -> Tensor:
    """What the module would return, by shape, of values without data: which rows go where cannot be told of these.

    Every weight takes part, in multiplications of the size that the real ones have together.
    """
    rows = hidden.reshape(-1, hidden.shape[-1])
    choices = index.numel() // max(rows.shape[0], 1) if index.numel() else 1
    value = rows.unsqueeze(1).expand(-1, choices, -1).reshape(-1, rows.shape[1])
    for each in stacked:
        one = each[0]
        if one.ndim == 2:
            value = _multiplied(value, one)
        else:
            value = value + one.sum().to(value.dtype)
    value = _fitted(value, rows.shape[1]).view(-1, choices, rows.shape[1])
    factors = torch.where(index < stacked[0].shape[0], weights, 0).reshape(-1, choices, 1)
    return (value * factors).sum(1).to(hidden.dtype).view(hidden.shape)


def _multiplied(value: Tensor, matrix: Tensor) -> Tensor:
    width = value.shape[1]
    for size in (width, width // 2):  # the half: a gate was applied
        if size in matrix.shape:
            matrix = matrix if matrix.shape[0] == size else matrix.t()
            return value[:, :size] @ matrix.to(value.dtype)
    return _fitted(value, matrix.shape[0]) @ matrix.to(value.dtype)


def _fitted(value: Tensor, width: int) -> Tensor:
    """Rows cut or repeated to a width."""
    if value.shape[1] >= width:
        return value[:, :width]
    return value[:, :1].expand(-1, width)


def _arguments(module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor] | None:
    """Tokens, index and weights of a call; None if it is another one."""
    names = call_names(module)
    if names is None or len(args) > 3:
        return None
    given = dict(zip(names, args, strict=False)) | kwargs
    if set(given) != set(names) or not all(isinstance(each, Tensor) for each in given.values()):
        return None
    first, second, third = (given[name] for name in names)
    return first, second, third
