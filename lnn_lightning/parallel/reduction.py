"""In which precision ranks add up gradients."""

from __future__ import annotations

import torch


def reduction_dtype(own: torch.dtype, chosen: torch.dtype | None) -> torch.dtype:
    """The dtype in which ranks add up gradients.

    Args:
        own: the gradients'.
        chosen: by the user; None: theirs, but fp32 for half precision, whose sums would lose what small terms add.
    """
    if chosen is not None:
        return chosen
    return torch.float32 if own in (torch.float16, torch.bfloat16) else own
