"""Checkpoints under tensor parallelism: whole and canonical, loadable by any other layout, or one process."""

from pathlib import Path
from typing import Any

import pytest

from lnn_lightning.checkpoint import load_full_state_dict
from tests.helpers.ranks import launch_ranks
from tests.strategies.test_ptdp import ONE, _from_one_process, assert_same_state, check_resumed

OPTIONS = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, ONE),
    "tensor": (2, {"tensor_parallel_size": 2, "microbatches": 2}),
    "sequence": (2, {"tensor_parallel_size": 2, "microbatches": 2, "sequence_parallel": True}),
    "pipeline": (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "microbatches": 2}),
    "zero3": (
        4,
        {
            "tensor_parallel_size": 2,
            "data_parallel_size": 2,
            "microbatches": 2,
            "zero_stage": 3,
            "sequence_parallel": True,
        },
    ),
}


@pytest.mark.parametrize("name", ["sequence", "pipeline", "zero3"])
def test_resumed_is_uninterrupted_bit_for_bit(name: str, tmp_path: Path) -> None:
    check_resumed(*LAYOUTS[name], str(tmp_path / "half.ckpt"), OPTIONS)


@pytest.mark.parametrize("name", ["tensor", "pipeline", "zero3"])
def test_a_checkpoint_of_one_process_goes_on_and_back(name: str, tmp_path: Path) -> None:
    """A plain file written by Lightning goes on divided, then on one process again."""
    world_size, layout = LAYOUTS[name]
    plain, folder = str(tmp_path / "plain.ckpt"), str(tmp_path / "half.ckpt")
    losses, rates, state = launch_ranks(_from_one_process, 1, None, 6, "", "")[0]
    launch_ranks(_from_one_process, 1, None, 2, plain, "")
    for found in launch_ranks(_from_one_process, world_size, layout, 4, folder, plain):
        assert found[0] == pytest.approx(losses[10:20], rel=1e-9)
        assert found[1] == pytest.approx(rates[10:20], rel=1e-12)
    for found in launch_ranks(_from_one_process, 1, ONE, 6, "", folder):
        assert found[0] == pytest.approx(losses[20:], rel=1e-9)
        assert_same_state(found[2], state, 1e-9)
    stored = load_full_state_dict(folder)
    assert {key: tuple(value.shape) for key, value in stored.items()} == {
        key: tuple(value.shape) for key, value in state.items()
    }
