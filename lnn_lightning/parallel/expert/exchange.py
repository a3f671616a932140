"""Rows that cross between the expert ranks: an uneven all-to-all, forward and backward.

An exchange is two autograd functions, so that other work fits between them: `send` starts the all-to-all, `receive`
waits for it. Backward goes the other way round: the gradient leaves in the backward of `receive`, and that of `send`
waits for it.

Autograd must reach every exchange on every rank, rows or no rows, or the others wait for ever. So besides the rows a
*tie* goes through the functions, a number without a meaning: who holds on to the tie of an exchange has its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lnn_lightning.parallel.expert.axis import ExpertAxis


@dataclass(eq=False)
class Sent:
    """Bytes that this rank sent to other ranks.

    Attributes:
        forward: rows.
        backward: their gradients.
        between_hosts: the share of both that went between hosts, where exchanges have two steps.
        counts: numbers of rows, which go before them.
        exchanges: all-to-alls of rows and gradients.
    """

    forward: int = 0
    backward: int = 0
    between_hosts: int = 0
    counts: int = 0
    exchanges: int = 0


_counters: list[Sent] = []


@contextmanager
def counting() -> Iterator[Sent]:
    """Counts the bytes of all exchanges inside, those that backward makes included."""
    sent = Sent()
    _counters.append(sent)
    try:
        yield sent
    finally:
        _counters.remove(sent)


def count_bytes(**sizes: int) -> None:
    """Adds to the counters around."""
    for counter in _counters:
        for name, size in sizes.items():
            setattr(counter, name, getattr(counter, name) + size)


@dataclass(frozen=True, eq=False)
class Route:
    """How many rows go from each rank to each.

    Attributes:
        axis: the ranks.
        send: rows for each rank.
        receive: rows from each rank.
        table: for two steps: rows from each rank (first index) to each.
        backward: it is gradients that go.
    """

    axis: ExpertAxis
    send: list[int]
    receive: list[int]
    table: list[list[int]] | None = None
    backward: bool = False

    def back(self, backward: bool = False) -> Route:
        """The way back, which gradients of the rows take (``backward``) and what is made of them."""
        table = None if self.table is None else [list(column) for column in zip(*self.table, strict=True)]
        return Route(self.axis, self.receive, self.send, table, backward)

    def start(self, rows: Tensor) -> Transfer:
        """Sends rows, ordered by the rank they are for. Collective."""
        axis = self.axis
        if axis.size == 1:
            return Transfer(rows.detach())
        if axis.hosts is None or self.table is None:
            return self._exchange(rows, self.send, self.receive, axis.group, axis.rank)
        return self._start_in_two_steps(rows, *axis.hosts, self.table)

    def _start_in_two_steps(
        self, rows: Tensor, inner: dist.ProcessGroup, outer: dist.ProcessGroup, table: list[list[int]]
    ) -> Transfer:
        """Within the host to the rank at the receiver's place; from there to the receiver's host.

        So a host sends to another one once from each of its ranks, not from each to each.
        """
        each, hosts = dist.get_world_size(inner), dist.get_world_size(outer)
        host, place = divmod(self.axis.rank, each)
        mates = [host * each + mate for mate in range(each)]  # on this host
        peers = [other * each + place for other in range(hosts)]  # at this place
        rows = _regroup(rows, self.send, hosts)  # by place, then host
        send = [sum(self.send[mate::each]) for mate in range(each)]
        arriving = [[table[mate][peer] for peer in peers] for mate in mates]
        within = self._exchange(rows, send, [sum(row) for row in arriving], inner, place)

        def between(rows: Tensor) -> Transfer:
            rows = _regroup(rows, [count for row in arriving for count in row], each)  # by host, then source
            send = [sum(row[other] for row in arriving) for other in range(hosts)]
            receive = [sum(self.receive[other * each : (other + 1) * each]) for other in range(hosts)]
            return self._exchange(rows, send, receive, outer, host, between_hosts=True)

        within.onward = between
        return within

    def _exchange(
        self,
        rows: Tensor,
        send: list[int],
        receive: list[int],
        group: dist.ProcessGroup | None,
        rank: int,
        between_hosts: bool = False,
    ) -> Transfer:
        rows = rows.contiguous()
        size = (len(rows) - send[rank]) * rows[:1].numel() * rows.element_size()
        count_bytes(**{"backward" if self.backward else "forward": size}, exchanges=1)
        if between_hosts:
            count_bytes(between_hosts=size)
        received = rows.new_empty((sum(receive), *rows.shape[1:]))
        work = dist.all_to_all_single(received, rows, receive, send, group=group, async_op=True)
        return Transfer(received, work, rows)


def _regroup(rows: Tensor, counts: list[int], outer: int) -> Tensor:
    """Pieces of rows, which lie in ``outer`` runs of equally many: the first of each run, the second of each, ..."""
    pieces = rows.split(counts)
    inner = len(pieces) // outer
    return torch.cat([pieces[run * inner + each] for each in range(inner) for run in range(outer)])


@dataclass(eq=False)
class Transfer:
    """Rows on their way.

    Attributes:
        received: where they arrive.
        work: what to wait for.
        kept: what is being sent, which must live until then.
        onward: sends what arrived further.
    """

    received: Tensor
    work: Any = None
    kept: Tensor | None = None
    onward: Callable[[Tensor], Transfer] | None = None

    def finish(self) -> Tensor:
        """The rows that arrived, ordered by the rank they came from."""
        if self.work is not None:
            self.work.wait()
            self.work = self.kept = None
        return self.received if self.onward is None else self.onward(self.received).finish()


@dataclass(eq=False)
class Exchange:
    """One exchange in a graph: the route, what gradients are multiplied by, and what is under way."""

    route: Route
    scale: float = 1.0
    under_way: list[Transfer] = field(default_factory=list)


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, tie: Tensor | None, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.under_way.append(exchange.route.start(rows))
        return rows.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows = ctx.exchange.under_way.pop().finish()
        if ctx.exchange.scale != 1:
            rows = rows * ctx.exchange.scale
        tie = gradient.new_zeros(()) if ctx.needs_input_grad[1] else None
        return rows if ctx.needs_input_grad[0] else None, tie, None


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sent: Tensor, exchange: Exchange) -> tuple[Tensor, Tensor]:
        ctx.exchange = exchange
        # Recomputation stops behind the last tensor that is saved: with this one, behind the all-to-all on all ranks.
        ctx.save_for_backward(sent)
        return exchange.under_way.pop().finish(), sent.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, None]:
        (sent,) = ctx.saved_tensors  # recomputation, if any, has its all-to-alls now, before this one
        ctx.exchange.under_way.append(ctx.exchange.route.back(backward=True).start(gradient))
        return torch.zeros_like(sent), None


def send(rows: Tensor, exchange: Exchange, tie: Tensor | None = None) -> Tensor:
    """Starts an exchange of rows, which are ordered by the rank they are for.

    Args:
        rows: [rows, width].
        exchange: a fresh one.
        tie: a number whose backward must come after that of this exchange. With one that requires gradients the
            exchange has a backward, whether the rows require gradients or not.

    Returns:
        What `receive` takes.
    """
    return _Send.apply(rows, tie, exchange)


def receive(sent: Tensor, exchange: Exchange) -> tuple[Tensor, Tensor]:
    """Waits for an exchange that `send` started.

    Returns:
        The rows that arrived, ordered by the rank they came from, and the tie of this exchange.
    """
    return _Receive.apply(sent, exchange)
