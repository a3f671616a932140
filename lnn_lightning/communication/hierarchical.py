"""One way of averaging inside a host, another between hosts."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lnn_lightning.communication.compression import Compression, Compressor, Ranks
from lnn_lightning.communication.local import LocalSGD
from lnn_lightning.communication.rows import Rows
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
        inner: how the ranks of a host average their gradients, as a whole each; None: exactly.
        outer: how hosts average theirs; None: exactly.

    Raises:
        LayoutError: neither is given, or one is no compression or hierarchical itself; (when it is set up) hosts have
            different numbers of ranks.
    """

    inner: Compression | None = None
    outer: Compression | None = None

    def __post_init__(self) -> None:
        for name, each in (("inner", self.inner), ("outer", self.outer)):
            if isinstance(each, LocalSGD):
                raise LayoutError(
                    f"Hierarchical's `{name}` cannot be LocalSGD, which leaves gradients alone and averages parameters "
                    "over all ranks. Use it without Hierarchical."
                )
            if isinstance(each, Hierarchical) or not (each is None or isinstance(each, Compression)):
                raise LayoutError(
                    f"Hierarchical's `{name}` must be None or a compression that is not hierarchical itself, such as "
                    f"PowerSGD(rank=4), got {each!r}."
                )
        if self.inner is None and self.outer is None:
            raise LayoutError(
                "Hierarchical(inner=None, outer=None) compresses nothing: set `outer`, for what leaves a host."
            )

    @override
    def compressor(self, ranks: Ranks) -> Compressor:
        return _OverHosts(ranks, self, hosts_of(ranks.group))


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

    @override
    def _reduce(self, gradients: Mapping[str, Tensor]) -> None:
        self.average(list(gradients.values()))


class _OverHosts(Compressor):
    """Over the hosts of a group.

    Args:
        ranks: all of them.
        settings: how.
        hosts: the host of each rank.
    """

    def __init__(self, ranks: Ranks, settings: Hierarchical, hosts: Sequence[Host]) -> None:
        super().__init__(ranks)
        by_host = ranks_by_host(hosts)
        host = next(index for index, members in enumerate(by_host) if self.wire.rank in members)
        self._rows = Rows(len(by_host[0]), by_host[host].index(self.wire.rank))
        self._hosts = ",".join(str(index) for _, index in sorted((r, i) for i, m in enumerate(by_host) for r in m))
        several, both = len(by_host) > 1, len(by_host) > 1 and self._rows.ranks > 1
        if not several and settings.outer is not None and self.wire.rank == 0:
            warnings.warn(
                f"Hierarchical: all {len(hosts)} ranks that average gradients are on one host ({hosts[0].name}). "
                "Nothing leaves it, and the `outer` compression is not used.",
                stacklevel=2,
            )
        inside = part_of(ranks.group, by_host, "inside_host") if both else ranks.group
        places = [list(members) for members in zip(*by_host, strict=True)]
        between = part_of(ranks.group, places, "between_hosts") if both else ranks.group
        # what hosts draw, and ranks at different places on them, has nothing to do with each other
        seeds = seed_of(ranks.seed, 0, host), seed_of(ranks.seed, 1, self._rows.rank)
        self._levels: dict[str, Compressor] = {}
        if both or not several:
            self._levels[INNER] = _made(settings.inner, Ranks(inside, seeds[0], ranks.reduce_dtype))
        if several:
            self._levels[OUTER] = _made(settings.outer, Ranks(between, seeds[1], ranks.reduce_dtype))

    @override
    def _reduce(self, gradients: Mapping[str, Tensor]) -> None:
        for level in self._levels.values():
            level.scale = self.scale
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
        if not isinstance(inner, Exact):
            inner.reduce(gradients)
            return self._rows.pack(gradients)[self._rows.rank].clone()
        dtype = reduction_dtype(next(iter(gradients.values())).dtype, self.ranks.reduce_dtype)
        return inner.wire.scatter_sum(self._rows.pack(gradients).to(dtype).div_(self._rows.ranks))

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


def _made(settings: Compression | None, ranks: Ranks) -> Compressor:
    return settings.compressor(ranks) if settings is not None else Exact(ranks)
