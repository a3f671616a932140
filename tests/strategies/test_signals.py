"""SIGTERM, SLURM's requeue signal and time limits: all ranks save and stop at the end of the same step."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, Timer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

from tests.helpers.ranks import launch_ranks
from tests.strategies.test_ptdp import DATA, PIPELINE, Model, loader, model, samples, trainer_for


class Signals(Callback):
    """Sends this process a signal at a moment."""

    def __init__(self, moment: str, step: int, number: int = signal.SIGTERM, times: int = 1) -> None:
        self.moment, self.step, self.number, self.times = moment, step, number, times

    def _at(self, moment: str, trainer: Any) -> None:
        if moment == self.moment and trainer.global_step >= self.step and not trainer.sanity_checking:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)
            self.moment = ""

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self._at("train start", trainer)

    def on_before_backward(self, trainer: Any, *_: Any) -> None:
        self._at("backward", trainer)

    def on_train_batch_end(self, *_: Any) -> None:
        if not self.moment:
            time.sleep(0.05)  # steps this small are over before the ranks have agreed

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        self._at("epoch end", trainer)

    def on_validation_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        if batch_idx == 1:
            self._at("validation", trainer)

    def on_test_batch_start(self, trainer: Any, *_: Any) -> None:
        self._at("test", trainer)


class Resumable(DataLoader):
    """Goes on behind the batches that the checkpoint has seen."""

    skip = seen = 0

    def __iter__(self) -> Iterator[Any]:
        skip, self.skip, self.seen = self.skip, 0, 0
        for batch in super().__iter__():
            self.seen += 1
            if self.seen > skip:
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen % len(self)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skip = state["seen"]


class Remembers(Model):
    def on_train_start(self) -> None:
        self.validated: list[tuple[int, float]] = []

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.validated.append((self.trainer.global_step, float(self.trainer.callback_metrics["val_loss"])))


def train(world_size: int, folder: Path, sends: list[Callback], layout: dict[str, Any], resume: str | None) -> Any:
    """Two epochs of five batches, with a validation behind the second and fourth: did it stop, and at which step?"""
    callbacks = [*sends, ModelCheckpoint(folder, save_top_k=0, save_weights_only=True)]
    options = {"max_epochs": 2, "val_check_interval": 2, "default_root_dir": folder, "num_sanity_val_steps": 1}
    trainer = trainer_for(world_size, layout, callbacks=callbacks, enable_checkpointing=True, **options)
    module = model(Remembers)
    batches: Any = Resumable(samples(40), batch_size=8)  # type: ignore[arg-type]
    stopped = False
    try:
        trainer.fit(module, batches, loader(32, seed=1), ckpt_path=resume)
    except SIGTERMException:
        stopped = True
    return stopped, trainer.global_step, module.losses, module.validated, trainer


CASES: dict[str, tuple[str, int, int, int]] = {
    # moment, step at which it comes, number of signals, fewest optimizer steps made then
    "in a step": ("backward", 2, 1, 3),
    "twice": ("backward", 2, 2, 3),
    "before the first step": ("train start", 0, 1, 0),
    "in a validation": ("validation", 4, 1, 4),
    "in the last step before a validation": ("backward", 1, 1, 2),
    "between epochs": ("epoch end", 5, 1, 5),
    "in the last step": ("backward", 9, 1, 10),
}


def _stop_and_resume(rank: int, world_size: int, folder: str, receiver: int) -> dict[str, Any]:
    handler = signal.getsignal(signal.SIGTERM)
    found: dict[str, Any] = {"all": train(world_size, Path(folder, "all"), [], PIPELINE, None)[:4]}
    for name, (moment, step, times, _) in CASES.items():
        place = Path(folder, name)
        sends: list[Callback] = [Signals(moment, step, times=times)] if rank == receiver else []
        before = train(world_size, place, sends, PIPELINE, None)
        after = train(world_size, place, [], PIPELINE, "last") if before[0] else (False, before[1], [], [], None)
        stepped = [t.fit_loop.epoch_loop._batches_that_stepped for t in (before[4], after[4]) if t is not None]
        found[name] = before[:4], after[:4], stepped, signal.getsignal(signal.SIGTERM) is handler
    return found


@pytest.mark.slow
def test_pl_21406_sigterm_stops_all_ranks_behind_the_same_step(tmp_path: Path) -> None:
    everyone = launch_ranks(_stop_and_resume, 2, str(tmp_path), 1)
    for rank, found in enumerate(everyone):
        _, steps, losses, validated = found["all"]
        assert (steps, [step for step, _ in validated]) == (10, [2, 4, 7, 9])
        for name, (_, _, _, fewest) in CASES.items():
            before, after, stepped, restored = found[name]
            where = f"{name}, rank {rank}"
            # the ranks agree while they work: it may take them a step or two
            assert before[0] == (before[1] < 10) and fewest <= before[1] <= fewest + 3, where
            assert before[:2] == everyone[0][name][0][:2], where
            assert restored, where
            assert before[2] + after[2] == losses, where
            assert sorted({*before[3], *after[3]}) == validated, where
            assert stepped[-1] == 10, where


# ------------------------------------------------------------------------------------------------ SLURM


def _requeued(rank: int, world_size: int, folder: str) -> Any:
    port = os.environ["MASTER_PORT"]
    for name in [name for name in os.environ if name.startswith(("TORCHELASTIC", "LOCAL_", "GROUP_", "ROLE_"))]:
        del os.environ[name]
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        del os.environ[name]
    size, here = str(world_size), str(rank)
    os.environ.update(
        SLURM_NTASKS=size, SLURM_NTASKS_PER_NODE=size, SLURM_NNODES="1", SLURM_PROCID=here, SLURM_LOCALID=here
    )
    os.environ.update(SLURM_NODEID="0", SLURM_JOB_ID="1234", SLURM_JOB_NAME="train", SLURM_NODELIST="localhost")
    os.environ.update(MASTER_PORT=port, PATH=f"{folder}/bin:{os.environ['PATH']}")
    sends: list[Callback] = [Signals("backward", 2, signal.SIGUSR1)] if rank == 0 else []
    first = train(world_size, Path(folder), sends, PIPELINE, None)[:4]
    second = train(world_size, Path(folder), [Signals("backward", 6)], PIPELINE, None)[:4]
    return first, second, train(world_size, Path(folder), [], PIPELINE, None)[:4]


@pytest.mark.slow
def test_pl_20806_a_time_limit_saves_and_requeues(tmp_path: Path) -> None:
    """SLURM's warning comes to rank 0 alone; a pre-emption to all, and SLURM requeues by itself."""
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    scontrol.chmod(0o755)
    expected = launch_ranks(_uninterrupted, 2, str(tmp_path / "all"))[0]
    for first, second, third in launch_ranks(_requeued, 2, str(tmp_path)):
        assert first[0] and 3 <= first[1] <= 6
        assert second[0] and 7 <= second[1] < 10
        assert third[:2] == (False, 10)
        assert first[2] + second[2] + third[2] == expected
    assert (tmp_path / "asked").read_text() == "requeue 1234\n"
    assert {path.name for path in tmp_path.glob("*.ckpt")} == {"hpc_ckpt_1.ckpt", "hpc_ckpt_2.ckpt"}


