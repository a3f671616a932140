"""The largest gradients alone (Deep Gradient Compression: Lin et al. 2018, arXiv 1712.01887)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lnn_lightning.communication.compression import Compression, Compressor, Ranks, Seat
from lnn_lightning.communication.errors import Errors
from lnn_lightning.communication.grouping import by_dtype, working_dtype
from lnn_lightning.communication.settings import is_number
from lnn_lightning.parallel.errors import LayoutError

_VELOCITY = "velocity."
_FIRST_DENSITY = 0.25


@dataclass(frozen=True)
class TopK(Compression):
    """The elements of each parameter that are largest travel, with their places; the others wait and add up.

    Algorithm 4 of the paper. With a momentum m, a rank keeps a velocity u = m u + g and adds it to what waits,
    v = v + u; the largest of v are sent, and both u and v are zero where they were (momentum factor masking). The
    optimizer must then have no momentum of its own (``SGD(momentum=0)``); so what is averaged exactly arrives with the
    momentum, too. Without, v = v + g: top-k with error feedback, for any optimizer. What arrives is the mean over the
    ranks of what each has sent.

    The paper clips a rank's gradient by its norm over all layers, scaled by 1/sqrt(ranks). Gradients arrive here in
    buckets, so ``clip`` is for each parameter by itself.

    Args:
        density: share of the elements that travel; of each parameter at least one.
        momentum: of the velocity; 0: without.
        warmup_steps: steps in which the density comes down from a quarter in equal factors of a quarter.
        clip: largest norm of the mean gradient of a parameter; a rank's own is held below clip/sqrt(ranks) before it
            is added. None: no clipping.
        start_step: first step that is compressed; gradients of those before are averaged exactly.
        min_size: parameters with fewer elements are averaged exactly.

    Raises:
        LayoutError: a value out of its range.
    """

    density: float = 0.01
    momentum: float = 0.0
    warmup_steps: int = 0
    clip: float | None = None
    start_step: int = 0
    min_size: int = 1024

    def __post_init__(self) -> None:
        if not is_number(self.density) or not 0 < self.density <= 1:
            raise LayoutError(f"TopK's `density` must be above 0 and at most 1, got {self.density!r}.")
        if not is_number(self.momentum) or not 0 <= self.momentum < 1:
            raise LayoutError(f"TopK's `momentum` must be at least 0 and below 1, got {self.momentum!r}.")
        for name in ("warmup_steps", "start_step", "min_size"):
            value = getattr(self, name)
            if not is_number(value, whole=True) or value < 0:
                raise LayoutError(f"TopK's `{name}` must be a whole number of at least 0, got {value!r}.")
        if self.clip is not None and not (is_number(self.clip) and self.clip > 0):
            raise LayoutError(f"TopK's `clip` must be None or above 0, got {self.clip!r}.")

    def density_at(self, step: int) -> float:
        """Share of the elements that travel in a step; the first compressed one is 0."""
        if step >= self.warmup_steps:
            return self.density
        phases = max(1, math.ceil(math.log(self.density) / math.log(_FIRST_DENSITY)))
        return max(self.density, _FIRST_DENSITY ** (1 + step * phases // self.warmup_steps))

    def compresses(self, shape: Sequence[int]) -> bool:
        """Whether the gradient of a parameter of a shape is compressed."""
        return math.prod(shape) >= max(self.min_size, 1)

    @override
    def advice(self, optimizer: torch.optim.Optimizer) -> str | None:
        groups = optimizer.param_groups
        if not self.momentum or not any(group.get("momentum") or "betas" in group for group in groups):
            return None
        return (
            f"`TopK(momentum={self.momentum})` sends velocities, and {type(optimizer).__name__} has momentum too: "
            "it would act twice. Use SGD without momentum, or TopK without."
        )

    @override
    def state_bytes(self, shape: Sequence[int], dtype: torch.dtype, seat: Seat) -> int:
        kept = (1 if self.momentum else 0) + (1 if self.compresses(shape) else 0)
        return kept * math.prod(shape) * working_dtype(dtype).itemsize

    @override
    def compressor(self, ranks: Ranks) -> Compressor:
        return _Largest(ranks, self)


class _Largest(Compressor):
    def __init__(self, ranks: Ranks, settings: TopK) -> None:
        super().__init__(ranks)
        self._settings, self._velocities = settings, Errors(_VELOCITY)

    @override
    def _reduce(self, gradients: Mapping[str, Tensor]) -> None:
        settings, step = self._settings, self.step - self._settings.start_step
        sparse = {name: each for name, each in gradients.items() if step >= 0 and settings.compresses(each.shape)}
        whole = {name: each for name, each in gradients.items() if name not in sparse}
        self.average(list(whole.values()))
        if settings.momentum:
            for name, mean in whole.items():
                self._move(name, mean)
        for members in by_dtype(sparse).values():
            self._compress(members, settings.density_at(step))

    def _move(self, name: str, mean: Tensor) -> None:
        """Puts the velocity in the place of a mean, from which it follows; the same on all ranks."""
        kept = self._velocities.of(name, mean)
        velocity = torch.add(mean.to(kept.dtype) / self.scale, kept, alpha=self._settings.momentum)
        used = mean.any()
        mean.copy_(torch.where(used, velocity * self.scale, 0))
        kept.copy_(torch.where(used & velocity.isfinite().all(), velocity, kept))

    def _compress(self, gradients: Mapping[str, Tensor], density: float) -> None:
        """Two collectives: the values and the places of a bucket."""
        added = {name: self._add(name, gradient) for name, gradient in gradients.items()}
        places = [_places(waiting, density) for _, waiting, _ in added.values()]
        values = [
            torch.where(used, waiting.view(-1)[own], 0)
            for own, (_, waiting, used) in zip(places, added.values(), strict=True)
        ]
        starts = [0]
        for gradient in gradients.values():
            starts.append(starts[-1] + gradient.numel())
        total = starts.pop()
        narrow = torch.int32 if total < 2**31 else torch.int64
        offset = [own + start for own, start in zip(places, starts, strict=True)]
        everyones = self.wire.gather(torch.cat(values))
        at = self.wire.gather(torch.cat(offset).to(narrow)).long()
        arrived = torch.zeros(total, dtype=everyones.dtype, device=everyones.device)
        for rank in range(self.wire.size):  # one after another: places of one rank differ, so the sum has one order
            arrived.index_add_(0, at[rank], everyones[rank])
        arrived.div_(self.wire.size)
        parts = arrived.split([gradient.numel() for gradient in gradients.values()])
        for (name, gradient), own, part in zip(gradients.items(), places, parts, strict=True):
            self._keep(name, gradient, *added[name], own, part.isfinite().all())
            gradient.copy_(part.mul_(self.scale).view_as(gradient))

    def _add(self, name: str, gradient: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        """Velocity, what waits, and whether this rank has a gradient at all; without the scale."""
        waiting = self.errors.of(name, gradient)
        own = gradient.to(waiting.dtype) / self.scale
        if self._settings.clip is not None:
            norm = torch.linalg.vector_norm(own)
            limit = self._settings.clip / math.sqrt(self.wire.size)
            own = own * torch.where(norm > limit, limit / norm, 1.0)
        used = gradient.any()
        if self._settings.momentum == 0:
            return None, waiting + own, used
        velocity = torch.add(own, self._velocities.of(name, gradient), alpha=self._settings.momentum)
        return velocity, waiting + velocity, used

    def _keep(
        self,
        name: str,
        gradient: Tensor,
        velocity: Tensor | None,
        waiting: Tensor,
        used: Tensor,
        sent: Tensor,
        finite: Tensor,
    ) -> None:
        good = finite & used
        for new, kept in ((velocity, self._velocities), (waiting, self.errors)):
            if new is not None:
                new.view(-1)[sent] = 0
                old = kept.of(name, gradient)
                old.copy_(torch.where(good, new, old))

    @override
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | self._velocities.state_dict()

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._velocities.load_state_dict(state)


def _places(values: Tensor, density: float) -> Tensor:
    """Where the largest are. What is not finite counts as largest, so that it arrives."""
    flat = values.view(-1)
    count = max(1, math.ceil(density * flat.numel()))
    return flat.abs().nan_to_num(nan=math.inf).topk(count, sorted=False).indices
