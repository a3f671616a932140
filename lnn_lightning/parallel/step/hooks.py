"""Forward hooks of units, run outside of them.

Hooks that users and libraries put on blocks leave things behind (transformers collects hidden states that way). So they
run on every stage, also on the answer of a block that lives elsewhere, and what they take is seen as the block's
output.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException


def runs_hooks(unit: nn.Module, original: Callable[..., Any]) -> bool:
    """Whether a call would run forward hooks: there are some, and it does not go straight to ``forward``."""
    return bool(unit._forward_hooks) and getattr(original, "__name__", "") == "_call_impl"


@contextmanager
def hooks_set_aside(unit: nn.Module) -> Iterator[None]:
    """The unit has no forward hooks inside."""
    hooks = unit._forward_hooks
    unit.__dict__["_forward_hooks"] = OrderedDict()
    try:
        yield
    finally:
        unit.__dict__["_forward_hooks"] = hooks


def run_hooks(unit: nn.Module, args: Any, kwargs: Any, out: Any, absent: bool) -> Any:
    """Runs the forward hooks on a result, as ``nn.Module.__call__`` does.

    Args:
        unit: the called module.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        out: its result.
        absent: the result may not be here; a hook that looks at its data is passed over.
    """
    for key, hook in list(unit._forward_hooks.items()):
        try:
            if key in unit._forward_hooks_with_kwargs:
                changed = hook(unit, args, kwargs, out)
            else:
                changed = hook(unit, args, out)
        except (DataDependentOutputException, DynamicOutputShapeException):
            if not absent:
                raise
            continue
        out = out if changed is None else changed
    return out