def _uninterrupted(rank: int, world_size: int, folder: str) -> list[float]:
    return train(world_size, Path(folder), [], PIPELINE, None)[2]


# ------------------------------------------------------------------------------------------------ other stops


class Differs(Model):
    """A loss that gets worse on one data rank only."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        worse = float(self.trainer.current_epoch) if self.global_rank == 1 else -float(self.trainer.current_epoch)
        self.log("own", worse, sync_dist=False)


def _other_stops(rank: int, world_size: int, folder: str) -> Any:
    found = []
    # nothing is saved without a ModelCheckpoint; batches accumulate; the signal comes to one rank
    sends: list[Callback] = [Signals("backward", 1)] if rank == 1 else []
    trainer = trainer_for(world_size, DATA, callbacks=sends, accumulate_grad_batches=2)
    with pytest.raises(SIGTERMException):
        trainer.fit(model(), loader(96))
    found.append(trainer.fit_loop.epoch_loop.batch_progress.current.completed == 2 * trainer.global_step < 12)
    # data ranks with different numbers of batches
    trainer = trainer_for(world_size, DATA, callbacks=[Signals("test", 0)] if rank == 0 else [])
    module = model(WithTest)
    with pytest.raises(SIGTERMException):
        trainer.test(module, loader(400 + 80 * rank), verbose=False)
    # one rank's clock is wrong
    timer = Timer(duration={"hours": 1})
    elapsed = iter([0.0, 0.0, 0.0, 4000.0] if rank == 0 else [4000.0] * 100)
    timer.time_elapsed = lambda *_: next(elapsed, 4000.0)  # type: ignore[method-assign]
    trainer = trainer_for(world_size, DATA, callbacks=[timer])
    trainer.fit(model(), loader())
    found.append(trainer.global_step)
    early = EarlyStopping("own", patience=1)
    trainer = trainer_for(world_size, DATA, callbacks=[early], max_epochs=9, num_sanity_val_steps=0)
    trainer.fit(model(Differs), loader(16), loader(16))
    found.append(trainer.current_epoch)
    return found


class WithTest(Model):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(0.01)
        self.log("test_loss", torch.zeros(()), sync_dist=True)


@pytest.mark.slow
def test_stops_are_agreed(tmp_path: Path) -> None:
    for found in launch_ranks(_other_stops, 2, str(tmp_path)):
        assert found == [True, 3, 2]
