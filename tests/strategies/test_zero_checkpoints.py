"""Checkpoints under ZeRO: whole and canonical, loadable by any other stage, size or one process."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lnn_lightning.checkpoint import load_full_state_dict, tensor_names
from tests.helpers.ranks import launch_ranks
from tests.strategies.test_ptdp import ONE, _from_one_process, _train, assert_same_state

OPTIONS = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, ONE),
    **{f"zero{s}": (2, {"data_parallel_size": 2, "microbatches": 2, "zero_stage": s}) for s in range(4)},
    "zero3-pipeline": (
        4,
        {"pipeline_parallel_size": 2, "data_parallel_size": 2, "microbatches": 2, "zero_stage": 3},
    ),
    "zero2-hybrid": (4, {"data_parallel_size": (2, 2), "microbatches": 2, "zero_stage": 2}),
    "zero3-of-3": (3, {"data_parallel_size": 3, "microbatches": 2, "zero_stage": 3}),
}


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "zero3-pipeline", "zero2-hybrid"])
def test_resumed_is_uninterrupted_bit_for_bit(name: str, tmp_path: Path) -> None:
    world_size, layout = LAYOUTS[name]
    path = str(tmp_path / "half.ckpt")
    whole = launch_ranks(_train, world_size, layout, 4, "", "", OPTIONS)
    half = launch_ranks(_train, world_size, layout, 2, path, "", OPTIONS)
    rest = launch_ranks(_train, world_size, layout, 4, "", path, OPTIONS)
    for uninterrupted, first, second in zip(whole, half, rest, strict=True):
        assert [*first["losses"], *second["losses"]] == uninterrupted["losses"]
        assert [*first["rates"], *second["rates"]] == uninterrupted["rates"]
        assert_same_state(second["state"], uninterrupted["state"])


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        ("zero3", "zero1"),
        ("zero1", "zero2"),
        ("zero2", "zero0"),
        ("zero0", "zero3"),
        ("zero3", "zero3-pipeline"),
        ("zero3-pipeline", "zero2-hybrid"),
        ("zero2-hybrid", "zero1"),
        ("zero1", "zero3-pipeline"),
    ],
)
def test_resumed_under_another_layout(saved: str, resumed: str, tmp_path: Path) -> None:
    """Without shuffling every rank is fed the same samples at the same time in these layouts."""
    path = str(tmp_path / "half.ckpt")
    launch_ranks(_train, LAYOUTS[saved][0], LAYOUTS[saved][1], 2, path, "", OPTIONS)
    same = launch_ranks(_train, LAYOUTS[saved][0], LAYOUTS[saved][1], 4, "", path, OPTIONS)[0]
    for found in launch_ranks(_train, LAYOUTS[resumed][0], LAYOUTS[resumed][1], 4, "", path, OPTIONS):
        assert found["rates"] == same["rates"]
        if "pipeline" not in saved + resumed and "hybrid" not in saved + resumed:
            assert found["losses"] == pytest.approx(same["losses"], rel=1e-9) or len(found["losses"]) == 10


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "zero3-pipeline", "zero3-of-3"])
def test_a_checkpoint_of_one_process_goes_on_and_back(name: str, tmp_path: Path) -> None:
    """A plain file written by Lightning; every rank is fed the same samples, so one process is the reference."""
    world_size, layout = LAYOUTS[name]
    plain, folder = str(tmp_path / "plain.ckpt"), str(tmp_path / "half.ckpt")
    losses, rates, state = launch_ranks(_from_one_process, 1, None, 6, "", "")[0]
    launch_ranks(_from_one_process, 1, None, 2, plain, "")
    for found in launch_ranks(_from_one_process, world_size, layout, 4, folder, plain):
        assert found[0] == pytest.approx(losses[10:20], rel=1e-9)
        assert found[1] == pytest.approx(rates[10:20], rel=1e-12)
    for found in launch_ranks(_from_one_process, 2, LAYOUTS["zero2"][1], 6, "", folder):
        assert found[0] == pytest.approx(losses[20:], rel=1e-9)
        assert_same_state(found[2], state, 1e-9)
    shapes = tensor_names(folder)
    assert {name: tuple(value.shape) for name, value in load_full_state_dict(folder).items()} == {
        name: tuple(value.shape) for name, value in state.items()
    }
    for name, value in state.items():
        assert shapes[f"optimizer.0.{name}.exp_avg"] == (tuple(value.shape), torch.float64)
