"""Trees, errors and checksums between ranks."""

import collections
import dataclasses
import enum
import io
import math
from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from lnn_lightning.parallel.errors import AbsentValueError
from lnn_lightning.parallel.exchange import (
    RemoteError,
    TreeChannel,
    UnequalBatchError,
    _Extractor,
    agree,
    batch_checksum,
    check_same_batch,
)
from tests.helpers.ranks import run_ranks

CPU = torch.device("cpu")
Point = collections.namedtuple("Point", "x y")


class Colour(enum.IntEnum):
    RED = 7


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    name: str
    count: int


def a_tree() -> Any:
    """Everything a step might return or log."""
    torch.manual_seed(0)
    return {
        "float": 0.1,
        "tiny": 5e-324,
        "special": (math.inf, -math.inf, -0.0),
        "int": 3,
        "negative": -(2**53),
        "huge": 2**70 + 1,
        "bool": (True, False),
        "none": None,
        "text": "é",
        "bytes": b"\x00\xff",
        "colour": Colour.RED,
        5: {"nested": [1, [2.5, ("a", torch.tensor(1.5))]]},
        "scalars": [
            torch.tensor(3.25, dtype=dtype)
            for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.uint8)
        ],
        "yes": torch.tensor(True),
        "long": torch.tensor(2**62 + 1),
        "short": torch.tensor(-5),
        "complex": torch.tensor(1 + 2j),
        "matrix": torch.randn(3, 4),
        "view": torch.randn(4, 3).t(),
        "half": torch.randn(5).bfloat16(),
        "mask": torch.tensor([[True, False]]),
        "empty": torch.empty(0, 3),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "point": Point(torch.ones(2), 4),
        "output": Output(torch.tensor(2.0), "x", 9),
        "encoding": UserDict(ids=torch.arange(6)),
        "ordered": collections.OrderedDict(b=1, a=2),
        "array": np.arange(4.0),
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.empty(2, device="meta"),
    }


def assert_same(left: Any, right: Any) -> None:
    assert type(left) is type(right), (left, right)
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype and left.shape == right.shape
        if not left.is_meta:
            assert torch.equal(left.to_dense(), right.to_dense()), (left, right)
    elif isinstance(left, (dict, UserDict)):
        assert list(left) == list(right)
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    elif dataclasses.is_dataclass(left):
        assert_same(vars(left), vars(right))
    elif isinstance(left, np.ndarray):
        assert np.array_equal(left, right)
    else:
        assert left == right
        assert not isinstance(left, float) or math.copysign(1, left) == math.copysign(1, right)


def raised(function: Any, *args: Any) -> BaseException | None:
    try:
        function(*args)
    except BaseException as error:
        return error
    return None


# ---------------------------------------------------------------------------------------------- trees


def _everything_crosses(rank: int, world_size: int) -> list[int]:
    channel = TreeChannel(dist.group.WORLD, CPU)
    counts = []
    real = dist.broadcast

    def counting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        counts[-1] += 1
        return real(tensor, *args, **kwargs)

    dist.broadcast = counting
    for source in (world_size - 1, 0):
        tree = a_tree()
        counts.append(0)
        got = channel.broadcast(tree if rank == source else None, source)
        assert_same(got, a_tree())
        assert (got is tree) == (rank == source)

    for step in range(3):  # the same skeleton with other values
        counts.append(0)
        tree = {"loss": torch.tensor(0.5 * step), "steps": step, "rate": 0.1**step, "ok": step == 1, "last": None}
        assert_same(channel.broadcast(tree if rank == 0 else None, 0), tree)
    counts.append(0)
    tree = {"loss": torch.tensor(9.0), "logits": torch.full((2, 3), 4.0), "labels": torch.tensor([1, 2])}
    assert_same(channel.broadcast(tree if rank == 0 else None, 0), tree)
    for _ in range(2):
        counts.append(0)
        assert channel.broadcast(None, 0) is None

    result, counts = counts, [0]
    got = channel.broadcast({"weights": torch.nn.Parameter(torch.ones(2) * 2, requires_grad=True)}, 1)
    assert got["weights"].requires_grad == (rank == 1), "the graph stays where it is"

    in_use = []
    for number in range(300):  # more skeletons than are kept; what is in use stays
        assert channel.broadcast({f"{number}": 1.0} if rank == 0 else None, 0) == {f"{number}": 1.0}
        counts.append(0)
        assert channel.broadcast({"in use": number} if rank == 0 else None, 0) == {"in use": number}
        in_use.append(counts[-1])
    assert in_use == [3] + [2] * 299
    for number in (299, 0, 150):
        assert channel.broadcast({f"{number}": 2.0} if rank == 1 else None, 1) == {f"{number}": 2.0}
    assert len(channel._known) <= 256
    return result


