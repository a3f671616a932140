"""Differences of state as data: applied, put one after the other, and merged over micro-batches.

A difference maps owners ("" is the module, others are metrics) to attributes and these to nodes: ``("set", value)``,
``("del",)``, ``("list", length before, {index: node}, [appended])``, ``("dict", {key: node})``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lnn_lightning.parallel.step.tree import children_of, tree_map

Node: TypeAlias = tuple[Any, ...]
Delta: TypeAlias = dict[str, dict[str, Node]]

MISSING = object()


def frozen(value: Any) -> Any:
    """The value without graphs, in containers of its own."""
    if isinstance(value, (set, deque)):
        return value.copy()
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, value)


def applied(value: Any, node: Node, done: set[int]) -> Any:
    """The value with a node applied, in place where it is a list or dict; each of these once."""
    if node[0] == "set":
        return frozen(node[1])
    if id(value) in done:
        return value
    done.add(id(value))
    if node[0] == "list":
        _, _, edits, appended = node
        for index, edit in edits.items():
            value[index] = applied(value[index], edit, done)
        value.extend(frozen(item) for item in appended)
        return value
    for key, edit in node[1].items():
        if edit[0] == "del":
            value.pop(key, None)
        else:
            value[key] = applied(value.get(key, MISSING), edit, done)
    return value


def merge_micro_batches(deltas: Sequence[Delta], weights: Sequence[float], sizes: Sequence[int] | None = None) -> Delta:
    """What one step on the whole batch would have left, from what the micro-batches left.

    A list of the module to which every micro-batch appended as many items gets that many: floating-point scalars are
    averaged, whole-number scalars (counts) added, tensors with a batch dimension concatenated, of anything else the
    last stays. Items as many as samples (``extend``) all stay. Everything else, states of metrics too, is taken one
    after the other.

    Args:
        deltas: differences of the micro-batches in order.
        weights: weight of each.
        sizes: samples of each; tells batch dimensions from others.
    """
    if not deltas:
        return {}
    merged: Delta = {}
    for name in _keys(deltas):
        edits = [delta.get(name, {}) for delta in deltas]
        merged[name] = _merge_edits(edits, _Parts(weights, sizes) if name == "" else None)
    return merged


class _Parts:
    """Weights and sizes of the micro-batches."""

    def __init__(self, weights: Sequence[float], sizes: Sequence[int] | None) -> None:
        total = sum(weights)
        self.weights = [w / total for w in weights] if total else [1 / len(weights)] * len(weights)
        self.sizes = list(sizes) if sizes is not None else None

    def are_samples(self, lengths: Iterable[int]) -> bool:
        return self.sizes is not None and list(lengths) == self.sizes

    def mean(self, values: Sequence[Any]) -> Any:
        # a weight of 0 may come with a NaN
        terms = [value * weight for value, weight in zip(values, self.weights, strict=True) if weight]
        return sum(terms[1:], start=terms[0])


def _keys(mappings: Sequence[Mapping[Any, Any]]) -> list[Any]:
    return list(dict.fromkeys(key for mapping in mappings for key in mapping))


def _merge_edits(edits: Sequence[Mapping[Any, Node]], parts: _Parts | None) -> dict[Any, Node]:
    return {key: _merge_nodes([edit.get(key) for edit in edits], parts) for key in _keys(edits)}


def _merge_nodes(nodes: Sequence[Node | None], parts: _Parts | None) -> Node:
    present = [node for node in nodes if node is not None]
    if parts is not None and all(node[0] == "dict" for node in present):
        return ("dict", _merge_edits([node[1] if node is not None else {} for node in nodes], parts))
    if parts is not None and len(present) == len(nodes) and all(node[0] == "list" for node in present):
        length = present[0][1]
        appended = [node[3] for node in present]
        counts = [len(items) for items in appended]
        extended = counts[0] > 1 and parts.are_samples(counts)
        if len(set(counts)) == 1 and not extended and all(index < length for node in present for index in node[2]):
            items = [_merge_items(items, parts) for items in zip(*appended, strict=True)]
            return ("list", length, _merge_edits([node[2] for node in present], parts), items)
    result = present[0]
    for node in present[1:]:
        result = _then(result, node)
    return result


def _then(first: Node, second: Node) -> Node:
    """Two nodes one after the other."""
    if second[0] in ("set", "del"):
        return second
    if first[0] == "set":
        return ("set", applied(frozen(first[1]), second, set()))
    if first[0] == "list":
        _, length, edits, appended = first
        edits, appended = dict(edits), list(appended)
        for index, edit in second[2].items():
            if index < length:
                edits[index] = _then(edits[index], edit) if index in edits else edit
            else:
                appended[index - length] = applied(frozen(appended[index - length]), edit, set())
        return ("list", length, edits, appended + second[3])
    edits = dict(first[1])
    for key, edit in second[1].items():
        edits[key] = _then(edits[key], edit) if key in edits else edit
    return ("dict", edits)


def _merge_items(items: Sequence[Any], parts: _Parts) -> Any:
    first, last = items[0], items[-1]
    if len(items) == 1:
        return first
    if all(isinstance(item, Tensor) and item.dtype == first.dtype for item in items):
        return _merge_tensors(items, parts)
    if all(type(item) is float for item in items):
        return parts.mean(items)
    if all(type(item) is int for item in items):
        return sum(items) if parts.are_samples(items) else last
    found = [children_of(item) for item in items]
    if any(pair is None for pair in found) or any(type(item) is not type(first) for item in items):
        return last
    children = [pair[0] for pair in found if pair is not None]
    if isinstance(first, list) and parts.are_samples(map(len, children)):
        return [child for item in children for child in item]
    if any(len(item) != len(children[0]) for item in children) or any(
        list(item) != list(first) for item in items if isinstance(item, Mapping)
    ):
        return last
    assert found[-1] is not None
    return found[-1][1]([_merge_items(column, parts) for column in zip(*children, strict=True)])


def _merge_tensors(tensors: Sequence[Tensor], parts: _Parts) -> Tensor:
    first = tensors[0]
    alike = all(tensor.shape == first.shape for tensor in tensors)
    if first.dim() and all(tensor.dim() and tensor.shape[1:] == first.shape[1:] for tensor in tensors):
        if parts.sizes is None or parts.are_samples(tensor.shape[0] for tensor in tensors):
            return torch.cat(list(tensors))
    if not alike or first.dtype == torch.bool:
        return tensors[-1]
    if first.dtype.is_floating_point or first.dtype.is_complex:
        precise = torch.promote_types(first.dtype, torch.float32)
        return parts.mean([tensor.to(precise) for tensor in tensors]).to(first.dtype)
    return torch.stack(list(tensors)).sum(0, dtype=first.dtype) if first.dim() == 0 else tensors[-1]
