"""What a step leaves behind on the LightningModule, and the same on the ranks that did not run all of it.

``self.validation_step_outputs.append(loss)`` and ``self.accuracy.update(...)`` happen on the last stage only. The
difference that a step made there is taken as data (see :mod:`~lnn_lightning.strategies.deltas`), merged over the
micro-batches, and applied on every rank, so that epoch end hooks find what one process would have.
"""

from __future__ import annotations

import numbers
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torchmetrics import Metric, MetricCollection

from lnn_lightning.parallel.step.tree import tree_leaves
from lnn_lightning.strategies.deltas import MISSING, Delta, Node, applied, frozen, merge_micro_batches

__all__ = ["EffectWatch", "apply_effects", "find_metrics", "merge_micro_batches", "set_metric_group"]

_CLONED_ELEMENTS = 1 << 16
"""Tensors up to this size are copied, so that a change in place can be undone."""
_DEEP_ITEMS = 64
"""In containers up to this size a change inside an item is seen, in larger ones only other items."""

_MODULE_OWN = {*vars(nn.Module())}
_METRIC_OWN = {
    *(
        "_defaults",
        "_persistent",
        "_reductions",
        "_cache",
        "_computed",
        "_forward_cache",
        "_update_signature",
        "_device",
    ),
    *("_dtype", "_to_sync", "_should_unsync", "_is_synced", "_enable_grad", "process_group", "dist_sync_fn"),
}


def find_metrics(module: nn.Module) -> dict[str, nn.Module]:
    """The metrics and metric collections of a module by name, those in plain lists and dicts included."""
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()

    def add(prefix: str, root: nn.Module) -> None:
        for name, child in root.named_modules(prefix=prefix):
            if isinstance(child, (Metric, MetricCollection)) and id(child) not in seen:
                seen.add(id(child))
                found[name] = child

    add("", module)
    for attribute, value in vars(module).items():
        if attribute in _MODULE_OWN or not isinstance(value, (Mapping, list, tuple)):
            continue
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            if isinstance(item, nn.Module):
                add(f"{attribute}.{key}", item)
    return found


def set_metric_group(module: nn.Module, group: ProcessGroup) -> None:
    """Lets metrics that have no process group of their own synchronise over this one."""
    for metric in find_metrics(module).values():
        if isinstance(metric, Metric) and metric.process_group is None:
            metric.process_group = group


# ------------------------------------------------------------------------------------------------ snapshots


class _Kept:
    """A value as it was. This class is for what cannot change inside, or where a change inside does not count."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def restored(self) -> Any:
        return self.value

    def node(self, now: Any) -> Node | None:
        """How ``now`` differs."""
        if now is self.value or (_is_constant(now) and type(now) is type(self.value) and now == self.value):
            return None
        return ("set", frozen(now))


class _KeptTensor(_Kept):
    def __init__(self, value: Tensor) -> None:
        super().__init__(value)
        self.version = None if value.is_inference() else value._version
        self.clone = value.detach().clone() if value.numel() <= _CLONED_ELEMENTS else None

    def _changed_in_place(self) -> bool:
        if self.version is not None:
            return self.value._version != self.version
        return self.clone is not None and not torch.equal(self.clone, self.value)

    def restored(self) -> Any:
        return self.clone.clone() if self.clone is not None and self._changed_in_place() else self.value

    def node(self, now: Any) -> Node | None:
        return None if now is self.value and not self._changed_in_place() else ("set", frozen(now))


class _KeptList(_Kept):
    def __init__(self, value: list[Any]) -> None:
        super().__init__(value)
        self.items = list(value)
        self.inside = [_keep(item) for item in value] if len(value) <= _DEEP_ITEMS else None

    def restored(self) -> Any:
        self.value[:] = self.items if self.inside is None else [kept.restored() for kept in self.inside]
        return self.value

    def node(self, now: Any) -> Node | None:
        length = len(self.items)
        if not isinstance(now, list) or len(now) < length:
            return ("set", frozen(now))
        edits = {}
        if self.inside is not None:
            nodes = ((index, kept.node(now[index])) for index, kept in enumerate(self.inside))
            edits = {index: node for index, node in nodes if node is not None}
        elif any(new is not old for new, old in zip(now, self.items, strict=False)):
            return ("set", frozen(now))
        appended = [frozen(item) for item in now[length:]]
        return ("list", length, edits, appended) if edits or appended else None


class _KeptDict(_Kept):
    def __init__(self, value: dict[Any, Any]) -> None:
        super().__init__(value)
        deep = len(value) <= _DEEP_ITEMS
        self.inside = {key: _keep(item) if deep else _Kept(item) for key, item in value.items()}

    def restored(self) -> Any:
        items = {key: kept.restored() for key, kept in self.inside.items()}
        self.value.clear()
        self.value.update(items)
        return self.value

    def node(self, now: Any) -> Node | None:
        if type(now) is not type(self.value):
            return ("set", frozen(now))
        edits = _edits(self.inside, now)
        return ("dict", edits) if edits else None


class _KeptCopy(_Kept):
    """A set or deque: small, and sent as a whole."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.items = list(value)

    def restored(self) -> Any:
        self.value.clear()
        self.value.update(self.items) if isinstance(self.value, set) else self.value.extend(self.items)
        return self.value

    def node(self, now: Any) -> Node | None:
        if type(now) is type(self.value) and list(map(id, now)) == list(map(id, self.items)):
            return None
        return ("set", frozen(now))


