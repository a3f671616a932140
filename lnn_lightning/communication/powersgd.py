"""Gradients as products of two thin matrices (PowerSGD: Vogels et al. 2019, arXiv 1905.13727)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize
from typing_extensions import override

from lnn_lightning.communication.compression import Compression, Compressor, Ranks, Seat
from lnn_lightning.communication.grouping import working_dtype
from lnn_lightning.communication.orthogonalize import METHODS
from lnn_lightning.communication.settings import is_number
from lnn_lightning.parallel.errors import LayoutError
from lnn_lightning.parallel.step.randomness import seed_of

_FACTORS = {"fp16": torch.float16, "bf16": torch.bfloat16}
_LARGEST = 2.0**14
_PREFIX = "q."


def compression_ratio(shape: Sequence[int], rank: int, gradient_bits: int = 32, factor_bits: int = 32) -> float:
    """How many times smaller two factors are than the gradient of a parameter: nm/(r(n+m)) in numbers.

    Args:
        shape: of the parameter; 0 for one that is no matrix, or an empty one.
        rank: of the approximation.
        gradient_bits: of a number of the gradient.
        factor_bits: of a number of the factors.
    """
    size = torch.Size(shape).numel()
    if len(shape) < 2 or size == 0:
        return 0.0
    return size * gradient_bits / (rank * (shape[0] + size // shape[0]) * factor_bits)


@dataclass(frozen=True)
class PowerSGD(Compression):
    """The gradient M of each matrix (n, m) travels as two factors, P (n, rank) and Q (m, rank).

    Algorithms 1 and 2 of the paper, literally: M is this rank's gradient and what it has not sent yet; P = MQ is
    averaged over the ranks and orthogonalised, Q = MᵀP is averaged, and PQᵀ arrives. A rank keeps M minus its own PQᵀ
    (line 9 of algorithm 2; minus the average, as in torch's hook, the sum over the ranks is the same, but each rank
    would add up its distance from the others for ever). A parameter of more dimensions is a matrix of the first and
    all others. Vectors, and matrices that would not get smaller enough, are averaged as they are.

    torch's ``powerSGD_hook`` has the same factors and the same mean, and is right where nothing but DDP on CUDA is
    asked of it. But it keeps errors and Q by the number of the bucket, which DDP builds anew behind the first step;
    adds an error with the loss scale of another step, and keeps one that is not finite for ever; issues collectives
    from callbacks, which hangs on gloo; waits for the device in each bucket; and has a pickle for its state.

    DALL-E's form (Ramesh et al. 2021, arXiv 2102.12092, appendix E): ``PowerSGD(rank=512, warm_start=False,
    resample=False, factors="fp16", epsilon=1e-6)``.

    Args:
        rank: columns of the factors.
        start_step: first step that is compressed; those before are averaged exactly, since early gradients change
            too fast to be sent late. A tenth of the run, or its warm-up, is a good choice.
        min_compression: a matrix whose nm/(rank(n+m)) is smaller is averaged as it is. At least 1.
        warm_start: Q starts from that of the step before, so that steps together are a power iteration.
        resample: without warm start: a new random Q each step; False: the same one in all (DALL-E).
        error_feedback: what was not sent is added to the next gradient. Costs one fp32 number for each of the
            compressed parameters.
        orthogonalization: ``"qr"`` (Householder) or ``"gram_schmidt"`` (the paper; loses orthogonality where columns
            are nearly dependent).
        epsilon: see :mod:`~lnn_lightning.communication.orthogonalize`.
        factors: ``"fp16"`` or ``"bf16"``: the factors in 16 bits on the wire; None: in fp32. The rounding of a rank
            is part of what it has not sent. fp16 costs one more small collective for each bucket: the factors travel
            in units of the gradients' norm, so that they neither overflow nor vanish.

    Raises:
        LayoutError: a value out of its range.
    """

    rank: int = 4
    start_step: int = 0
    min_compression: float = 2.0
    warm_start: bool = True
    resample: bool = True
    error_feedback: bool = True
    orthogonalization: str = "qr"
    epsilon: float = 0.0
    factors: str | None = None

    def __post_init__(self) -> None:
        for name, low in (("rank", 1), ("start_step", 0), ("min_compression", 1), ("epsilon", 0)):
            value = getattr(self, name)
            whole = name in ("rank", "start_step")
            if not is_number(value, whole) or not value >= low:
                number = "whole number" if whole else "number"
                raise LayoutError(f"PowerSGD's `{name}` must be a {number} of at least {low}, got {value!r}.")
        if self.orthogonalization not in METHODS:
            raise LayoutError(
                f"PowerSGD's `orthogonalization` must be one of {', '.join(METHODS)}, got {self.orthogonalization!r}."
            )
        if self.factors is not None and self.factors not in _FACTORS:
            raise LayoutError(
                f"PowerSGD's `factors` must be one of {', '.join(_FACTORS)} or None, got {self.factors!r}."
            )

    def compresses(self, shape: Sequence[int]) -> bool:
        """Whether the gradient of a parameter travels as two factors."""
        return compression_ratio(shape, self.rank) >= self.min_compression

    @override
    def state_bytes(self, shape: Sequence[int], dtype: torch.dtype, seat: Seat) -> int:
        if not self.compresses(shape):
            return 0
        size = torch.Size(shape).numel()
        kept = size if self.error_feedback else 0
        kept += self.rank * (size // shape[0]) if self.warm_start or not self.resample else 0
        return kept * working_dtype(dtype).itemsize

    @override
    def compressor(self, ranks: Ranks) -> Compressor:
        return _PowerIteration(ranks, self)


@dataclass
class _Stack:
    """Matrices of one shape in a bucket.

    Attributes:
        gradients: by parameter.
        wanted: (matrices, n, m): what should be sent.
        used: (matrices, 1, 1): whether this rank has a gradient.
        q: (matrices, rank, m): Qᵀ from the step before, columns of Q of length 1.
        unit: (matrices, 1, 1): of the numbers on the wire.
    """

    gradients: dict[str, Tensor]
    wanted: Tensor
    used: Tensor
    q: Tensor
    unit: Tensor


class _PowerIteration(Compressor):
    def __init__(self, ranks: Ranks, settings: PowerSGD) -> None:
        super().__init__(ranks)
        self._settings = settings
        self._orthonormal = METHODS[settings.orthogonalization]
        self._q: dict[str, Tensor] = {}

    @override
    def _reduce(self, gradients: Mapping[str, Tensor]) -> None:
        whole: list[Tensor] = []
        by_dtype: dict[torch.dtype, dict[tuple[int, int], dict[str, Tensor]]] = {}
        for name, gradient in gradients.items():
            if self.step < self._settings.start_step or not self._settings.compresses(gradient.shape):
                whole.append(gradient)
                continue
            shape = gradient.shape[0], gradient.numel() // gradient.shape[0]
            by_shape = by_dtype.setdefault(working_dtype(gradient.dtype), {})
            by_shape.setdefault(shape, {})[name] = gradient
        self.average(whole)
        for dtype, by_shape in by_dtype.items():
            self._compress([self._stack(members, shape, dtype) for shape, members in by_shape.items()])

    def _compress(self, stacks: Sequence[_Stack]) -> None:
        """Puts PQᵀ in the place of gradients of one dtype; two collectives, with fp16 three."""
        if self._settings.factors == "fp16":
            self._agree_on_units(stacks)
        _, averages = self._mean([torch.bmm(stack.wanted, stack.q.mT) for stack in stacks], stacks)
        finite = [_finite(p) for p in averages]
        clean = [torch.where(good, p, 0) for good, p in zip(finite, averages, strict=True)]
        ps = [self._orthonormal(p, self._settings.epsilon) for p in clean]
        sent, qs = self._mean([torch.bmm(p.mT, stack.wanted) for p, stack in zip(ps, stacks, strict=True)], stacks)
        for stack, good, p, own, q in zip(stacks, finite, ps, sent, qs, strict=True):
            good &= _finite(q)
            if self._settings.error_feedback:
                self._keep_errors(stack, p, own * stack.unit, good)
            self._decompress(stack, p, q, good)

    def _stack(self, gradients: dict[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> _Stack:
        """Without copies of what is that large but the result: gradient and error are added into it."""
        first = next(iter(gradients.values()))
        wanted = torch.empty(len(gradients), *shape, dtype=dtype, device=first.device)
        used = torch.ones(len(gradients), dtype=dtype, device=first.device)
        if self._settings.error_feedback:
            used = (torch.stack(torch._foreach_norm(list(gradients.values()))) != 0).to(dtype)
            for slot, factor, (name, gradient) in zip(wanted, used * self.scale, gradients.items(), strict=True):
                error = self.errors.of(name, gradient)
                torch.addcmul(gradient.to(dtype), error, factor, out=slot.view(gradient.shape))
        else:
            for slot, gradient in zip(wanted, gradients.values(), strict=True):
                slot.view(gradient.shape).copy_(gradient)
        q = torch.stack([self._start(name, shape, wanted) for name in gradients])
        return _Stack(gradients, wanted, used.view(-1, 1, 1), q, unit=wanted.new_ones(len(gradients), 1, 1))

    def _start(self, name: str, shape: tuple[int, int], like: Tensor) -> Tensor:
        """Qᵀ that a step begins with; random ones are the same on all ranks, whatever devices they have."""
        kept = self._q.get(name)
        size = self._settings.rank, shape[1]
        if kept is not None:
            if kept.shape != size:
                raise LayoutError(
                    f"PowerSGD's Q of {name!r} in the checkpoint is {tuple(kept.shape)}, of this gradient {size}: the "
                    "parameter or `rank` has changed. Go on with those of the checkpoint, or without its compression."
                )
            self._q[name] = kept = kept.to(like)
            return kept
        step = self.step if self._fresh else -1
        generator = torch.Generator().manual_seed(seed_of(self.ranks.seed, step, *name.encode()))
        drawn = normalize(torch.randn(size, dtype=like.dtype, generator=generator))
        if like.device.type != "cpu":
            drawn = drawn.pin_memory().to(like.device, non_blocking=True)
        if not self._fresh:
            self._q[name] = drawn
        return drawn

    @property
    def _fresh(self) -> bool:
        return not self._settings.warm_start and self._settings.resample

    def _agree_on_units(self, stacks: Sequence[_Stack]) -> None:
        """In the sum of the ranks' norms: no sum of factors is longer, since columns of Q and P have length 1."""
        norms = torch.cat([torch.linalg.vector_norm(stack.wanted, dim=(1, 2), keepdim=True) for stack in stacks])
        units = (self.wire.sum(norms) / _LARGEST).clamp_min(torch.finfo(norms.dtype).tiny)
        for stack, unit in zip(stacks, units.split([len(stack.wanted) for stack in stacks]), strict=True):
            stack.unit = unit

    def _mean(self, factors: Sequence[Tensor], stacks: Sequence[_Stack]) -> tuple[list[Tensor], list[Tensor]]:
        """What goes onto the wire, in its units, and the mean over the ranks; one collective."""
        dtype = _FACTORS[self._settings.factors] if self._settings.factors is not None else factors[0].dtype
        packed = [(factor / stack.unit).to(dtype) for factor, stack in zip(factors, stacks, strict=True)]
        sums = self.wire.sum(torch.cat([each.reshape(-1) for each in packed])).split([each.numel() for each in packed])
        share = [stack.unit / self.wire.size for stack in stacks]
        return packed, [s.view_as(own) * part for s, own, part in zip(sums, packed, share, strict=True)]

    def _keep_errors(self, stack: _Stack, p: Tensor, sent: Tensor, good: Tensor) -> None:
        """What is left, without the scale; the old errors where the step is not finite or this rank has no gradient."""
        left = stack.wanted.baddbmm_(p, sent, beta=1 / self.scale, alpha=-1 / self.scale)
        left.nan_to_num_(0.0, 0.0, 0.0)
        weights = good * stack.used
        for new, weight, (name, gradient) in zip(left, weights.view(-1), stack.gradients.items(), strict=True):
            error = self.errors.of(name, gradient)
            error.lerp_(new.view_as(error), weight)  # one or the other: faster than torch.where

    def _decompress(self, stack: _Stack, p: Tensor, q: Tensor, good: Tensor) -> None:
        """PQᵀ, which is not finite where a rank's gradient is not, and the Q of the next step."""
        q = torch.where(good, q, torch.nan)
        for gradient, left, right in zip(stack.gradients.values(), p, q, strict=True):
            if gradient.dtype == q.dtype and gradient.is_contiguous():
                torch.mm(left, right, out=gradient.view(len(left), -1))
            else:
                gradient.copy_((left @ right).view(gradient.shape))
        if self._settings.warm_start:  # only directions count: with length 1, MQ is in the units of M
            length = torch.linalg.vector_norm(q, dim=2, keepdim=True)
            following = torch.where(good & (length > 0), q / length, stack.q)
            for name, each in zip(stack.gradients, following, strict=True):
                self._q[name].copy_(each)

    @override
    def state_dict(self) -> dict[str, Any]:
        qs = {_PREFIX + name: q for name, q in self._q.items()}
        return super().state_dict() | qs

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._q = {key.removeprefix(_PREFIX): q.clone() for key, q in state.items() if key.startswith(_PREFIX)}


def _finite(matrices: Tensor) -> Tensor:
    """Of each matrix (matrices, n, m), as (matrices, 1, 1)."""
    return matrices.isfinite().all(2, keepdim=True).all(1, keepdim=True)
