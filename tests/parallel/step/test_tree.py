"""Containers of all kinds, taken apart and put together."""

from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils import _pytree as pytree

from lnn_lightning.parallel.step.tree import children_of, tree_flatten, tree_leaves, tree_map, tree_tensors


class Point(NamedTuple):
    a: Any
    b: Any


@dataclass
class Record:
    a: Any
    b: Any


@dataclass(frozen=True)
class FrozenRecord:
    a: Any
    b: Any


class Registered:
    def __init__(self, a: Any, b: Any, note: str) -> None:
        self.a, self.b, self.note = a, b, note


pytree.register_pytree_node(
    Registered, lambda r: ([r.a, r.b], r.note), lambda children, note: Registered(*children, note)
)


class ReadOnly(Mapping):
    """Holds its values; cannot be written to."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = dict(values)

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Any:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def model_output() -> Any:
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=1, hidden_states=(2, 3))


TREES: dict[str, tuple[Any, list[Any]]] = {
    "leaf": (1, [1]),
    "none": (None, [None]),
    "text": ("ab", ["ab"]),
    "list": ([1, [2, 3], []], [1, 2, 3]),
    "tuple": ((1, (2,), ()), [1, 2]),
    "dict": ({"b": 1, "a": {"c": 2}}, [1, 2]),
    "ordered dict": (OrderedDict(b=1, a=2), [1, 2]),
    "user dict": (UserDict(b=1, a=[2, 3]), [1, 2, 3]),
    "read-only": (ReadOnly({"b": 1, "a": 2}), [1, 2]),
    "mapping proxy": (MappingProxyType({"b": 1, "a": 2}), [1, 2]),
    "named tuple": (Point(1, [2]), [1, 2]),
    "dataclass": (Record(1, {"x": 2}), [1, 2]),
    "frozen": (FrozenRecord(Record(1, 2), 3), [1, 2, 3]),
    "registered": (Registered(1, [2], "kept"), [1, 2]),
    "deque": (deque([1, 2]), [1, 2]),
}


def _read(tree: Any) -> Any:
    """A tree as something that can be compared."""
    if isinstance(tree, Registered):
        return ("registered", _read(tree.a), _read(tree.b), tree.note)
    if isinstance(tree, Mapping):
        return (type(tree).__name__, [(key, _read(tree[key])) for key in tree])
    if isinstance(tree, (Record, FrozenRecord)):
        return (type(tree).__name__, _read(tree.a), _read(tree.b))
    if isinstance(tree, (list, tuple, deque)):
        return (type(tree).__name__, [_read(item) for item in tree])
    return tree


@pytest.mark.parametrize("name", TREES)
def test_there_and_back(name: str) -> None:
    tree, expected = TREES[name]
    before = _read(tree)
    leaves, unflatten = tree_flatten(tree)
    assert leaves == expected == tree_leaves(tree)
    assert _read(unflatten(leaves)) == before
    if expected:
        marked = [("new", index) for index in range(len(leaves))]
        rebuilt = unflatten(marked)
        assert tree_leaves(rebuilt) == [leaf for pair in marked for leaf in pair]
        assert type(rebuilt) is type(tree) or name in ("leaf", "none", "text")
        assert _read(unflatten(leaves)) == before, "it can be used again"
    assert _read(tree) == before, "the tree itself stays"


def test_model_output_keeps_its_attributes() -> None:
    output = model_output()
    leaves, unflatten = tree_flatten(output)
    assert leaves == [1, 2, 3]
    rebuilt = unflatten([10, 20, 30])
    assert type(rebuilt) is type(output)
    assert rebuilt.last_hidden_state == 10
    assert rebuilt["hidden_states"] == (20, 30)
    assert rebuilt.attentions is None


def test_map_and_tensors() -> None:
    x = torch.ones(2)
    tree = {"x": x, "rest": (1, Record(x, "text"))}
    doubled = tree_map(lambda leaf: leaf * 2, tree)
    assert torch.equal(doubled["x"], 2 * x)
    assert doubled["rest"][0] == 2
    assert doubled["rest"][1].b == "texttext"
    assert [id(t) for t in tree_tensors(tree)] == [id(x), id(x)]
    assert torch.equal(x, torch.ones(2))


def test_default_factory_stays() -> None:
    rebuilt = tree_map(lambda leaf: leaf, defaultdict(list, a=1))
    assert rebuilt == {"a": 1}
    assert rebuilt["b"] == []


def test_leaves_that_look_like_containers() -> None:
    for leaf in (Record, Point, torch.ones(3), "text", b"bytes", range(3), {1, 2}, torch.nn.Linear(1, 1)):
        assert children_of(leaf) is None


def test_other_attributes_of_a_mapping_stay() -> None:
    batch = UserDict(a=1)
    batch.encodings = "kept"  # type: ignore[attr-defined]
    rebuilt = tree_map(lambda leaf: leaf + 1, batch)
    assert rebuilt["a"] == 2
    assert rebuilt.encodings == "kept"
    assert batch["a"] == 1, "the copy has a store of its own"
