"""Forward hooks of units, run outside of them.

Hooks that users and libraries put on blocks leave things behind (transformers collects hidden states that way). So they
run on every stage, also on the answer of a block that lives elsewhere, and what they take is seen as the block's
output.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

_kept: WeakKeyDictionary[nn.Module, frozenset[int]] = WeakKeyDictionary()


def keep_inside(unit: nn.Module, hooks: Iterable[int]) -> None:
    """These forward hooks and pre-hooks (by id) belong to the unit's computation (sharding): they run with it alone."""
    _kept[unit] = _kept.get(unit, frozenset()) | frozenset(hooks)


def outer_hooks(unit: nn.Module) -> list[int]:
    """Ids of the forward hooks that are not part of the unit's computation, in order."""
    kept = _kept.get(unit, frozenset())
    return [key for key in unit._forward_hooks if key not in kept]


def runs_hooks(unit: nn.Module, original: Callable[..., Any]) -> bool:
    """Whether a call would run forward hooks: there are some, and it does not go straight to ``forward``."""
    return is_call(original) and bool(outer_hooks(unit))


def is_call(original: Callable[..., Any]) -> bool:
    """Whether a call of a unit runs its hooks: it does not go straight to ``forward``."""
    return getattr(original, "__name__", "") == "_call_impl"


@contextmanager
def hooks_set_aside(unit: nn.Module, store: str = "_forward_hooks") -> Iterator[None]:
    """The unit has no forward hooks inside, but those of its own computation."""
    hooks = unit.__dict__[store]
    kept = _kept.get(unit, frozenset())
    unit.__dict__[store] = OrderedDict((key, hook) for key, hook in hooks.items() if key in kept)
    try:
        yield
    finally:
        unit.__dict__[store] = hooks


def run_pre_hooks(unit: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Runs the forward pre-hooks that are not part of the unit's computation, as ``nn.Module.__call__`` does.

    Returns:
        The arguments that they leave.
    """
    kept = _kept.get(unit, frozenset())
    for key, hook in list(unit._forward_pre_hooks.items()):
        if key in kept:
            continue
        if key in unit._forward_pre_hooks_with_kwargs:
            if (changed := hook(unit, args, kwargs)) is not None:
                args, kwargs = changed
        elif (changed := hook(unit, args)) is not None:
            args = changed if isinstance(changed, tuple) else (changed,)
    return args, kwargs


def run_hooks(unit: nn.Module, args: Any, kwargs: Any, out: Any, absent: bool) -> Any:
    """Runs the forward hooks on a result, as ``nn.Module.__call__`` does.

    Args:
        unit: the called module.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        out: its result.
        absent: the result may not be here; a hook that looks at its data is passed over.
    """
    for key in outer_hooks(unit):
        hook = unit._forward_hooks[key]
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
