"""Autograd functions of the user's, which would see a rank's part as if it were all there is."""

from __future__ import annotations

from typing import Any

import torch

from lnn_lightning.parallel.tensor.sharded import book_wholes, is_sharded, wholes

_KNOWN = ("torch.", "lnn_lightning.")


def give_functions_wholes() -> None:
    """From here on a ``torch.autograd.Function`` that is neither torch's nor ours gets wholes in place of parts.

    Its forward may be any code, and its backward is written for the values its forward saw.
    """
    original = torch.autograd.Function.__dict__["apply"]
    if getattr(original.__func__, "_lnn_wholes", False):
        return

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if any(map(is_sharded, args)) and not cls.__module__.startswith(_KNOWN):
            book_wholes(cls.__name__, args, {})
            args = wholes(args)
        return original.__func__(cls, *args, **kwargs)

    apply._lnn_wholes = True  # type: ignore[attr-defined]
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]
