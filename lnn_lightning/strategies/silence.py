"""Things that look as before and do nothing: metrics, loggers, ``self.print``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torchmetrics import MetricCollection

from lnn_lightning.parallel.step.tree import tree_leaves

OnValue: TypeAlias = Callable[[Any], None]
Saved: TypeAlias = tuple[Any, str, Any]
"""Owner, attribute, and what it was."""

_MISSING = object()


@contextmanager
def replaced(changes: Sequence[tuple[Any, Mapping[str, Any]]]) -> Iterator[list[Saved]]:
    """Sets attributes of instances, past any ``__setattr__``, and puts the old ones back, which it yields."""
    saved: list[Saved] = []
    try:
        for owner, attributes in changes:
            for name, value in attributes.items():
                saved.append((owner, name, owner.__dict__.get(name, _MISSING)))
                _put(owner, name, value)
        yield saved
    finally:
        for owner, name, old in reversed(saved):
            _put(owner, name, old)


def _put(owner: Any, name: str, value: Any) -> None:
    if value is _MISSING:
        owner.__dict__.pop(name, None)
    else:
        owner.__dict__[name] = value


def swallow(show: OnValue, result: Callable[[], Any] = lambda: None) -> Callable[..., Any]:
    """A function that takes anything, shows the tensors in it and does nothing."""

    def take(*args: Any, **kwargs: Any) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                show(leaf)
        return result()

    return take


def silent_metric(metric: nn.Module, show: OnValue) -> dict[str, Callable[..., Any]]:
    """What to replace on a metric, or a collection of them, so that it does nothing and returns zeros."""

    def zero() -> Any:
        return torch.zeros((), device=getattr(metric, "device", None))

    def zeros() -> Any:
        assert isinstance(metric, MetricCollection)
        device = next((member.device for member in metric.values(copy_state=False)), None)
        return {str(name): torch.zeros((), device=device) for name in metric.keys(keep_base=False)}

    # A collection is patched itself too: it would find the states of its members equal and make them one group.
    result = zeros if isinstance(metric, MetricCollection) else zero
    return {
        "forward": swallow(show, result),
        "compute": swallow(show, result),
        "update": swallow(show),
        "reset": swallow(show),
    }


class _Nowhere:
    """Stands for a logger's experiment: everything can be done to it, and nothing happens."""

    def __init__(self, show: OnValue) -> None:
        self.__dict__["_call"] = swallow(show, lambda: self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_call"](*args, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        self(value)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exception: Any) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class SilentLogger:
    """A logger that can be read from, with an experiment that goes nowhere; passes as one of its class."""

    _WRITES = ("log_", "save", "finalize", "after_save_checkpoint", "watch", "unwatch")

    def __init__(self, logger: Any, show: OnValue) -> None:
        self.__dict__.update(_logger=logger, _show=show)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.__dict__["_logger"])

    def __getattr__(self, name: str) -> Any:
        if name in ("experiment", "_experiment", "run"):
            return _Nowhere(self._show)
        value = getattr(self.__dict__["_logger"], name)
        return swallow(self._show) if name.startswith(self._WRITES) and callable(value) else value

    def __setattr__(self, name: str, value: Any) -> None:
        pass
