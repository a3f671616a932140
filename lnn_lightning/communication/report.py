"""What compression does to gradients, over all ranks: bytes a step, ratio, errors that wait to be sent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from lnn_lightning.communication.compression import Compressor
from lnn_lightning.communication.running import Compressors
from lnn_lightning.communication.wire import Traffic

_Part = tuple[str, str]
"""A place (:attr:`Compressors.by_place`), and a level (:attr:`Compressor.levels`) or "": all that is sent for it."""


@dataclass(frozen=True)
class Bytes:
    """A step's, of one copy of the model: of all ranks that hold a part of it, the mean over data ranks.

    Attributes:
        plain: of gradients.
        payload: handed to collectives.
        sent: that leave ranks.
    """

    plain: float
    payload: float
    sent: float

    @property
    def ratio(self) -> float:
        """Bytes of gradients over those handed to collectives."""
        return self.plain / self.payload if self.payload else math.inf


@dataclass(frozen=True)
class Figures:
    """What was found over some steps, the same on all ranks.

    Attributes:
        total: of all of them.
        parts: by place, by level, or both, where there are several.
        error: norm of what a data rank has not sent yet (root of the mean square over data ranks); None: nothing is
            kept back.
        relative_error: the same over the norm of the mean gradient; None: it was not measured, or is not finite.
    """

    total: Bytes
    parts: dict[str, Bytes] = field(default_factory=dict)
    error: float | None = None
    relative_error: float | None = None


class Report:
    """Counts from when it is made, or from the last :meth:`take` on.

    Args:
        compressors: of this rank. All ranks have a report, also those that hold nothing to reduce.
    """

    def __init__(self, compressors: Compressors) -> None:
        self._compressors = compressors
        self._since = self._now()

    def measure(self) -> None:
        """In the steps until :meth:`take`, gradients are measured too, for the error relative to them."""
        for compressor in self._compressors.by_place.values():
            compressor.norms = []

    def take(self, steps: int) -> Figures:
        """What there was since the last time. Collective over all ranks.

        Args:
            steps: how many there were since then.
        """
        now, before = self._now(), self._since
        self._since = now
        mine = {part: _share(traffic, before.get(part), self._size(part) * steps) for part, traffic in now.items()}
        squares = [_squares(compressor) for compressor in self._compressors.by_place.values()]
        of_all: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_all, (mine, squares))
        parts: dict[_Part, Bytes] = {}
        for shares, _ in of_all:
            for part, share in shares.items():
                parts[part] = _sum([share, *([parts[part]] if part in parts else [])])
        whole = {part: found for part, found in parts.items() if not part[1]}
        error, relative = _errors([pair for _, pairs in of_all for pair in pairs])
        return Figures(_sum(whole.values()), _named(parts, alone=len(whole) == 1), error, relative)

    def _now(self) -> dict[_Part, Traffic]:
        found: dict[_Part, Traffic] = {}
        for place, compressor in self._compressors.by_place.items():
            for level, traffic in {"": compressor.traffic, **compressor.levels}.items():
                found[place, level] = Traffic(traffic.plain, traffic.payload, traffic.sent)
        return found

    def _size(self, part: _Part) -> int:
        """Ranks that average gradients at a place: a copy of the model has one of them."""
        return self._compressors.by_place[part[0]].wire.size


def _share(traffic: Traffic, before: Traffic | None, of: int) -> Bytes:
    last = before or Traffic()
    span = traffic.plain - last.plain, traffic.payload - last.payload, traffic.sent - last.sent
    return Bytes(*(each / of for each in span))


def _sum(each: Iterable[Bytes]) -> Bytes:
    several = list(each)
    return Bytes(*(sum(getattr(one, name) for one in several) for name in ("plain", "payload", "sent")))


def _named(parts: dict[_Part, Bytes], alone: bool) -> dict[str, Bytes]:
    """By name; the only place goes without saying."""
    names = {part: "/".join(each for each in ("" if alone else part[0], part[1]) if each) for part in parts}
    return {names[part]: found for part, found in parts.items() if names[part]}


def _squares(compressor: Compressor) -> tuple[float | None, float | None]:
    """Of error and gradient, this rank's share of one copy of the model; None: not kept, or not measured."""
    norms, compressor.norms = compressor.norms, None
    error = compressor.error_norm()
    kept = float(error) ** 2 / compressor.wire.size if error is not None else None
    if not norms:
        return kept, None
    return kept, (float(torch.stack(norms).norm()) / compressor.scale) ** 2 / compressor.wire.size


def _errors(squares: Sequence[tuple[float | None, float | None]]) -> tuple[float | None, float | None]:
    """The norm of what is kept, and relative to the gradient, from the squares of all ranks."""
    if all(error is None for error, _ in squares):
        return None, None
    error = math.sqrt(sum(error or 0.0 for error, _ in squares))
    gradient = math.sqrt(sum(gradient or 0.0 for _, gradient in squares))
    return error, error / gradient if 0 < gradient < math.inf else None
