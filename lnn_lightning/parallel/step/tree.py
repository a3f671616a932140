"""Nested values: batches, block arguments and block results of any container people use.

torch's pytree knows dicts, lists, tuples and what libraries registered; batches and block results are also ``UserDict``
(``transformers.BatchEncoding``) and dataclasses, which it would take for opaque leaves.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

Unflatten = Callable[[list[Any]], Any]


def tree_flatten(tree: Any) -> tuple[list[Any], Unflatten]:
    """Leaves in order, and a function that puts as many new leaves into the same shape."""
    leaves: list[Any] = []
    build = _flatten_into(tree, leaves)

    def unflatten(new: list[Any]) -> Any:
        return build(iter(new))

    return leaves, unflatten


def tree_leaves(tree: Any) -> list[Any]:
    """Leaves in order."""
    leaves: list[Any] = []
    _flatten_into(tree, leaves)
    return leaves


def tree_tensors(tree: Any) -> list[torch.Tensor]:
    """Those leaves that are tensors."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same shape with every leaf replaced."""
    leaves, unflatten = tree_flatten(tree)
    return unflatten([function(leaf) for leaf in leaves])


def children_of(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """Direct children of a container and how to put others in their place; None for a leaf."""
    kind = type(tree)
    if kind is list:
        return tree, list
    if kind is tuple:
        return list(tree), tuple
    if kind is dict:
        keys = list(tree)
        return [tree[key] for key in keys], lambda new: dict(zip(keys, new, strict=True))
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return list(tree), lambda new: kind(*new)
    if kind in pytree.SUPPORTED_NODES:
        node = pytree.SUPPORTED_NODES[kind]
        children, context = node.flatten_fn(tree)
        return list(children), lambda new: node.unflatten_fn(new, context)
    if isinstance(tree, Mapping):
        keys = list(tree.keys())
        return [tree[key] for key in keys], lambda new: _copy_mapping(tree, keys, new)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = [entry.name for entry in dataclasses.fields(tree) if hasattr(tree, entry.name)]
        return [getattr(tree, name) for name in names], lambda new: _copy_dataclass(tree, names, new)
    return None


def _flatten_into(tree: Any, leaves: list[Any]) -> Callable[[Any], Any]:
    found = children_of(tree)
    if found is None:
        leaves.append(tree)
        return next
    children, rebuild = found
    parts = [_flatten_into(child, leaves) for child in children]
    return lambda source: rebuild([part(source) for part in parts])


def _copy_mapping(tree: Any, keys: list[Any], values: list[Any]) -> Any:
    try:
        result = copy.copy(tree)
        for key, value in zip(keys, values, strict=True):
            result[key] = value
        return result
    except TypeError:  # a mapping that cannot be written to
        return type(tree)(dict(zip(keys, values, strict=True)))


def _copy_dataclass(tree: Any, names: list[str], values: list[Any]) -> Any:
    result = copy.copy(tree)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(result, name, value)
    return result