def _keep(value: Any) -> _Kept:
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        return _KeptTensor(value)
    for kind, kept in ((list, _KeptList), (dict, _KeptDict), ((set, deque), _KeptCopy)):
        if isinstance(value, kind):
            return kept(value)  # type: ignore[arg-type]
    return _Kept(value)


def _edits(kept: Mapping[Any, _Kept], now: Mapping[Any, Any]) -> dict[Any, Node]:
    edits: dict[Any, Node] = {}
    for key, value in now.items():
        node = kept[key].node(value) if key in kept else ("set", frozen(value))
        if node is not None:
            edits[key] = node
    edits.update({key: ("del",) for key in kept if key not in now})
    return edits


def _is_constant(value: Any) -> bool:
    return value is None or isinstance(value, (numbers.Number, str, bytes, torch.dtype, torch.device))


def _is_plain(value: Any) -> bool:
    if isinstance(value, (set, deque)):
        return all(_is_plain(item) for item in value)
    return all(_is_constant(leaf) or isinstance(leaf, Tensor) for leaf in tree_leaves(value))


class _Owner:
    """The module, or a metric in it, whose attributes are watched."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._is_metric = isinstance(module, Metric)

    def attributes(self) -> dict[str, Any]:
        own = _METRIC_OWN if self._is_metric else ()
        plain = {
            name: value
            for name, value in vars(self._module).items()
            if name not in _MODULE_OWN
            and name not in own
            and (self._is_metric or not name.startswith("_"))
            and not callable(value)
        }
        return {**plain, **self._module._buffers}

    def store(self, name: str) -> dict[str, Any]:
        return self._module._buffers if name in self._module._buffers else self._module.__dict__

    def forget_results(self) -> None:
        if self._is_metric:
            self._module._computed = None  # type: ignore[assignment]


_Snapshot: TypeAlias = dict[str, dict[str, _Kept]]


class EffectWatch:
    """Follows what steps change on a LightningModule: plain attributes, its own buffers, and states of metrics.

    Not followed: submodules, parameters, names that begin with an underscore (of the module), and what happens inside
    objects of other classes. On the stage that runs the step to its end: ``begin``, ``mark`` behind each micro-batch,
    ``merged``; on every rank then ``apply``.

    Args:
        module: the LightningModule.

    Attributes:
        deltas: what each marked micro-batch changed.
    """

    def __init__(self, module: nn.Module) -> None:
        self._owners = _owners(module)
        self.begin()

    def begin(self) -> None:
        """Takes the present state as the one a step starts from."""
        self._origin = self._latest = _snapshot(self._owners)
        self.deltas: list[Delta] = []

    def delta(self) -> Delta:
        """What changed since ``begin`` or the latest ``mark``."""
        found = {name: self._delta_of(name, owner) for name, owner in self._owners.items()}
        return {name: edits for name, edits in found.items() if edits}

    def _delta_of(self, name: str, owner: _Owner) -> dict[str, Node]:
        edits = _edits(self._latest[name], owner.attributes())
        # another object of the user's own class stays a matter of this rank
        return {attribute: node for attribute, node in edits.items() if node[0] != "set" or _is_plain(node[1])}

    def mark(self) -> None:
        """Ends a micro-batch."""
        self.deltas.append(self.delta())
        self._latest = _snapshot(self._owners)

    def merged(self, weights: Sequence[float], sizes: Sequence[int] | None = None) -> Delta:
        """What the marked micro-batches did, as one step on the whole batch; see :func:`merge_micro_batches`."""
        return merge_micro_batches(self.deltas, weights, sizes)

    def rollback(self) -> None:
        """Puts back the state at ``begin``."""
        _restore(self._owners, self._origin)

    def apply(self, delta: Delta) -> None:
        """Makes the state the one at ``begin`` with the difference applied, whatever happened here in between."""
        self.rollback()
        _apply(self._owners, delta)

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Puts back the present state on exit, within a step too."""
        snapshot = _snapshot(self._owners)
        try:
            yield
        finally:
            _restore(self._owners, snapshot)


def apply_effects(module: nn.Module, delta: Delta) -> None:
    """Applies a difference to the present state."""
    _apply(_owners(module), delta)


def _owners(module: nn.Module) -> dict[str, _Owner]:
    metrics = {name: metric for name, metric in find_metrics(module).items() if isinstance(metric, Metric)}
    return {name: _Owner(owner) for name, owner in {"": module, **metrics}.items()}


def _snapshot(owners: Mapping[str, _Owner]) -> _Snapshot:
    return {
        name: {attribute: _keep(value) for attribute, value in owner.attributes().items()}
        for name, owner in owners.items()
    }


def _restore(owners: Mapping[str, _Owner], snapshot: _Snapshot) -> None:
    for name, owner in owners.items():
        kept = snapshot[name]
        for attribute in owner.attributes():
            if attribute not in kept:
                del owner.store(attribute)[attribute]
        for attribute, value in kept.items():
            owner.store(attribute)[attribute] = value.restored()
        owner.forget_results()


def _apply(owners: Mapping[str, _Owner], delta: Delta) -> None:
    done: set[int] = set()  # metrics of one compute group share their lists
    for name, edits in delta.items():
        owner = owners[name]
        for attribute, node in edits.items():
            store = owner.store(attribute)
            if node[0] == "del":
                store.pop(attribute, None)
            else:
                store[attribute] = applied(store.get(attribute, MISSING), node, done)
        owner.forget_results()