def test_everything_crosses_and_the_steady_state_is_cheap() -> None:
    for counts in run_ranks(_everything_crosses, 2):
        first, second, *steps, bigger, nothing, nothing_again = counts
        assert second == first - 1, "the skeleton crosses once, whoever sends it"
        assert steps == [3, 2, 2], "a header and the numbers"
        assert bigger == 5, "header, skeleton, numbers, two tensors"
        assert (nothing, nothing_again) == (2, 1)


def _failures_reach_all(rank: int, world_size: int) -> dict[str, str]:
    channel = TreeChannel(dist.group.WORLD, CPU)
    fake = FakeTensorMode().from_tensor(torch.ones(2, 3))
    seen = {}
    for name, tree in {"lambda": {"f": lambda: 0}, "generator": (i for i in ()), "fake": fake}.items():
        error = raised(channel.broadcast, tree if rank == 1 else None, 1)
        seen[name] = f"{type(error).__name__}: {error}"
    assert channel.broadcast("fine" if rank == 1 else None, 1) == "fine", "the channel survives"
    return seen


def test_a_tree_that_cannot_cross_fails_everywhere() -> None:
    other, own = run_ranks(_failures_reach_all, 2)
    assert own["lambda"].startswith("TypeError: A result of the step cannot be given to the other ranks")
    assert own["generator"].startswith("TypeError") and own["fake"].startswith("AbsentValueError")
    for name in own:
        assert other[name].startswith("RemoteError: rank 1: "), other[name]
    assert "(2, 3)" in other["fake"]


def _alone(rank: int, world_size: int) -> None:
    groups = [dist.new_group([member]) for member in range(world_size)]
    channel = TreeChannel(groups[rank], CPU)
    tree = {"unpicklable": lambda: 0}
    assert channel.broadcast(tree, 0) is tree
    pair = dist.new_group([1, 2])
    if rank in (1, 2):
        channel = TreeChannel(pair, CPU)
        assert channel.broadcast(rank, 0) == 1, "source counts within the group"
        assert channel.broadcast(rank, 1) == 2
        error = raised(agree, ValueError("bad") if rank == 2 else None, pair, CPU)
        assert str(error) == ("rank 2: ValueError: bad" if rank == 1 else "bad"), "global ranks in messages"


def test_small_groups() -> None:
    run_ranks(_alone, 3)


def test_an_absent_value_is_named_by_its_shape() -> None:
    with pytest.raises(AbsentValueError, match=r"\(4, 5\)"):
        _Extractor(io.BytesIO()).dump([FakeTensorMode().from_tensor(torch.ones(4, 5))])


# ---------------------------------------------------------------------------------------------- agreement


def _agree(rank: int, world_size: int) -> list[str]:
    seen = []
    for failing in ((), (1,), (0, 2), (0, 1, 2)):
        own = KeyError(f"rank {rank} is out") if rank in failing else None
        error = raised(agree, own, dist.group.WORLD, CPU)
        assert own is None or error is own
        seen.append("" if error is None else f"{type(error).__name__}: {error}")
    exit_error = raised(agree, SystemExit(3) if rank == 0 else None, dist.group.WORLD, CPU)
    assert isinstance(exit_error, SystemExit if rank == 0 else RemoteError)
    silent = raised(agree, ValueError() if rank == 0 else None, dist.group.WORLD, CPU)
    assert isinstance(silent, ValueError if rank == 0 else RemoteError), "an error without a text is one"
    return seen


def test_all_ranks_raise_when_one_failed() -> None:
    seen = run_ranks(_agree, 3)
    assert [row[0] for row in seen] == ["", "", ""]
    assert seen[0][1] == seen[2][1] == "RemoteError: rank 1: KeyError: 'rank 1 is out'"
    assert seen[1][2] == "RemoteError: rank 0: KeyError: 'rank 0 is out' (and 1 more of 3 ranks failed)"
    assert all(row[3].startswith("KeyError") for row in seen)


