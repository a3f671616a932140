"""Autograd functions of the user's, which would see a rank's part as if it were all there is."""

from __future__ import annotations

from typing import Any

import torch

from lnn_lightning.parallel.tensor.sharded import axis_of, is_sharded, origins_of, wholes

_KNOWN = ("torch.", "lnn_lightning.")


def give_functions_wholes() -> None:
    """From here on a ``torch.autograd.Function`` that is neither torch's nor ours gets wholes in place of parts.

    Its forward may be any code, and its backward is written for the values its forward saw.
    """
    original = torch.autograd.Function.__dict__["apply"]
    if getattr(original.__func__, "_lnn_wholes", False):
        return

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        parts = [value for value in args if is_sharded(value)]
        if parts and not cls.__module__.startswith(_KNOWN):
            if (ledger := axis_of(parts[0]).ledger) is not None:
                ledger.gathered(cls.__name__, frozenset().union(*map(origins_of, parts)), None)
            args = wholes(args)
        return original.__func__(cls, *args, **kwargs)

    apply._lnn_wholes = True  # type: ignore[attr-defined]
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]
