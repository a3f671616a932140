"""Ranks that die, fail or hang, in every phase of a run: all end soon, and say why."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor

from lnn_lightning.parallel.watch import member
from tests.helpers.ranks import RanksFailed, launch_ranks
from tests.strategies.test_ptdp import BOTH, DATA, PIPELINE, Model, loader, model, trainer_for

SOON = 30.0
"""Seconds within which a job must end once a rank is lost."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Dies(Model):
    """Kills the process of one rank at a moment of the third step."""

    rank, phase = 1, ""

    def due(self, phase: str) -> bool:
        return self.phase == phase and self.trainer.global_step == 2 and self.global_rank == self.rank

    def setup(self, stage: str) -> None:
        if self.phase == "setup" and self.global_rank == self.rank:
            die()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        if self.due("forward"):
            die()
        if self.due("backward"):
            self.blocks[2].register_full_backward_hook(lambda *_: die())
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.due("optimizer"):
            die()


class DiesWriting(Callback):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == 2 and trainer.global_rank == self.rank:
            os.fsync = lambda _: die()  # type: ignore[assignment]


def _dies(rank: int, world_size: int, layout: dict[str, Any], phase: str, dying: int, folder: str) -> None:
    Dies.phase, Dies.rank = phase, dying
    callbacks: list[Any] = [DiesWriting(dying)] if phase == "save" else []
    callbacks.append(ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1))
    trainer = trainer_for(world_size, layout, callbacks=callbacks, enable_checkpointing=True)
    try:
        trainer.fit(model(Dies), loader())
    finally:
        Path(folder, f"ended-{rank}").write_text(str(time.time()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "dying", "layout", "world_size"),
    [
        ("setup", 1, PIPELINE, 2),
        ("forward", 1, PIPELINE, 2),
        ("backward", 1, PIPELINE, 2),
        ("optimizer", 0, PIPELINE, 2),
        ("save", 1, DATA, 2),
        ("forward", 2, BOTH, 4),
    ],
)
def test_a_killed_rank_ends_the_job(
    phase: str, dying: int, layout: dict[str, Any], world_size: int, tmp_path: Path
) -> None:
    begin = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        launch_ranks(_dies, world_size, layout, phase, dying, str(tmp_path))
    assert time.monotonic() - begin < SOON
    tracebacks = caught.value.tracebacks
    assert "died without a word (exit code -9)" in tracebacks.pop(dying)
    assert len(tracebacks) == world_size - 1
    for text in tracebacks.values():
        last = text.strip().splitlines()[-1]
        assert "LostRankError: " in last
        assert f"rank {dying} (pipeline stage " in last
        assert "is gone: its process ended without a word" in last


class StandsStill(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_step == 1 and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.trainer.global_step == 1 and self.global_rank == 2:
            time.sleep(100)
        return super().training_step(batch, batch_idx)


def _stands_still(rank: int, world_size: int, folder: str) -> None:
    member.GRACE = 1.0
    Path(folder, f"pid-{rank}").write_text(str(os.getpid()))
    trainer = trainer_for(world_size, {"data_parallel_size": 3, "timeout": timedelta(seconds=4)})
    try:
        trainer.fit(model(StandsStill), loader())
    finally:
        os.kill(int(Path(folder, "pid-1").read_text()), signal.SIGKILL)


@pytest.mark.slow
def test_a_timeout_says_what_each_rank_was_doing(tmp_path: Path, capfd: Any) -> None:
    """Rank 0 waits in a collective, rank 1 is stopped, rank 2 does something else: it cannot come back by itself."""
    with pytest.raises(RanksFailed) as caught:
        launch_ranks(_stands_still, 3, str(tmp_path))
    text = caught.value.tracebacks[0]
    report = text[text.index("HangError: A collective timed out") :]
    lines = report.strip().splitlines()
    assert lines[1].startswith("  rank 1 (pipeline stage 0, data rank 1") and "DOES NOT ANSWER" in lines[1]
    assert lines[2].startswith("  rank 0 (pipeline stage 0, data rank 0") and "backward of micro-batch 0" in lines[2]
    assert (
        lines[3].startswith("  rank 2 (")
        and "data rank 2" in lines[3]
        and "forward of micro-batch 0, stage 0 for " in lines[3]
    )
    assert "test_faults.py:" in lines[3] and "(training_step)" in lines[3]
    assert "(exit code 1)" in caught.value.tracebacks[2]
    said = capfd.readouterr().out
    assert "This rank did not come to an end by itself (forward of micro-batch 0" in said
    assert "no progress for " in said  # at nine tenths of the timeout


# ------------------------------------------------------------------------------------------------ one rank fails


class Fails(Model):
    where = ""

    def fail(self, where: str) -> None:
        if self.where == where and self.global_rank == 1 and self.trainer.global_step >= 2:
            raise ValueError(f"not in {where}")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.fail("training_step")
        loss = super().training_step(batch, batch_idx)
        if self.where == "none" and self.global_rank == 1:
            return None
        if self.where.startswith("nan") and self.global_rank == 1 and self.trainer.global_step >= 2:
            return loss * float("nan")
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.fail("on_train_batch_end")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.fail("on_save_checkpoint")


def _fails(rank: int, world_size: int, where: str, folder: str, options: dict[str, Any]) -> list[float]:
    Fails.where = where
    callbacks = [ModelCheckpoint(folder, every_n_train_steps=3)]
    trainer = trainer_for(world_size, DATA, callbacks=callbacks, enable_checkpointing=True, **options)
    module = model(Fails)
    trainer.fit(module, loader())
    return [float(p.sum()) for p in module.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("on_train_batch_end", "ValueError: not in on_train_batch_end"),
        ("on_save_checkpoint", "ValueError: not in on_save_checkpoint"),
        ("nan", "RuntimeError: Function 'MulBackward0' returned nan values"),
        ("none", "StepError: training_step returned None for micro-batch 0 of 2"),
    ],
)
def test_pl_6430_one_rank_raises_in_a_hook_or_while_saving(where: str, error: str, tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        launch_ranks(_fails, 2, where, str(tmp_path), {"detect_anomaly": where == "nan"})
    assert time.monotonic() - begin < SOON
    assert error in caught.value.tracebacks[1].splitlines()[-1]
    last = caught.value.tracebacks[0].strip().splitlines()[-1]
    assert "LostRankError: rank 1 (pipeline stage 0, data rank 1, tensor rank 0; host " in last
    assert f" failed: {error}" in last


def test_a_loss_that_is_nan_on_one_rank_is_nan_on_all(tmp_path: Path) -> None:
    """Without `detect_anomaly` nothing stops, as on one process; gradients are summed, so no rank differs."""
    for found in launch_ranks(_fails, 2, "nan", str(tmp_path), {}):
        assert all(value != value for value in found)