# ---------------------------------------------------------------------------------------------- batches


def a_batch() -> dict[str, Any]:
    return {
        "x": torch.arange(12.0).view(3, 4),
        "y": [torch.tensor([1, 2, 3]), "text", 4],
        "meta": UserDict(idx=(0, None, 0.5)),
        "out": Output(torch.tensor(1.0), "n", 2),
        "array": np.arange(3),
        "odd": torch.arange(5, dtype=torch.uint8),
        "half": torch.ones(3, dtype=torch.bfloat16),
    }


def changed(path: str) -> dict[str, Any]:
    batch = a_batch()
    if path == "value":
        batch["x"][2, 3] = 11.5
    elif path == "two signs":
        batch["x"][1] *= torch.tensor([-1.0, -1.0, 1.0, 1.0])
    elif path == "rows swapped":
        batch["x"] = batch["x"][[1, 0, 2]]
    elif path == "shape":
        batch["x"] = batch["x"].view(4, 3)
    elif path == "dtype":
        batch["x"] = batch["x"].view(torch.int32)
    elif path == "last byte":
        batch["odd"][-1] = 5
    elif path == "text":
        batch["y"][1] = "test"
    elif path == "number":
        batch["y"][2] = 5
    elif path == "key":
        batch = {"z" if key == "x" else key: value for key, value in batch.items()}
    elif path == "user dict":
        batch["meta"]["idx"] = (0, None, 0.25)
    elif path == "dataclass":
        batch["out"].count = 3
    elif path == "array":
        batch["array"][0] = 7
    elif path == "tuple for list":
        batch["y"] = tuple(batch["y"])
    return batch


@pytest.mark.parametrize(
    "path",
    [
        *("value", "two signs", "rows swapped", "shape", "dtype", "last byte", "text", "number", "key"),
        *("user dict", "dataclass", "array", "tuple for list"),
    ],
)
def test_checksum_sees_a_change(path: str) -> None:
    assert batch_checksum(changed(path)) != batch_checksum(a_batch())


def test_checksum_is_a_function_of_the_values() -> None:
    first, second = batch_checksum(a_batch()), batch_checksum(changed("nothing"))
    assert first == second and 0 <= first < 2**63
    batch = a_batch()
    batch["x"] = batch["x"].t().contiguous().t()  # other strides, same values
    assert batch_checksum(batch) == first
    assert batch_checksum({"o": object()}) == batch_checksum({"o": object()}), "no addresses"
    assert batch_checksum([[], [1]]) != batch_checksum([[1], []])
    assert batch_checksum(torch.eye(3).to_sparse()) != batch_checksum(torch.zeros(3, 3).to_sparse())
    assert batch_checksum(torch.tensor([])) != batch_checksum(torch.tensor([0.0]))


def _same_batch(rank: int, world_size: int) -> str:
    check_same_batch(a_batch(), dist.group.WORLD, CPU)
    pair = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    check_same_batch(torch.tensor([rank % 2]), pair, CPU)  # pipelines may differ among each other
    error = raised(check_same_batch, changed("value") if rank == 3 else a_batch(), pair, CPU)
    assert (error is None) == (rank % 2 == 0), "only the pipeline with a difference complains"
    error = raised(check_same_batch, {"x": torch.tensor([rank // 2])}, dist.group.WORLD, CPU)
    assert isinstance(error, UnequalBatchError)
    return str(error)


@pytest.mark.slow
def test_ranks_fed_different_data_are_named() -> None:
    messages = run_ranks(_same_batch, 4)
    assert len(set(messages)) == 1
    assert "2 different batches (equal within: ranks 0, 1; ranks 2, 3)" in messages[0]
    assert "distributed_sampler_kwargs" in messages[0] and "data_parallel_rank" in messages[0]


@pytest.mark.gpu
def test_checksum_is_the_same_on_the_gpu() -> None:
    for tensor in (torch.randn(1001), torch.arange(7, dtype=torch.uint8), torch.randn(4, 5, dtype=torch.float64)):
        assert batch_checksum(tensor.cuda()) == batch_checksum(tensor)
