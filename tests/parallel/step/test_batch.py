"""Where the batch dimension is, and cutting along it."""

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.step.batch import batch_size_of, microbatch_count, own_copy, signature_of, split_batch

SIZE = 4
X = torch.arange(SIZE * 3).view(SIZE, 3)
Y = torch.arange(SIZE)
NAMES = ["a", "b", "c", "d"]


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


Loose = namedtuple("Loose", ["x", "y"])  # noqa: PYI024 (both ways to write one)


@dataclass
class Sample:
    x: Tensor
    names: list[str]
    scale: float = 1.0
    later: Any = field(init=False)  # never set


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    y: Tensor


def encoding() -> Any:
    from transformers import BatchEncoding

    return BatchEncoding({"input_ids": X, "attention_mask": X > 2})


# ------------------------------------------------------------------------------------------------ size


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (X, 4),
        ((X, Y), 4),
        ({"x": X, "scale": torch.tensor(2.0)}, 4),
        ({"a": {"b": [(Y,)]}}, 4),
        (Sample(X, NAMES), 4),
        ([["a", "b", "c"], ["d", "e", "f"]], 3),
        ({"images": [torch.zeros(3, 8, 8), torch.zeros(1, 6, 6)], "targets": [{"boxes": torch.zeros(5, 4)}, {}]}, 2),
        ((X, Y, torch.zeros(7)), 4),
        (torch.tensor(1.0), None),
        ([], None),
        ({"name": "x", "n": 3, "none": None}, None),
        (None, None),
    ],
)
def test_batch_size(batch: Any, size: int | None) -> None:
    assert batch_size_of(batch) == size


def test_lists_of_samples_of_one_shape_are_not_cut_within_the_samples() -> None:
    """Two pictures of three channels and their labels: two samples, not three."""
    batch = ([torch.zeros(3, 8, 8), torch.zeros(3, 6, 6)], [torch.tensor(0), torch.tensor(1)])
    assert batch_size_of(batch) == 2


def test_microbatch_count_is_the_largest_divisor_not_above() -> None:
    for size in range(1, 25):
        for wanted in range(1, 30):
            expected = max(n for n in range(1, wanted + 1) if size % n == 0)
            assert microbatch_count(size, wanted) == expected


@pytest.mark.parametrize("kind", [tuple, list])
@pytest.mark.parametrize("scalar", [False, True])
def test_several_inputs_and_as_many_targets(kind: type, scalar: bool) -> None:
    """Tensors of one batch differ in their other dimensions; some are scalars."""
    inputs = kind([torch.zeros(8, 3), torch.zeros(8, 5)])
    targets = kind([torch.zeros(8), torch.tensor(0.5) if scalar else torch.zeros(8, 2)])
    for batch in ((inputs, targets), [inputs, targets], {"inputs": inputs, "targets": targets}, (inputs,)):
        assert batch_size_of(batch) == 8
    left, right = split_batch((inputs, targets), 2)
    for part in (left, right):
        assert [len(part), len(part[0]), len(part[1])] == [2, 2, 2]
        assert part[0][1].shape == (4, 5)


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        ((torch.zeros(1, 5), torch.zeros(4, 3)), 4),
        ((torch.zeros(1, 5), torch.zeros(1, 5), torch.zeros(4, 3)), 4),
        ((torch.zeros(1, 5), torch.zeros(1)), 1),
        ((torch.zeros(0, 5), torch.zeros(0)), 0),
    ],
)
def test_tensors_of_one_row_are_there_for_all(batch: Any, size: int) -> None:
    assert batch_size_of(batch) == size
    if size == 4:
        for part in split_batch(batch, 2):
            assert torch.equal(part[0], batch[0])
            assert part[-1].shape == (2, 3)


# ------------------------------------------------------------------------------------------------ cutting

CONTAINERS: dict[str, tuple[Any, Callable[[Any], tuple[Tensor, Any]]]] = {
    "tensor": (X, lambda b: (b, None)),
    "tuple": ((X, Y), lambda b: b),
    "list": ([X, Y], lambda b: b),
    "dict": ({"x": X, "y": Y}, lambda b: (b["x"], b["y"])),
    "ordered dict": (OrderedDict(x=X, y=Y), lambda b: (b["x"], b["y"])),
    "default dict": (defaultdict(list, x=X, y=Y), lambda b: (b["x"], b["y"])),
    "read-only mapping": (MappingProxyType({"x": X, "y": Y}), lambda b: (b["x"], b["y"])),
    "user dict": (UserDict({"x": X, "y": Y}), lambda b: (b["x"], b["y"])),
    "batch encoding": (encoding, lambda b: (b["input_ids"], b["attention_mask"])),
    "named tuple": (Pair(X, Y), lambda b: (b.x, b.y)),
    "collections.namedtuple": (Loose(X, Y), lambda b: (b.x, b.y)),
    "dataclass": (Sample(X, NAMES, 0.5), lambda b: (b.x, b.names)),
    "frozen dataclass": (Frozen(X, Y), lambda b: (b.x, b.y)),
    "strings": ((X, NAMES), lambda b: b),
    "tuple of strings": ((X, tuple(NAMES)), lambda b: b),
    "nested": ({"in": {"a": [X]}, "out": (Y, {"names": NAMES})}, lambda b: (b["in"]["a"][0], b["out"][1]["names"])),
    "one dict a sample": ((X, [{"n": torch.zeros(i)} for i in range(SIZE)]), lambda b: b),
}


