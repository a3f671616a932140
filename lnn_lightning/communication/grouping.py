"""Gradients of a bucket together: sorted by the dtype they are computed with, and put back from one flat tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which gradients of a dtype are computed with, and what is kept of them: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


def by_dtype(gradients: Mapping[str, Tensor]) -> dict[torch.dtype, dict[str, Tensor]]:
    """Gradients by :func:`working_dtype`, in their order."""
    found: dict[torch.dtype, dict[str, Tensor]] = {}
    for name, gradient in gradients.items():
        found.setdefault(working_dtype(gradient.dtype), {})[name] = gradient
    return found


def put_back(flat: Tensor, tensors: Iterable[Tensor]) -> None:
    """Copies what was laid side by side in one dimension into the tensors it came from."""
    places = list(tensors)
    for tensor, part in zip(places, flat.split([each.numel() for each in places]), strict=True):
        tensor.copy_(part.view_as(tensor))
