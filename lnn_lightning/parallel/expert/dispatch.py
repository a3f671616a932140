"""Tokens go to the ranks that hold their experts, and what the experts make of them comes back.

A *row* is one choice of one token. Rows are sorted by expert, which is by rank too; an uneven all-to-all takes each to
its owner, who sorts what came by local expert; the way back is the same in reverse. Nothing is padded or dropped.
Every sort is stable and every move is a gather, backward too, so the same rows give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.expert.axis import ExpertAxis
from lnn_lightning.parallel.expert.exchange import Exchange, Route, count_bytes, receive, send
from lnn_lightning.parallel.hosts import ranks_in_words
from lnn_lightning.parallel.step.randomness import forked_as
from lnn_lightning.parallel.step.remember import in_second_run, remembered
from lnn_lightning.parallel.tensor.axis import Spec, enter, gather, reduce, scatter
from lnn_lightning.parallel.tensor.randomness import forked_rng

Compute = Callable[[Tensor, list[int]], Tensor]
"""What local experts make of rows [rows, width] that are sorted by expert, with the number of rows of each."""

Problem = str | tuple[str, Tensor]
"""Why this rank cannot go on; with a tensor of one element: it cannot if that is not zero."""

T = TypeVar("T")

_FLAGS = 3
"""Numbers next to the counts: is there a problem, are gradients computed, and those of values."""


def run_experts(
    values: Tensor,
    expert: Tensor,
    experts: int,
    axis: ExpertAxis,
    compute: Compute,
    *,
    problem: Problem | None = None,
) -> Tensor:
    """What the experts of all ranks make of this rank's tokens. Collective over the expert ranks.

    All ranks call it equally often, with tokens or without; so they do in backward.

    Args:
        values: tokens [tokens, width].
        expert: the expert of each row [tokens * choices]: the choices of the first token, of the second, ... Other
            numbers than 0 to ``experts - 1`` are rows that no expert gets.
        experts: number of experts, over all ranks.
        axis: who holds which.
        compute: runs this rank's experts: takes rows [rows, width] sorted by local expert (those of one expert by rank
            and place) and the number of rows of each, gives [rows, its width]. It is called without rows too.
        problem: why this rank cannot go on, if so: all ranks raise it together. A text with a tensor on the device is
            looked at along with the counts, so the host waits once.

    Returns:
        [tokens * choices, width that ``compute`` gave]: zeros in rows that no expert got.

    Raises:
        StepError: a rank has a problem, or some ranks compute gradients and some do not.
    """
    return run_experts_beside(values, expert, experts, axis, compute, lambda: None, problem=problem)[0]


def run_experts_beside(
    values: Tensor,
    expert: Tensor,
    experts: int,
    axis: ExpertAxis,
    compute: Compute,
    meanwhile: Callable[[], T],
    *,
    problem: Problem | None = None,
) -> tuple[Tensor, T]:
    """As :func:`run_experts`; ``meanwhile`` runs while the tokens are on their way, and its result comes along.

    Its backward runs while the gradients of the tokens are on their way back.
    """
    choices = _choices(values, expert)
    tokens = len(values)
    if axis.tensor is not None and axis.divides_experts:
        values = enter(values, axis.tensor)
    elif axis.tensor is not None and tokens:
        values, expert = _share(values, expert, axis)
    rows = len(expert)

    key = torch.where((expert >= 0) & (expert < experts), expert, experts)
    key, order = key.sort(stable=True)
    bounds = torch.searchsorted(key, torch.arange(experts + 1, device=key.device))
    routing = _agree(bounds.diff(), values, axis, problem)
    kept = sum(routing.route.send)
    there, back, holes = order[:kept], _inverse(order), kept < rows

    tie = _leaf(values) if routing.differentiable else None
    tie_values = tie if routing.values_differentiable and not values.requires_grad else None
    first = Exchange(routing.route, 1 / axis.scale)
    sent = send(_Rows.apply(values, there // choices, back, choices, holes), first, tie_values)
    beside = meanwhile()
    received, dispatched = receive(sent, first)
    moves = routing.by_expert()
    if moves is not None:
        received = _Rows.apply(received, *moves, 1, False)
    with ExitStack() as stack:
        if axis.tensor is not None:
            place = 0 if axis.divides_experts else axis.tensor.rank
            stack.enter_context(forked_as(place))
            stack.enter_context(forked_rng(values.device, place))
        computed = compute(received, routing.local_counts)
    if computed.dim() != 2 or len(computed) != len(received):
        raise StepError(
            f"The experts were given {len(received)} rows and gave a value of shape {tuple(computed.shape)}: it must "
            "have a row for each."
        )
    if moves is not None:
        computed = _Rows.apply(computed, *reversed(moves), 1, False)
    second = Exchange(routing.route.back(), axis.scale)
    sent = send(computed, second, dispatched if dispatched.requires_grad else tie)
    home, _ = receive(sent, second)
    result = _Rows.apply(home, back, there, 1, holes)

    if axis.tensor is not None and axis.divides_experts:
        result = reduce(result, axis.tensor)
    elif axis.tensor is not None and tokens:
        whole = gather(result.reshape(rows // choices, -1), axis.tensor, Spec(0, (tokens,)))
        result = whole.view(tokens * choices, -1)
    return result, beside


@dataclass(frozen=True, eq=False)
class _Routing:
    """What the ranks know of each other's rows.

    Attributes:
        route: the way of the rows to their experts.
        arriving: rows from each rank for each local expert, on the device.
        local_counts: rows of each local expert.
        differentiable: gradients are computed.
        values_differentiable: some rank's values require gradients.
    """

    route: Route
    arriving: Tensor
    local_counts: list[int]
    differentiable: bool
    values_differentiable: bool

    def by_expert(self) -> tuple[Tensor, Tensor] | None:
        """The order of arrived rows by local expert, and the way back; None: it is the order they come in."""
        ranks, local = self.arriving.shape
        if ranks == 1 or local <= 1:
            return None
        expert = torch.arange(local, device=self.arriving.device).repeat(ranks)
        count = sum(self.local_counts)
        order = expert.repeat_interleave(self.arriving.flatten(), output_size=count).argsort(stable=True)
        return order, _inverse(order)


def _agree(counts: Tensor, values: Tensor, axis: ExpertAxis, problem: Problem | None) -> _Routing:
    """Exchanges how many rows there are for each expert, and what else ranks must know; the host waits here."""
    experts, size = len(counts), axis.size
    text, bad = problem if isinstance(problem, tuple) else (problem, problem is not None)
    gradients = torch.is_grad_enabled()
    flags = torch.zeros(_FLAGS, dtype=torch.int64)
    flags[1], flags[2] = gradients, gradients and values.requires_grad
    flags = flags.to(counts.device, non_blocking=True)
    flags[0] = bad
    most = -(-experts // size)
    table = torch.cat([_by_rank(counts, axis, most), flags.expand(size, _FLAGS)], 1)

    def exchanged() -> Tensor:
        others = torch.empty_like(table)
        count_bytes(counts=(size - 1) * table[0].numel() * table.element_size())
        dist.all_to_all_single(others, table, group=axis.group)
        return others

    # a recomputation neither asks the other ranks again nor has the host wait
    others = remembered(exchanged) if size > 1 else table
    mine, theirs = remembered(lambda: torch.stack([table, others]).cpu()).tolist()
    local = len(axis.span(experts))
    _refuse(axis, text, [row[most] for row in theirs])
    _refuse_mixed(axis, [row[most + 1] for row in theirs])
    route = Route(axis, [sum(row[:most]) for row in mine], [sum(row[:most]) for row in theirs])
    return _Routing(
        route,
        others[:, :local],
        [sum(row[each] for row in theirs) for each in range(local)],
        gradients,
        gradients and (in_second_run() or any(row[most + 2] for row in theirs)),  # a first run may be without
    )


def _by_rank(counts: Tensor, axis: ExpertAxis, most: int) -> Tensor:
    """Counts of all experts as a row for each rank."""
    each, more = divmod(len(counts), axis.size)
    first = counts[: more * (each + 1)].view(more, each + 1)
    rest = counts[more * (each + 1) :].view(axis.size - more, each)
    return torch.cat([first, F.pad(rest, (0, most - each))]) if more else rest


def _refuse(axis: ExpertAxis, text: str | None, flags: list[int]) -> None:
    bad = [rank for rank, flag in enumerate(flags) if flag]
    if not bad:
        return
    if text is None:
        text = "The experts cannot be run; what is wrong is said there."
    where = f" ({ranks_in_words(_global_ranks(axis, bad))})" if axis.size > 1 else ""
    raise StepError(f"{text}{where}")


def _refuse_mixed(axis: ExpertAxis, gradients: list[int]) -> None:
    if len(set(gradients)) > 1:
        off = [rank for rank, flag in enumerate(gradients) if not flag]
        raise StepError(
            f"Experts were called under `torch.no_grad` on {ranks_in_words(_global_ranks(axis, off))} and with gradients "
            "on the other expert ranks: their backward would wait for ranks that have none. Call them alike on all ranks."
        )


def _global_ranks(axis: ExpertAxis, places: list[int]) -> list[int]:
    ranks = dist.get_process_group_ranks(axis.group)
    return [ranks[place] for place in places]


def _choices(values: Tensor, expert: Tensor) -> int:
    """Choices of a token."""
    if values.dim() != 2 or expert.dim() != 1 or len(expert) % max(len(values), 1) or (len(expert) and not len(values)):
        raise StepError(
            f"`values` must be [tokens, width] and `expert` [tokens * choices], got {list(values.shape)} and "
            f"{list(expert.shape)}."
        )
    return len(expert) // len(values) if len(values) else 1


def _share(values: Tensor, expert: Tensor, axis: ExpertAxis) -> tuple[Tensor, Tensor]:
    """This tensor rank's share of the tokens and of their rows; padding goes to no expert."""
    assert axis.tensor is not None
    tokens = len(values)
    mine = scatter(values, axis.tensor, Spec(0, (tokens,)))
    choices = expert.view(tokens, -1)
    first = min(axis.tensor.rank * len(mine), tokens)
    choices = choices[first : first + len(mine)]
    return mine, F.pad(choices, (0, 0, 0, len(mine) - len(choices)), value=-1).flatten()


class _Rows(torch.autograd.Function):
    """Rows in another order; indices past the end are rows of zeros. Backward is a gather and a sum over choices."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, there: Tensor, back: Tensor, choices: int, holes: bool) -> Tensor:
        ctx.choices, ctx.holes = choices, holes
        ctx.save_for_backward(back)
        return _pick(values, there, holes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        rows = _pick(gradient, ctx.saved_tensors[0], ctx.holes)
        if ctx.choices > 1:
            rows = rows.view(len(rows) // ctx.choices, ctx.choices, rows.shape[1]).sum(1)
        return rows, None, None, None, None


def _pick(values: Tensor, index: Tensor, holes: bool) -> Tensor:
    if not holes:
        return values.index_select(0, index)
    if not len(values):
        return values.new_zeros((len(index), values.shape[1]))
    last = len(values) - 1
    return values.index_select(0, index.clamp_max(last)).masked_fill_((index > last).unsqueeze(1), 0)


def _inverse(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse


def _leaf(values: Tensor) -> Tensor:
    return torch.zeros((), dtype=values.dtype, device=values.device, requires_grad=True)