@pytest.mark.parametrize("name", CONTAINERS)
@pytest.mark.parametrize("count", [2, 4])
def test_containers(name: str, count: int) -> None:
    batch, read = CONTAINERS[name]
    batch = batch() if callable(batch) else batch
    parts = split_batch(batch, count)
    assert len(parts) == count
    whole = read(batch)
    step = SIZE // count
    for index, part in enumerate(parts):
        assert type(part) is type(batch)
        start = index * step
        for got, expected in zip(read(part), whole, strict=True):
            assert type(got) is type(expected)
            if isinstance(expected, Tensor):
                assert torch.equal(got, expected[start : start + step])
                assert got.untyped_storage().data_ptr() == expected.untyped_storage().data_ptr(), "a copy"
            elif expected is not None:
                assert got == expected[start : start + step]
    assert torch.equal(read(batch)[0], whole[0]), "the batch itself stays whole"


def test_what_has_no_batch_dimension_goes_to_every_part() -> None:
    scale, flag, nothing = torch.tensor(3.0), True, None
    shared = {"anything": object()}
    parts = split_batch({"x": X, "scale": scale, "flag": flag, "nothing": nothing, "text": "abcd", **shared}, 2)
    for part in parts:
        assert part["scale"] is scale
        assert part["flag"] is True
        assert part["nothing"] is None
        assert part["text"] == "abcd"
        assert part["anything"] is shared["anything"]


def test_as_many_tensors_as_samples_are_no_samples() -> None:
    """Four tensors of four samples each: every one is cut."""
    batch = [X + i for i in range(SIZE)]
    for index, part in enumerate(split_batch(batch, 2)):
        assert len(part) == SIZE
        assert all(torch.equal(t, (X + i)[2 * index : 2 * index + 2]) for i, t in enumerate(part))


def test_settings_of_a_container_stay() -> None:
    left, right = split_batch(defaultdict(list, x=X), 2)
    assert left["missing"] == []
    assert "missing" not in right
    sample = Sample(X, NAMES, 0.25)
    assert [part.scale for part in split_batch(sample, 2)] == [0.25, 0.25]
    assert not hasattr(split_batch(sample, 2)[0], "later")


def test_one_part_is_the_batch_itself() -> None:
    batch = {"anything": object()}
    assert split_batch(batch, 1) == [batch]
    assert split_batch(batch, 1)[0] is batch


@pytest.mark.parametrize(
    ("batch", "count", "words"),
    [
        (torch.tensor(1.0), 2, ["no batch dimension", "2 micro-batches", "microbatches=1"]),
        ({"n": 3}, 4, ["no batch dimension"]),
        ((X, Y, torch.zeros(7, 2)), 2, ["shape (7, 2)", "4 samples", "buffer"]),
        (X, 3, ["4 samples", "3 equal"]),
    ],
)
def test_refusals(batch: Any, count: int, words: list[str]) -> None:
    with pytest.raises(StepError) as caught:
        split_batch(batch, count)
    for word in words:
        assert word in str(caught.value)


# ------------------------------------------------------------------------------------------------ signature and copies


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        (X, X + 1, True),
        (X, X[:2], False),
        (X, X.float(), False),
        ((X, "a"), (X, "b"), True),
        ((X, 1), (X, 2), True),
        ((X, 1), (X, 1.0), False),
        ((X, None), (X, 0), False),
        ((X, True), (X, False), False),
        ((X,), (X, Y), False),
    ],
)
def test_signature(left: Any, right: Any, same: bool) -> None:
    assert (signature_of(left) == signature_of(right)) is same
    assert (hash(signature_of(left)) == hash(signature_of(right))) is same


def test_own_copy_can_be_changed() -> None:
    batch = Sample(X.clone(), NAMES)
    copy = own_copy(batch)
    copy.x.zero_()
    assert torch.equal(batch.x, X)
    assert copy.names is not batch.names
    assert type(copy) is Sample
