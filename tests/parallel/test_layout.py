"""Axis sizes, and which process sits where."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lnn_lightning.parallel.errors import LayoutError
from lnn_lightning.parallel.layout import AXES, DATA, PIPELINE, TENSOR, Layout, Mesh, resolve_layout
from tests.helpers.ranks import run_ranks


@pytest.mark.parametrize(
    ("world_size", "sizes", "shape"),
    [
        (1, {}, (1, 1, 1)),
        (6, {}, (1, 6, 1)),
        (8, {"pipeline_parallel_size": 2}, (2, 4, 1)),
        (8, {"pipeline_parallel_size": 2, "tensor_parallel_size": 4}, (2, 1, 4)),
        (12, {"pipeline_parallel_size": 3, "tensor_parallel_size": 2}, (3, 2, 2)),
        (8, {"pipeline_parallel_size": 2, "data_parallel_size": 4}, (2, 4, 1)),
        (4, {"data_parallel_size": 4}, (1, 4, 1)),
    ],
)
def test_sizes_that_fit(world_size: int, sizes: dict[str, Any], shape: tuple[int, int, int]) -> None:
    layout = resolve_layout(world_size, **sizes)
    assert layout.shape == shape
    assert layout.world_size == world_size
    assert (layout.pipeline_parallel_size, layout.data_parallel_size, layout.tensor_parallel_size) == shape


@pytest.mark.parametrize(
    ("world_size", "sizes", "words"),
    [
        (6, {"pipeline_parallel_size": 4}, ["6 processes cannot be divided", "6 is no multiple of 4", "Start 4"]),
        (
            6,
            {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
            ["pipeline_parallel_size=2 x tensor_parallel_size=2", "6 is no multiple of 4"],
        ),
        (1, {"pipeline_parallel_size": 2}, ["1 processes cannot be divided", "Trainer(devices=..., num_nodes=...)"]),
        (4, {"pipeline_parallel_size": 2, "data_parallel_size": 3}, ["needs 6 processes, but 4 run"]),
        (8, {"pipeline_parallel_size": 2, "data_parallel_size": 2}, ["needs 4 processes, but 8 run", "'auto'"]),
        (2, {"pipeline_parallel_size": 0}, ["`pipeline_parallel_size`", "at least 1, got 0"]),
        (2, {"data_parallel_size": -1}, ["`data_parallel_size`", "at least 1, got -1"]),
        (2, {"data_parallel_size": "automatic"}, ["`data_parallel_size`", "got 'automatic'"]),
        (2, {"tensor_parallel_size": 2.0}, ["`tensor_parallel_size`", "got 2.0"]),
        (2, {"pipeline_parallel_size": True}, ["`pipeline_parallel_size`", "got True"]),
        (2, {"pipeline_parallel_size": "2"}, ["`pipeline_parallel_size`", "got '2'"]),
    ],
)
def test_sizes_that_do_not_fit(world_size: int, sizes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(LayoutError) as caught:
        resolve_layout(world_size, **sizes)
    assert isinstance(caught.value, ValueError)
    for word in words:
        assert word in str(caught.value)


def test_tensor_ranks_are_neighbours_and_stages_far_apart() -> None:
    layout = Layout(2, 3, 2)
    assert [layout.rank_of(*place) for place in product(range(2), range(3), range(2))] == list(range(12))
    assert layout.rank_of(0, 0, 1) - layout.rank_of(0, 0, 0) == 1
    assert layout.rank_of(0, 1, 0) - layout.rank_of(0, 0, 0) == 2
    assert layout.rank_of(1, 0, 0) - layout.rank_of(0, 0, 0) == 6


def _places(rank: int, world_size: int) -> dict[str, Any]:
    layout = resolve_layout(world_size, pipeline_parallel_size=2)
    mesh = Mesh.create(layout, "cpu")
    return {
        "rank of place": layout.rank_of(*(mesh.rank(axis) for axis in AXES)),
        "sizes": tuple(mesh.size(axis) for axis in AXES),
        "groups": {axis: dist.get_process_group_ranks(mesh.group(axis)) for axis in AXES},
        "names": mesh.device_mesh.mesh_dim_names,
    }


@pytest.mark.slow
def test_mesh_puts_processes_where_the_layout_says() -> None:
    for rank, found in enumerate(run_ranks(_places, 4)):
        stage, data = divmod(rank, 2)
        assert found["rank of place"] == rank
        assert found["sizes"] == (2, 2, 1)
        assert found["groups"] == {PIPELINE: [data, data + 2], DATA: [2 * stage, 2 * stage + 1], TENSOR: [rank]}
        assert found["names"] == ("pipeline_parallel", "data_parallel", "tensor_parallel")


def _subgroups(rank: int, world_size: int) -> tuple[dict[tuple[int, ...], list[int]], int]:
    mesh = Mesh.create(Layout(world_size, 1, 1), "cpu")
    # in another order on each rank, with repetitions and a set of one
    sets = [(0, 2), (0, 1, 2), (1,), (1, 2), (0, 2)]
    mesh.pipeline_subgroups(sets[rank:] + sets[:rank])
    found = {}
    for ranks in [(0, 2), (0, 1, 2), (1, 2)]:
        if rank in ranks:
            value = torch.tensor([10**rank])
            dist.all_reduce(value, group=mesh.pipeline_subgroup(ranks))
            found[ranks] = value.tolist()
    whole = mesh.pipeline_subgroup((0, 1, 2)) is mesh.group(PIPELINE)
    before = len(mesh._shared_groups)
    mesh.pipeline_subgroups(sets)
    return found, int(whole) + len(mesh._shared_groups) - before


def test_groups_of_stages_that_share_parameters() -> None:
    results = run_ranks(_subgroups, 3)
    assert [found for found, _ in results] == [
        {(0, 2): [101], (0, 1, 2): [111]},
        {(0, 1, 2): [111], (1, 2): [110]},
        {(0, 2): [101], (0, 1, 2): [111], (1, 2): [110]},
    ]
    assert all(extra == 1 for _, extra in results), "all ranks are the axis' own group, and groups are made once"


@pytest.mark.parametrize("pair", [(2,), (1, 2, 3), (0, 2), (2, "2"), (True, 2)])
def test_a_pair_of_sizes_is_checked(pair: tuple[Any, ...]) -> None:
    with pytest.raises(LayoutError, match="a pair .replicate, shard."):
        resolve_layout(4, data_parallel_size=pair)


def test_a_pair_is_one_data_axis_of_groups() -> None:
    layout = resolve_layout(8, pipeline_parallel_size=2, data_parallel_size=[2, 2])
    assert layout.shape == (2, 4, 1) and (layout.data_replicas, layout.shard_size) == (2, 2)
    with pytest.raises(LayoutError, match="needs 4 processes, but 8 run"):
        resolve_layout(8, data_parallel_size=(2, 2))
