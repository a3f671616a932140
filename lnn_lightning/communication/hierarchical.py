"""One way of averaging inside a host, another between hosts."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lnn_lightning.communication.compression import Compression, Compressor, Ranks, Seat
from lnn_lightning.communication.local import LocalSGD
from lnn_lightning.communication.rows import Rows
from lnn_lightning.communication.two_steps import CodedMean
from lnn_lightning.communication.wire import Traffic
from lnn_lightning.parallel.errors import LayoutError
from lnn_lightning.parallel.hosts import Host, hosts_in_words, hosts_of
from lnn_lightning.parallel.reduction import reduction_dtype
from lnn_lightning.parallel.step.randomness import seed_of
from lnn_lightning.parallel.subgroups import part_of

INNER, OUTER = "inner", "outer"


@dataclass(frozen=True)
class Hierarchical(Compression):
    """Gradients are compressed where they leave a host, as in DALL-E (Ramesh et al. 2021, arXiv 2102.12092, section E).

    The ranks of a host take the mean of their gradients, each of some rows (a reduce-scatter over dimension 0, as
    ``fully_shard`` cuts parameters). Ranks with the same place on all hosts average their rows by ``outer``, and the
    ranks of a host gather the result. So ``outer`` works on pieces of parameters, other ones on each rank of a host:
    its factors, its errors, its ``min_compression`` are of these.

    On one host nothing leaves it: ``outer`` has nothing to do, which is warned of. With one rank a host there is only
    ``outer``.

    Args:
        inner: how the ranks of a host average their gradients: a reduce-scatter in half precision (Cast), otherwise an
            all-reduce; None: exactly.
        outer: how hosts average theirs; None: exactly.

    Raises:
        LayoutError: neither is given, or one is no compression or hierarchical itself; (when it is set up) hosts have
            different numbers of ranks.
    """

    inner: Compression | None = None
    outer: Compression | None = None

    def __post_init__(self) -> None:
        for name, each in (("inner", self.inner), ("outer", self.outer)):
            if isinstance(each, (Hierarchical, LocalSGD)) or not (each is None or isinstance(each, Compression)):
                raise LayoutError(
                    f"Hierarchical's `{name}` must be None or a compression of gradients, such as PowerSGD(rank=4), "
                    f"and not hierarchical itself, got {each!r}."
                )
        if self.inner is None and self.outer is None:
            raise LayoutError(
                "Hierarchical(inner=None, outer=None) compresses nothing: set `outer`, for what leaves a host."
            )

    @property
    def remembers(self) -> bool:  # type: ignore[override]
        """Whether one of them does."""
        return any(each.remembers for each in (self.inner, self.outer) if each is not None)

    @override
    def compressor(self, ranks: Ranks) -> Compressor:
        return _OverHosts(ranks, self, hosts_of(ranks.group))

    @override
    def state_bytes(self, shape: Sequence[int], dtype: torch.dtype, seat: Seat) -> int:
        spread = Spread.of(seat.hosts, seat.rank)
        total = 0
        if spread.has_inner and self.inner is not None:
            inside = Seat(spread.place, tuple(seat.hosts[rank] for rank in spread.by_host[spread.host]))
            total += self.inner.state_bytes(shape, dtype, inside)
        if spread.has_outer and self.outer is not None:
            between = Seat(spread.host, tuple(seat.hosts[rank] for rank in spread.same_place[spread.place]))
            piece = spread.rows.shape(shape)
            total += self.outer.state_bytes(piece, dtype, between) if prod(piece) else 0
        return total


@dataclass(frozen=True)
class Spread:
    """How ranks lie on hosts, and where one of them is.

    Attributes:
        by_host: the ranks of each host.
        host: the rank's.
        place: the rank's among those of its host.
    """

    by_host: list[list[int]]
    host: int
    place: int

    @classmethod
    def of(cls, hosts: Sequence[Host], rank: int) -> Spread:
        """Finds out, from the host of each rank.

        Raises:
            LayoutError: hosts have different numbers of ranks.
        """
        by_host = ranks_by_host(hosts)
        host = next(index for index, members in enumerate(by_host) if rank in members)
        return cls(by_host, host, by_host[host].index(rank))

    @property
    def same_place(self) -> list[list[int]]:
        """For each place on a host, the ranks there."""
        return [list(ranks) for ranks in zip(*self.by_host, strict=True)]

    @property
    def has_outer(self) -> bool:
        """Whether there are several hosts."""
        return len(self.by_host) > 1

    @property
    def has_inner(self) -> bool:
        """Whether hosts have several ranks, or there is one alone."""
        return len(self.by_host[0]) > 1 or not self.has_outer

    @property
    def rows(self) -> Rows:
        """What the rank averages with other hosts."""
        return Rows(len(self.by_host[0]), self.place) if self.has_inner else Rows(1, 0)


def ranks_by_host(hosts: Sequence[Host]) -> list[list[int]]:
    """The ranks of each host, in the order of their first ones.

    Args:
        hosts: the host of each rank.

    Raises:
        LayoutError: hosts have different numbers of ranks.
    """
    on: dict[Host, list[int]] = {}
    for rank, host in enumerate(hosts):
        on.setdefault(host, []).append(rank)
    if len({len(ranks) for ranks in on.values()}) > 1:
        raise LayoutError(
            "Hierarchical compression needs equally many data ranks on every host: each averages rows with the ranks "
            f"of the same place on other hosts. Here they are on {hosts_in_words(hosts, range(len(hosts)))}, counted "
            "along the group. Start equally many processes on every host, or use `outer` without Hierarchical."
        )
    return list(on.values())


class Exact(Compressor):
    """Averages without compression."""

    can_scatter = True

    @override
    def _reduce(self, gradients: Mapping[str, Tensor]) -> None:
        self.average(list(gradients.values()))

    @override
    def _scatter_mean(self, chunks: Tensor, name: str) -> Tensor:
        """In the dtype of the reduction."""
        dtype = reduction_dtype(chunks.dtype, self.ranks.reduce_dtype)
        return self.wire.scatter_sum(chunks.to(dtype).div(self.wire.size))


class _OverHosts(Compressor):
    """Over the hosts of a group.

    Args:
        ranks: all of them.
        settings: how.
        hosts: the host of each rank.
    """

    def __init__(self, ranks: Ranks, settings: Hierarchical, hosts: Sequence[Host]) -> None:
        super().__init__(ranks)
        spread = Spread.of(hosts, self.wire.rank)
        self._rows, self._hosts = spread.rows, ",".join(str([*dict.fromkeys(hosts)].index(host)) for host in hosts)
        if not spread.has_outer and settings.outer is not None and self.wire.rank == 0:
            warnings.warn(
                f"Hierarchical: all {len(hosts)} ranks that average gradients are on one host ({hosts[0].name}). "
                "Nothing leaves it, and the `outer` compression is not used.",
                stacklevel=2,
            )
        inside = between = ranks
        if spread.has_inner and spread.has_outer:
            # hosts draw random numbers of their own, and so do the ranks at each place on them
            group = part_of(ranks.group, spread.by_host, "inside_host")
            inside = replace(ranks, group=group, seed=seed_of(ranks.seed, 0, spread.host))
            group = part_of(ranks.group, spread.same_place, "between_hosts")
            between = replace(ranks, group=group, seed=seed_of(ranks.seed, 1, spread.place))
        self._levels: dict[str, Compressor] = {}
        if spread.has_inner:
            self._levels[INNER] = settings.inner.compressor(inside) if settings.inner is not None else Exact(inside)
        if spread.has_outer:
            self._levels[OUTER] = settings.outer.compressor(between) if settings.outer is not None else Exact(between)

    @override
    def _reduce(self, gradients: Mapping[str, Tensor]) -> None:
        for level in self._levels.values():
            level.scale, level.step = self.scale, self.step  # which are set from outside
        if len(self._levels) == 1:
            (only,) = self._levels.values()
            only.reduce(gradients)
            return
        inner, outer = self._levels[INNER], self._levels[OUTER]
        by_dtype: dict[torch.dtype, dict[str, Tensor]] = {}
        for name, gradient in gradients.items():
            by_dtype.setdefault(gradient.dtype, {})[name] = gradient
        own = {dtype: self._mean_in_host(inner, members) for dtype, members in by_dtype.items()}
        pieces: dict[str, Tensor] = {}
        for dtype, members in by_dtype.items():
            pieces |= self._rows.pieces(members, own[dtype])
        if pieces:
            outer.reduce(pieces)
        for dtype, members in by_dtype.items():
            self._rows.unpack(inner.wire.gather(own[dtype].to(dtype)), members)

    def _mean_in_host(self, inner: Compressor, gradients: Mapping[str, Tensor]) -> Tensor:
        """This rank's line of the host's mean of gradients of one dtype."""
        if inner.can_scatter and not isinstance(inner, CodedMean):  # whose blocks would depend on the bucket
            return inner.scatter_mean(self._rows.pack(gradients), next(iter(gradients)))
        inner.reduce(gradients)
        return self._rows.pack(gradients)[self._rows.rank].clone()

    @override
    def finish_step(self) -> None:
        super().finish_step()
        for level in self._levels.values():
            level.finish_step()

    @property
    @override
    def traffic(self) -> Traffic:
        each = [level.traffic for level in self._levels.values()]
        return Traffic(self.wire.traffic.plain, sum(t.payload for t in each), sum(t.sent for t in each))

    @property
    @override
    def levels(self) -> dict[str, Traffic]:
        return {name: level.traffic for name, level in self._levels.items()}

    @override
    def error_norm(self) -> Tensor | None:
        """As if each rank had all rows: the mean of its square over a host's ranks is that of what the host kept."""
        norms = {name: norm for name, level in self._levels.items() if (norm := level.error_norm()) is not None}
        if OUTER in norms and len(self._levels) > 1:
            norms[OUTER] = norms[OUTER] * self._rows.ranks**0.5
        return torch.linalg.vector_norm(torch.stack([*norms.values()])) if norms else None

    @override
    def state_dict(self) -> dict[str, Any]:
        kept = super().state_dict() | {"hosts": self._hosts}
        for name, level in self._levels.items():
            kept |= {f"{name}.{key}": value for key, value in level.state_dict().items()}
        return kept

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if state["hosts"] != self._hosts:
            if self.wire.rank == 0:
                warnings.warn(
                    "Hierarchical: ranks are spread over hosts in another way than when the checkpoint was written. "
                    "What the compression had kept (errors not sent yet, factors) is dropped.",
                    stacklevel=2,
                )
            return
        for name, level in self._levels.items():
            own = {key: value for key, value in state.items() if key.startswith(f"{name}.")}
            level.load_state_dict({key.removeprefix(f"{name}."): value for key, value in own.items()})
