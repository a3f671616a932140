"""What a step logs: recorded per micro-batch where the step ends, merged, and logged once on every rank.

``self.log`` is caught by an attribute of the instance, so ``log_dict`` comes along, and a ``log`` that the user's class
overrides is called when the merged values are logged.
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torchmetrics import Metric

from lnn_lightning.parallel.step.tree import tree_map
from lnn_lightning.strategies.effects import find_metrics
from lnn_lightning.strategies.silence import OnValue, Saved, SilentLogger, replaced, silent_metric, swallow


@dataclass(frozen=True)
class LogEntry:
    """One call of ``self.log``.

    Attributes:
        name: what is logged.
        value: detached; for a metric what its ``forward`` returned.
        kwargs: the other arguments.
        micro_batch: index of the micro-batch.
        metric: name of the metric object that was logged; None for a value.
    """

    name: str
    value: Any
    kwargs: dict[str, Any] = field(default_factory=dict)
    micro_batch: int = 0
    metric: str | None = None


class StepRecorder:
    """Catches what the module's steps log.

    Args:
        module: the LightningModule.

    Attributes:
        entries: what was recorded, in order.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        own = inspect.signature(type(module).log)
        known = {"name", "value"} <= set(own.parameters)
        self._signature = own if known else inspect.signature(pl.LightningModule.log)
        self.entries: list[LogEntry] = []
        self._muted: list[list[Saved]] = []

    def take(self) -> list[LogEntry]:
        """The entries, which are forgotten here."""
        entries, self.entries = self.entries, []
        return entries

    @contextmanager
    def recording(self, micro_batch: int) -> Iterator[None]:
        """Inside, ``self.log`` adds to ``entries`` and does nothing else."""

        def log(*args: Any, **kwargs: Any) -> None:
            name, value, kwargs = self._bound(args, kwargs)
            metric = None
            if isinstance(value, Metric):
                metric, value = self._name_of(value, name, kwargs), value._forward_cache
            self.entries.append(LogEntry(name, _detached(value), kwargs, micro_batch, metric))

        with replaced([(self._module, {"log": log})]):
            yield

    @contextmanager
    def muted(self, on_value: OnValue | None = None) -> Iterator[None]:
        """Inside, the step says nothing: ``self.log``, ``self.print``, metrics and loggers do nothing.

        Metrics return zeros and their states stay as they are.

        Args:
            on_value: is shown each value that would have left the step: what is logged, and tensors that metrics and
                loggers are given.
        """
        show = on_value or (lambda value: None)

        def log(*args: Any, **kwargs: Any) -> None:
            value = self._bound(args, kwargs)[1]
            if not isinstance(value, Metric):
                show(value)

        changes: list[tuple[Any, dict[str, Any]]] = [
            (self._module, {"log": log, "print": swallow(show)}),
            *((metric, silent_metric(metric, show)) for metric in find_metrics(self._module).values()),
        ]
        if loggers := getattr(self._module._trainer, "_loggers", None):
            changes.append((self._module._trainer, {"_loggers": [SilentLogger(logger, show) for logger in loggers]}))
        with replaced(changes) as saved:
            self._muted.append(saved)
            try:
                yield
            finally:
                self._muted.pop()

    @contextmanager
    def audible(self) -> Iterator[None]:
        """Within ``muted``: everything is for a while as it was before."""
        muted, self._muted = self._muted, []
        with ExitStack() as stack:
            for saved in reversed(muted):
                stack.enter_context(replaced([(owner, {name: old}) for owner, name, old in reversed(saved)]))
            try:
                yield
            finally:
                self._muted = muted

    def _bound(self, args: Any, kwargs: Any) -> tuple[str, Any, dict[str, Any]]:
        given = dict(self._signature.bind(self._module, *args, **kwargs).arguments)
        for parameter in self._signature.parameters.values():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                given.update(given.pop(parameter.name, {}))
        given.pop(next(iter(self._signature.parameters)))
        return given.pop("name"), given.pop("value"), given

    def _name_of(self, metric: Metric, name: str, kwargs: Mapping[str, Any]) -> str:
        for attribute, found in find_metrics(self._module).items():
            if found is metric:
                return attribute
        raise MisconfigurationException(
            f"`self.log({name!r}, ...)` was given a `{type(metric).__name__}` that is no attribute of the "
            "LightningModule. The other ranks know a metric by its name: set it as an attribute."
        )


# ------------------------------------------------------------------------------------------------ merging


