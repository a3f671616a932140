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
from lnn_lightning.parallel.step.remember import remembered
from lnn_lightning.parallel.tensor.axis import Spec, enter, gather, reduce, scatter
from lnn_lightning.parallel.tensor.randomness import forked_rng

Compute = Callable[[Tensor, list[int]], Tensor]
"""What local experts make of rows [rows, width] that are sorted by expert, with the number of rows of each."""

Problem = str | tuple[str, Tensor]
"""Why this rank cannot go on; with a tensor of one element: it cannot if that is not zero."""

T = TypeVar("T")

_FLAGS = 3
"""Numbers behind the counts: is there a problem, are gradients computed, and those of values too."""


def run_experts(
    values: Tensor,
    expert: Tensor,
    experts: int,
    axis: ExpertAxis,
    compute: Compute,
    *,
    problem: Problem | None = None,
    anew: bool = False,
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
        anew: ranks tell each other in recomputations too; otherwise a rank has the problems of its first run there.

    Returns:
        [tokens * choices, width that ``compute`` gave]: zeros in rows that no expert got.

    Raises:
        StepError: a rank has a problem, or some ranks compute gradients and some do not.
    """
    return run_experts_beside(values, expert, experts, axis, compute, lambda: None, problem=problem, anew=anew)[0]


def run_experts_beside(
    values: Tensor,
    expert: Tensor,
    experts: int,
    axis: ExpertAxis,
    compute: Compute,
    meanwhile: Callable[[], T],
    *,
    problem: Problem | None = None,
    anew: bool = False,
) -> tuple[Tensor, T]:
    """As :func:`run_experts`; ``meanwhile`` runs while the tokens are on their way, and its result comes along.

    Its backward runs while the gradients of the tokens are on their way back.
    """
    choices = _choices(values, expert)
    expert = expert.long()
    if axis.tensor is None or not len(values):
        return _run(values, expert, choices, experts, axis, compute, meanwhile, problem, anew)
    if axis.divides_experts:
        values = enter(values, axis.tensor)
        partial, beside = _run(values, expert, choices, experts, axis, compute, meanwhile, problem, anew)
        return reduce(partial, axis.tensor), beside
    tokens = Spec(0, (len(values),))
    mine = scatter(values, axis.tensor, tokens)
    expert = _part(expert.view(-1, choices), len(mine), axis.tensor.rank).flatten()
    part, beside = _run(mine, expert, choices, experts, axis, compute, meanwhile, problem, anew)
    whole = gather(part.reshape(len(mine), -1), axis.tensor, tokens)
    return whole.view(tokens.total * choices, -1), beside


def _run(
    values: Tensor,
    expert: Tensor,
    choices: int,
    experts: int,
    axis: ExpertAxis,
    compute: Compute,
    meanwhile: Callable[[], T],
    problem: Problem | None,
    anew: bool,
) -> tuple[Tensor, T]:
    key, order = torch.where((expert >= 0) & (expert < experts), expert, experts).sort(stable=True)
    bounds = torch.searchsorted(key, torch.arange(experts + 1, device=key.device))
    routing = _agree(bounds.diff(), values, axis, problem, anew)
    kept = sum(routing.route.send)
    there, back = order[:kept], _inverse(order)
    dropped = order[kept:] if kept < len(expert) else None

    tie = _leaf(values) if routing.differentiable else None
    first = Exchange(routing.route, 1 / axis.scale)
    rows = _Rows.apply(values, there // choices, back, choices, None, dropped)
    sent = send(rows, first, tie if routing.values_differentiable else None)
    beside = meanwhile()
    rows, dispatched = receive(sent, first)
    moves = routing.by_expert()
    if moves is not None:
        rows = _Rows.apply(rows, *moves, 1, None, None)
    computed = _compute(compute, rows, routing.local_counts, axis)
    if moves is not None:
        computed = _Rows.apply(computed, *reversed(moves), 1, None, None)
    second = Exchange(routing.route.back(), axis.scale)
    sent = send(computed, second, dispatched if routing.values_differentiable else tie)
    home, _ = receive(sent, second)
    return _Rows.apply(home, back, there, 1, dropped, None), beside


def _compute(compute: Compute, rows: Tensor, counts: list[int], axis: ExpertAxis) -> Tensor:
    with ExitStack() as stack:
        if axis.tensor is not None:
            # Random numbers of a rank's own where it has other rows; the same ones for parts of the same expert. Either
            # way the tensor ranks go on alike, whatever was drawn inside.
            place = 0 if axis.divides_experts else axis.tensor.rank
            stack.enter_context(forked_as(place))
            stack.enter_context(forked_rng(rows.device, place))
        computed = compute(rows, counts)
    if computed.dim() != 2 or len(computed) != len(rows):
        raise StepError(
            f"The experts were given {len(rows)} rows and gave a value of shape {list(computed.shape)}: it must have a "
            "row for each."
        )
    return computed


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


def _agree(counts: Tensor, values: Tensor, axis: ExpertAxis, problem: Problem | None, anew: bool = False) -> _Routing:
    """Exchanges how many rows there are for each expert, and what else ranks must know; the host waits here."""
    size, most = axis.size, -(-len(counts) // axis.size)
    text, bad = problem if isinstance(problem, tuple) else (problem, problem is not None)
    gradients = torch.is_grad_enabled()
    flags = _flags(counts, bad, gradients, gradients and values.requires_grad)
    told = torch.cat([_by_rank(counts, axis, most), flags.expand(size, -1)], 1)
    arriving, mine, theirs, table = _exchange_counts(told, axis, (lambda make: make()) if anew else remembered)
    _refuse(axis, text, [row[most] for row in theirs])
    _refuse_mixed(axis, [row[most + 1] for row in theirs])
    local = len(axis.span(len(counts)))
    return _Routing(
        Route(axis, [sum(row[:most]) for row in mine], [sum(row[:most]) for row in theirs], table),
        arriving[:, :local],
        [sum(row[each] for row in theirs) for each in range(local)],
        gradients,
        # in the second run of a reentrant checkpoint: not known, its first run was without gradients
        gradients and any(row[most + 2] or not row[most + 1] for row in theirs),
    )


def _flags(counts: Tensor, *flags: bool | Tensor) -> Tensor:
    """Flags as numbers, where the counts are; one may be a tensor of one element, which the host does not wait for."""
    numbers = [
        (flag != 0).to(counts).view(1) if isinstance(flag, Tensor) else counts.new_full((1,), flag) for flag in flags
    ]
    return torch.cat(numbers)


def _exchange_counts(
    told: Tensor, axis: ExpertAxis, remember: Callable[[Callable[[], Tensor]], Tensor]
) -> tuple[Tensor, list[list[int]], list[list[int]], list[list[int]] | None]:
    """What other ranks tell this one, a row each; on the host what it tells, what it is told, and who sends whom."""
    if axis.size == 1:
        mine = remember(told.cpu).tolist()
        return told, mine, mine, None
    size = told.nbytes // axis.size * (axis.size - 1)

    def heard() -> Tensor:
        if axis.hosts is None:
            count_bytes(counts=size)
            others = torch.empty_like(told)
            dist.all_to_all_single(others, told, group=axis.group)
            return others
        count_bytes(counts=size * axis.size)
        everything = told.new_empty((axis.size, *told.shape))
        dist.all_gather_single(everything.view(-1), told.view(-1), group=axis.group)
        return everything

    # a recomputation neither asks the other ranks again nor has the host wait
    others = remember(heard)
    if axis.hosts is None:
        mine, theirs = remember(lambda: torch.stack([told, others]).cpu()).tolist()
        return others, mine, theirs, None
    numbers = remember(others.cpu).tolist()
    theirs = [rows[axis.rank] for rows in numbers]
    table = [[sum(row[:-_FLAGS]) for row in rows] for rows in numbers]
    return others[:, axis.rank], numbers[axis.rank], theirs, table


def _by_rank(counts: Tensor, axis: ExpertAxis, most: int) -> Tensor:
    """Counts of all experts as a row for each rank."""
    each, more = divmod(len(counts), axis.size)
    first = counts[: more * (each + 1)].view(more, each + 1)
    rest = counts[more * (each + 1) :].view(axis.size - more, each)
    return torch.cat([first, F.pad(rest, (0, most - each))]) if more else rest


def _refuse(axis: ExpertAxis, text: str | None, flags: list[int]) -> None:
    bad = [place for place, flag in enumerate(flags) if flag]
    if not bad:
        return
    if axis.size == 1:
        raise StepError(text)
    ranks = ranks_in_words(_global_ranks(axis, bad))
    raise StepError(f"On {ranks}: {text or 'experts cannot be run, for the reason that is said there.'}")


def _refuse_mixed(axis: ExpertAxis, gradients: list[int]) -> None:
    off = [place for place, flag in enumerate(gradients) if not flag]
    if 0 < len(off) < axis.size:
        raise StepError(
            f"Experts were called without gradients (`torch.no_grad`) on {ranks_in_words(_global_ranks(axis, off))} "
            "and with gradients on the other ranks that share them out. Their backward would wait for ranks that have "
            "none: call them alike on all ranks."
        )


def _global_ranks(axis: ExpertAxis, places: list[int]) -> list[int]:
    ranks = dist.get_process_group_ranks(axis.group)
    return [ranks[place] for place in places]


def _choices(values: Tensor, expert: Tensor) -> int:
    """Choices of a token."""
    choices = len(expert) // max(len(values), 1)
    if values.dim() != 2 or expert.dim() != 1 or choices * len(values) != len(expert) or (len(values) and not choices):
        raise StepError(
            f"`values` must be [tokens, width] and `expert` [tokens * choices], got {list(values.shape)} and "
            f"{list(expert.shape)}."
        )
    return max(choices, 1)


def _part(choices: Tensor, tokens: int, rank: int) -> Tensor:
    """The choices of one tensor rank's tokens, of which each rank has equally many; padding goes to no expert."""
    mine = choices[rank * tokens : (rank + 1) * tokens]
    return F.pad(mine, (0, 0, 0, tokens - len(mine)), value=-1)


class _Rows(torch.autograd.Function):
    """Rows in another order. Backward is a gather too, and a sum over choices.

    The index of a row of zeros is past the end; ``empty`` are the places of these in the result, ``empty_back`` in the
    gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        there: Tensor,
        back: Tensor,
        choices: int,
        empty: Tensor | None,
        empty_back: Tensor | None,
    ) -> Tensor:
        ctx.choices = choices
        ctx.save_for_backward(back, empty_back)
        return _pick(values, there, empty)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        rows = _pick(gradient, *ctx.saved_tensors)
        if ctx.choices > 1:
            rows = rows.view(len(rows) // ctx.choices, ctx.choices, rows.shape[1]).sum(1)
        return rows, None, None, None, None, None


def _pick(values: Tensor, index: Tensor, empty: Tensor | None) -> Tensor:
    if empty is None:
        return values.index_select(0, index)
    if not len(values):
        return values.new_zeros((len(index), values.shape[1]))
    return values.index_select(0, index.clamp_max(len(values) - 1)).index_fill_(0, empty, 0)


def _inverse(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse


def _leaf(values: Tensor) -> Tensor:
    return torch.zeros((), dtype=values.dtype, device=values.device, requires_grad=True)
