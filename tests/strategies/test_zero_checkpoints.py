"""Checkpoints under ZeRO: whole and canonical, loadable by any other stage, size or one process."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lnn_lightning.checkpoint import load_full_state_dict, tensor_names
from tests.helpers.ranks import RanksFailed, launch_ranks
from tests.strategies.test_ptdp import (
    ONE,
    _finetunes,
    _from_one_process,
    _goes_on_finetuning,
    assert_same_state,
    check_resumed,
)

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
    check_resumed(*LAYOUTS[name], str(tmp_path / "half.ckpt"), OPTIONS)


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        ("zero3", "zero1"),
        ("zero1", "zero2"),
        ("zero2", "zero0"),
        ("zero0", "zero3"),
        ("zero3", "zero3-pipeline"),
        ("zero3-pipeline", "zero2-hybrid"),
        ("zero2-hybrid", "one"),
        ("zero1", "zero3-of-3"),
    ],
)
def test_resumed_under_another_layout(saved: str, resumed: str, tmp_path: Path) -> None:
    """Every rank is fed the same samples and there is no dropout, so one process is the reference."""
    path = str(tmp_path / "half.ckpt")
    losses, rates, state = launch_ranks(_from_one_process, 1, None, 4, "", "")[0]
    launch_ranks(_from_one_process, LAYOUTS[saved][0], LAYOUTS[saved][1], 2, path, "")
    for found in launch_ranks(_from_one_process, LAYOUTS[resumed][0], LAYOUTS[resumed][1], 4, "", path):
        assert found[0] == pytest.approx(losses[10:], rel=1e-9)
        assert found[1] == pytest.approx(rates[10:], rel=1e-12)
        assert_same_state(found[2], state, 1e-9)


def test_finetuning_callbacks_are_refused_where_parameters_are_sharded(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        launch_ranks(_finetunes, *LAYOUTS["zero3"], str(tmp_path))
    for traceback in caught.value.tracebacks.values():
        assert "BackboneFinetuning looks for the optimizer's parameters" in traceback
        assert "Use `zero_stage=1`" in traceback


def test_a_thawed_backbone_goes_on(tmp_path: Path) -> None:
    """A group that a callback added is dealt out too, and resumed."""
    layout = {"data_parallel_size": 2, "microbatches": 2, "zero_stage": 1}
    expected, state = launch_ranks(_finetunes, 1, None, str(tmp_path / "one"))[0]
    for losses, values in launch_ranks(_finetunes, 2, layout, str(tmp_path / "many")):
        assert losses == pytest.approx(expected, rel=1e-9)
        assert_same_state(values, state, 1e-9)
    for epoch in (0, 1):
        path = str(tmp_path / "many" / f"epoch={epoch}.ckpt")
        for losses, values in launch_ranks(_goes_on_finetuning, 2, layout, str(tmp_path / f"two{epoch}"), path):
            assert losses == pytest.approx(expected[5 * (epoch + 1) :], rel=1e-9)
            assert_same_state(values, state, 1e-9)


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
