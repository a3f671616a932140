"""Ranks that die, fail or hang, in every phase of a run: all end soon, and say why."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
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

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.training and self.due("forward"):
            die()
        return x

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
