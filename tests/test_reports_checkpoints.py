"""What went wrong for users of other systems with checkpoints, tried on this one (CASES.md has the reports)."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lnn_lightning import PTDPStrategy
from lnn_lightning.checkpoint.export import export
from tests.checkpoint import plain
from tests.helpers.ranks import launch_ranks
from tests.strategies.test_ptdp import _from_one_process, assert_same_state
from tests.strategies.test_resharding import processes

ZERO3: dict[str, Any] = {"data_parallel_size": 2, "zero_stage": 3}


def trains(
    rank: int, world_size: int, layout: dict[str, Any] | None, steps: int, folder: str | None, ckpt_path: str | None
) -> dict[str, Any]:
    """Training under a layout, or (None) as Lightning itself does it."""
    seen, module = plain.Seen(), plain.module()
    strategy: Any = "auto" if layout is None else PTDPStrategy(**layout)
    trainer = plain.trainer(strategy, world_size, seen, steps, folder)
    trainer.fit(module, datamodule=plain.Batches(), ckpt_path=ckpt_path)
    return plain.outcome(seen, getattr(trainer.strategy, "full_state_dict", module.state_dict)())


def test_pl_16815_pl_19585_resumed_with_another_number_of_ranks(tmp_path: Path) -> None:
    """Two sharded ranks go on as four and as three of other kinds, and as one: every rank is fed the same samples."""
    path = str(tmp_path / "half.ckpt")
    losses, rates, state = launch_ranks(_from_one_process, 1, None, 4, "", "")[0]
    launch_ranks(_from_one_process, 2, {"microbatches": 2, **ZERO3}, 2, path, "")
    for layout in (
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
        {"data_parallel_size": 3, "zero_stage": 2},
        {},
    ):
        world_size = processes(layout)
        for found in launch_ranks(_from_one_process, world_size, {"microbatches": 2, **layout}, 4, "", path):
            assert found[0] == pytest.approx(losses[10:], rel=1e-9)
            assert found[1] == pytest.approx(rates[10:], rel=1e-12)
            assert_same_state(found[2], state, 1e-9)


def test_pl_21357_one_file_of_a_sharded_model_loads_both_ways(tmp_path: Path) -> None:
    """One file from a sharded model: into one process, and from one process into a sharded model."""
    whole = launch_ranks(trains, 1, None, plain.STEPS, None, None)[0]
    launch_ranks(trains, 2, ZERO3, plain.HALF, str(tmp_path / "sharded"), None)
    one_file = tmp_path / "one.ckpt"
    export(tmp_path / "sharded/step=3.ckpt", one_file)
    launch_ranks(trains, 1, None, plain.HALF, str(tmp_path / "plain"), None)
    lightnings = tmp_path / "plain/step=3.ckpt"
    for world_size, layout, file in ((1, None, one_file), (2, ZERO3, one_file), (2, ZERO3, lightnings)):
        found = launch_ranks(trains, world_size, layout, plain.STEPS, None, str(file))
        means = [sum(each["losses"][step] for each in found) / world_size for step in range(plain.HALF)]
        assert means == pytest.approx(whole["losses"][plain.HALF :], rel=1e-9)
        for each in found:
            assert each["rates"] == whole["rates"][plain.HALF :]
            for key, value in whole["state"].items():
                assert torch.allclose(each["state"][key], value, rtol=1e-9, atol=1e-12), key