def merge(entries: Sequence[LogEntry], weights: Sequence[float]) -> list[dict[str, Any]]:
    """One entry for each name from those of all micro-batches, in order of first appearance.

    A mean is weighted by ``weights``, or by the ``batch_size`` the user passed; sums, maxima and minima are what they
    say. What a metric shows for the step is the mean of what it returned. A name logged twice in a micro-batch stays
    two entries.

    Args:
        entries: of all micro-batches.
        weights: weight of each micro-batch.

    Returns:
        Plain dicts with ``name``, ``value`` (a tensor, or ``{"metric": its name, "forward": what it returned}``) and
        ``kwargs``, for :func:`replay`.
    """
    groups: dict[tuple[str, int], list[LogEntry]] = {}
    seen: dict[tuple[str, int], int] = {}
    for entry in entries:
        turn = seen[entry.name, entry.micro_batch] = seen.get((entry.name, entry.micro_batch), -1) + 1
        groups.setdefault((entry.name, turn), []).append(entry)
    return [_merge_group(group, weights) for group in groups.values()]


def _merge_group(entries: Sequence[LogEntry], weights: Sequence[float]) -> dict[str, Any]:
    first = entries[0]
    kwargs = dict(first.kwargs)
    shares = [float(weights[entry.micro_batch]) for entry in entries]
    sizes = [entry.kwargs.get("batch_size") for entry in entries]
    if all(size is not None for size in sizes):
        shares = [float(size) for size in sizes if size is not None]
        kwargs["batch_size"] = sum(size for size in sizes if size is not None)
    if kwargs.pop("sync_dist_group", None) is not None:
        rank_zero_warn(
            f"`self.log({first.name!r}, sync_dist_group=...)`: the group is ignored; values are reduced over the data "
            "ranks, as the stages of a pipeline all hold the same one."
        )
    values = [entry.value for entry in entries]
    if first.metric is not None:
        forward = None if values[0] is None else _reduced(values, shares, "mean")
        return {"name": first.name, "value": {"metric": first.metric, "forward": forward}, "kwargs": kwargs}
    value = _reduced([_as_tensor(value) for value in values], shares, kwargs.get("reduce_fx", "mean"))
    return {"name": first.name, "value": value, "kwargs": kwargs}


def _reduced(values: Sequence[Any], shares: Sequence[float], reduce_fx: Any) -> Any:
    """One value; what is no single number is Lightning's to refuse."""
    if len(values) == 1 or not all(isinstance(value, Tensor) and value.numel() == 1 for value in values):
        return values[-1]
    flat = [value.reshape(()) for value in values]
    stacked = torch.stack([value.to(flat[0].device) for value in flat])
    how = reduce_fx.lower() if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    if how in ("mean", "avg"):
        return _weighted_mean(stacked, shares)
    if how == "sum":
        return stacked.sum(dtype=stacked.dtype)
    if how in ("max", "min"):
        return stacked.amax() if how == "max" else stacked.amin()
    return reduce_fx(stacked) if callable(reduce_fx) else values[-1]


def _weighted_mean(values: Tensor, shares: Sequence[float]) -> Tensor:
    if not values.dtype.is_floating_point:
        values = values.to(_log_dtype())  # Lightning would convert it to reduce it
    if sum(shares) == 0:
        shares = [1.0] * len(shares)
    used = [index for index, share in enumerate(shares) if share]  # a share of 0 may come with a NaN
    weights = torch.tensor([shares[index] for index in used], dtype=torch.float64)
    weights = (weights / weights.sum()).to(values.device, torch.promote_types(values.dtype, torch.float32))
    return (values[used].to(weights.dtype) * weights).sum().to(values.dtype)


def _as_tensor(value: Any) -> Any:
    return torch.tensor(value, dtype=_log_dtype()) if isinstance(value, numbers.Real) else value


def _log_dtype() -> torch.dtype:
    default = torch.get_default_dtype()
    return default if default in (torch.float32, torch.float64) else torch.float32


def _detached(value: Any) -> Any:
    # cloned, as the step may go on to change it in place
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, value)


def replay(module: pl.LightningModule, merged: Sequence[Mapping[str, Any]]) -> None:
    """Logs merged entries through ``module.log``."""
    metrics: dict[str, nn.Module] | None = None
    for entry in merged:
        value = entry["value"]
        if isinstance(value, Mapping) and "metric" in value:
            metrics = metrics or find_metrics(module)
            metric = metrics[value["metric"]]
            if value["forward"] is not None:
                metric._forward_cache = value["forward"]  # `on_step` shows this
            value = metric
        module.log(name=entry["name"], value=value, **entry["kwargs"])
