"""Comparing what a block computes when it is divided with what it computes as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

RESULT = "a result"
_NARROW_TOLERANCE = 5e-2
"""For dtypes of half precision and less."""

Pair = tuple[str, Tensor | None, Tensor | None]
"""What it is, the value wanted, the value found; None is as good as zeros."""


def first_difference(pairs: Sequence[Pair], tolerance: Mapping[torch.dtype, float]) -> str:
    """What the first pair that differs is off by; empty if none does.

    Results are compared by their own size. Gradients that are tiny beside the others are noise: they are compared by a
    thousandth of the largest one, if that is more.

    Args:
        pairs: results (named :data:`RESULT`) and gradients.
        tolerance: relative, by dtype.
    """
    scale = max((float(a.double().norm()) for what, a, _ in pairs if a is not None and what != RESULT), default=0.0)
    for what, a, b in pairs:
        if a is None and b is None:
            continue
        a, b = (torch.zeros_like(b) if a is None else a), (torch.zeros_like(a) if b is None else b)  # type: ignore[arg-type]
        bound = tolerance.get(a.dtype, _NARROW_TOLERANCE)
        size = max(float(a.double().norm()), 0.0 if what == RESULT else 1e-3 * scale, 1e-30)
        error = float((a.double() - b.double()).norm())
        if not error <= bound * size:
            return f"{what} is off by {error / size:.1e} (relative)"
    return ""
