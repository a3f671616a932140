"""Torn checkpoints, disks that fill up, saves in the background, processes killed at any moment."""

import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO, XLACheckpointIO
from torch import Tensor, nn

from lnn_lightning import PTDPStrategy
from lnn_lightning.checkpoint import CheckpointError, load_full_state_dict, load_metadata
from lnn_lightning.checkpoint import distributed as writing
from lnn_lightning.checkpoint.manifest import MANIFEST, verify
from tests.helpers.ranks import RanksFailed, launch_ranks
from tests.helpers.reference import quiet_trainer
from tests.strategies.test_positions import Model, Resumable
from tests.strategies.test_ptdp import assert_same_state

PIPELINE: dict[str, Any] = {"pipeline_parallel_size": 2}


class Seeded(Model):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()

    def on_fit_start(self) -> None:
        torch.manual_seed(17)  # where it is resumed, the state of the generators comes from the checkpoint


def train(
    world_size: int,
    layout: dict[str, Any],
    folder: str,
    path: str | None = None,
    steps: int = 6,
    callbacks: list[pl.Callback] | None = None,
    **options: Any,
) -> tuple[pl.Trainer, Seeded]:
    torch.manual_seed(3)
    random.seed(4)
    module = Seeded()
    if callbacks is None:
        callbacks = [ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1, save_last=True)]
    trainer = quiet_trainer(
        PTDPStrategy(microbatches=2, **layout),
        world_size,
        max_steps=steps,
        callbacks=callbacks,
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in callbacks),
        use_distributed_sampler=False,
        **{"max_epochs": -1, **options},
    )
    rank = trainer.global_rank if layout.get("data_parallel_size", 1) > 1 else 0
    trainer.fit(module, Resumable(rank), ckpt_path=path)
    return trainer, module


# ------------------------------------------------------------------------------------------------ torn


def _damaged(rank: int, world_size: int, folder: str) -> Any:
    train(world_size, PIPELINE, folder)
    said = {}
    if rank == 0:
        for name in ("step=3.ckpt", "step=6.ckpt", "last.ckpt"):
            file = Path(folder, name, "__0_0.distcp")
            file.write_bytes(file.read_bytes()[:-7])
    for name in ("step=3.ckpt", "step=2.ckpt"):
        try:
            train(world_size, PIPELINE, folder, f"{folder}/{name}", steps=3, callbacks=[])
        except CheckpointError as error:
            said[name] = str(error)
    trainer, module = train(world_size, PIPELINE, folder, "last", steps=8)
    return said, sorted(module.seen), trainer.global_step


def test_a_torn_checkpoint_is_named_and_the_last_good_one_taken(tmp_path: Path) -> None:
    results = launch_ranks(_damaged, 2, str(tmp_path))
    for said, seen, step in results:
        assert set(said) == {"step=3.ckpt"}
        assert "__0_0.distcp is damaged" in said["step=3.ckpt"]
        assert seen == [6, 7, 8], "step=5.ckpt is the newest that is whole"
        assert step == 8


def _cut_off(rank: int, world_size: int, folder: str) -> Any:
    train(world_size, PIPELINE, folder, steps=4)
    if rank == 0:
        Path(folder, "last.ckpt").rename(Path(folder, ".last.ckpt.replaced"))
    said = ""
    try:
        train(world_size, PIPELINE, folder, "last", steps=6)
    except CheckpointError as error:
        said = str(error)
    return said, sorted(train(world_size, PIPELINE, folder, "last", steps=6)[1].seen)


def test_a_replacement_that_was_cut_off_does_not_begin_a_run_anew(tmp_path: Path) -> None:
    """Where the file system cannot exchange names, a kill leaves no last checkpoint for Lightning to find."""
    for said, seen in launch_ranks(_cut_off, 2, str(tmp_path)):
        assert "last.ckpt was being replaced" in said and "start the run once more" in said
        assert seen == [5, 6]


def _link(rank: int, world_size: int, folder: str) -> Any:
    options: dict[str, Any] = {"save_top_k": 2, "monitor": "step", "mode": "max", "save_last": "link"}
    callback = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, **options)
    train(world_size, PIPELINE, folder, callbacks=[callback])
    linked = os.path.realpath(f"{folder}/last.ckpt")
    _, module = train(world_size, PIPELINE, folder, "last", steps=8)
    return os.path.basename(linked), sorted(module.seen)


def test_the_last_checkpoint_may_be_a_link(tmp_path: Path) -> None:
    for linked, seen in launch_ranks(_link, 2, str(tmp_path)):
        assert linked == "step=6.ckpt" and seen == [7, 8]


# ------------------------------------------------------------------------------------------------ disks


@contextmanager
def small_disk(path: Path, kilobytes: int) -> Iterator[None]:
    """A file system of a few kilobytes."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def _fills_up(rank: int, world_size: int, folder: str, fill: str) -> Any:
    trainer, module = train(world_size, PIPELINE, folder, callbacks=[])
    trainer.save_checkpoint(f"{folder}/good.ckpt")
    good = trainer.strategy.full_state_dict()
    if rank == 0 and fill == "full":
        free = shutil.disk_usage(folder).free
        Path(folder, "filler").write_bytes(b"x" * (free - 8192))
    if rank == 0 and fill == "read-only":
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    trainer.strategy.barrier()
    said = []
    for name in ("good.ckpt", "other.ckpt"):
        try:
            trainer.save_checkpoint(f"{folder}/{name}")
        except CheckpointError as error:
            said.append(str(error))
    return said, good


@pytest.mark.parametrize("fill", ["full", "read-only"])
def test_a_disk_without_room(fill: str, tmp_path: Path) -> None:
    """The error says so on all ranks, and what was good is good."""
    disk = tmp_path / "disk"
    with small_disk(disk, 300):
        for said, good in launch_ranks(_fills_up, 2, str(disk), fill):
            assert len(said) == 2
            for text in said:
                assert ("No space left" if fill == "full" else "Read-only") in text and str(disk) in text
                assert "Rank " in text and "untouched" in text
            verify(disk / "good.ckpt")
            assert_same_state(load_full_state_dict(disk / "good.ckpt"), good, 0.0)
        assert {each.name for each in disk.iterdir()} - {"filler"} == {"good.ckpt"}


def _vanishes(rank: int, world_size: int, folder: str) -> str:
    class Vanish(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.global_step == 2 and trainer.is_global_zero:
                shutil.rmtree(folder)
                Path(folder).write_text("a file now")
            trainer.strategy.barrier()

    checkpoint = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    try:
        train(world_size, PIPELINE, folder, callbacks=[Vanish(), checkpoint])
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_folder_that_vanishes(tmp_path: Path) -> None:
    for said in launch_ranks(_vanishes, 2, str(tmp_path / "run")):
        assert "could not be written" in said and str(tmp_path / "run") in said


# ------------------------------------------------------------------------------------------------ Lightning


def test_load_from_checkpoint(tmp_path: Path) -> None:
    """The user's own class reads a folder as it reads a file."""
    launch_ranks(_named, 2, str(tmp_path))
    folder = tmp_path / "last.ckpt"
    module = Seeded.load_from_checkpoint(folder, map_location="cpu")
    assert module.hparams["width"] == 8
    assert_same_state(module.state_dict(), load_full_state_dict(folder), 0.0)
    file = next(folder.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=file.name):
        Seeded.load_from_checkpoint(folder)
    plain = tmp_path / "plain.ckpt"
    torch.save({"state_dict": module.state_dict(), "pytorch-lightning_version": "2.6.0"}, plain)
    assert_same_state(Seeded.load_from_checkpoint(plain).state_dict(), module.state_dict(), 0.0)


def _named(rank: int, world_size: int, folder: str) -> None:
    train(world_size, {"data_parallel_size": 2, "zero_stage": 3}, folder)


def _plugin(rank: int, world_size: int, folder: str, plugin: Any) -> int:
    trainer, _ = train(world_size, {}, folder, plugins=[plugin])
    return trainer.global_step


def test_a_checkpoint_plugin_that_would_never_be_asked_is_refused(tmp_path: Path) -> None:
    assert launch_ranks(_plugin, 1, str(tmp_path / "a"), TorchCheckpointIO()) == [6]
    assert launch_ranks(_plugin, 1, str(tmp_path / "b"), AsyncCheckpointIO()) == [6]
    with pytest.raises(RanksFailed, match="XLACheckpointIO would never be asked"):
        launch_ranks(_plugin, 1, str(tmp_path / "c"), object.__new__(XLACheckpointIO))


class Holds(Seeded):
    def __init__(self, loss: Any, folder: Path) -> None:
        super().__init__()
        self.save_hyperparameters()


def _hyperparameter(rank: int, world_size: int, folder: str, loss: Any) -> str:
    torch.manual_seed(3)
    random.seed(4)
    checkpoint = ModelCheckpoint(folder, every_n_train_steps=1)
    trainer = quiet_trainer(
        PTDPStrategy(**PIPELINE), world_size, max_steps=1, callbacks=[checkpoint], enable_checkpointing=True
    )
    try:
        trainer.fit(Holds(loss, Path(folder)), Resumable(0))
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_hyperparameter_that_could_not_be_loaded_is_told_at_the_start(tmp_path: Path) -> None:
    for said in launch_ranks(_hyperparameter, 2, str(tmp_path), nn.CrossEntropyLoss()):
        assert "hyper-parameter 'loss' of Holds is a CrossEntropyLoss" in said and "ignore=['loss']" in said
    assert os.listdir(tmp_path) == []
    assert launch_ranks(_hyperparameter, 2, str(tmp_path), 0.5) == ["", ""]
    assert os.listdir(tmp_path) != []


def _weights_only(rank: int, world_size: int, folder: str) -> str:
    trainer, _ = train(world_size, PIPELINE, folder, callbacks=[])
    trainer.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
    try:
        train(world_size, PIPELINE, folder, f"{folder}/weights.ckpt", callbacks=[])
    except KeyError as error:
        return str(error)
    return ""


def test_training_does_not_go_on_from_weights_alone(tmp_path: Path) -> None:
    for said in launch_ranks(_weights_only, 2, str(tmp_path)):
        assert "checkpoint contains only the model" in said


class _Odd:
    """Something that no checkpoint brings back without running code."""


def _holds(rank: int, world_size: int, folder: str, async_save: bool) -> str:
    class Holder(pl.Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"odd": _Odd() if rank == 0 else 1}

    try:
        train(world_size, {**PIPELINE, "async_save": async_save}, folder, callbacks=[Holder()])[0].save_checkpoint(
            f"{folder}/odd.ckpt"
        )
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("async_save", [False, True])
def test_what_could_not_be_loaded_is_not_saved(async_save: bool, tmp_path: Path) -> None:
    """Better told at the first save than at the restart."""
    for said in launch_ranks(_holds, 2, str(tmp_path), async_save):
        assert "Rank 0 says" in said and "_Odd" in said and "Save plain values" in said
    assert os.listdir(tmp_path) == []


# ------------------------------------------------------------------------------------------------ in the background


def _in_background(rank: int, world_size: int, folder: str) -> Any:
    """Training goes on while the disk is slow; what is kept is what was there when it was saved."""
    real, began, ended = writing.write_manifest, [], []

    def slow(*args: Any) -> None:
        began.append(trainer_step())
        time.sleep(0.3)
        ended.append(trainer_step())
        real(*args)

    class Watch(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
            time.sleep(0.05)
            states[trainer.global_step] = trainer.strategy.full_state_dict()
            box.append(trainer)

    box: list[pl.Trainer] = []
    states: dict[int, dict[str, Tensor]] = {}

    def trainer_step() -> int:
        return box[-1].global_step

    writing.write_manifest = slow
    checkpoint = ModelCheckpoint(folder, "{step}", every_n_train_steps=4, save_top_k=1, monitor="step", mode="max")
    train(world_size, {**PIPELINE, "async_save": True}, folder, steps=11, callbacks=[Watch(), checkpoint])
    return began, ended, sorted(os.listdir(folder)), {step: states[step] for step in (4, 8)}


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    results = launch_ranks(_in_background, 2, str(tmp_path))
    began, ended, names, states = results[0]
    assert len(began) == 2 and all(end > begin for begin, end in zip(began, ended, strict=True)), (began, ended)
    assert names == ["step=8.ckpt"], "the one it stands in for is gone, behind it"
    assert_same_state(load_full_state_dict(tmp_path / "step=8.ckpt"), states[8], 0.0)
    assert load_metadata(tmp_path / "step=8.ckpt")["global_step"] == 8


def _fails_in_background(rank: int, world_size: int, folder: str) -> Any:
    real = writing.write_manifest

    def fail(path: Path, *args: Any) -> None:
        if "step=4" in str(path):
            raise OSError(28, "No space left on device")
        real(path, *args)

    writing.write_manifest = fail
    said = ""
    checkpoint = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=1, monitor="step", mode="max")
    try:
        train(world_size, {**PIPELINE, "async_save": True}, folder, callbacks=[checkpoint])
    except CheckpointError as error:
        said = str(error)
    return said


def test_an_error_in_the_background_reaches_everyone(tmp_path: Path) -> None:
    """At the next save at the latest, and the checkpoint before it stays."""
    for said in launch_ranks(_fails_in_background, 2, str(tmp_path)):
        assert "No space left" in said and "step=4.ckpt" in said
    assert os.listdir(tmp_path) == ["step=2.ckpt"]


# ------------------------------------------------------------------------------------------------ killed

STEPS = 24
LAYOUTS: list[dict[str, Any]] = [
    {"pipeline_parallel_size": 2},
    {"data_parallel_size": 2, "zero_stage": 3},
    {"tensor_parallel_size": 2, "async_save": True},
    {"data_parallel_size": 2, "zero_stage": 1, "async_save": True},
]


def _until_killed(
    rank: int, world_size: int, layout: dict[str, Any], folder: str, record: str, victim: int, delay: float
) -> dict[str, Tensor]:
    class Clock(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, *args: Any) -> None:
            if rank == victim:
                timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL))
                timer.daemon = True
                timer.start()

        def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, *args: Any) -> None:
            """Before the checkpoint: a step that is in one is in the record."""
            if trainer.is_global_zero:
                with open(record, "a") as file:
                    file.write(f"{trainer.global_step} {float(outputs['loss']).hex()}\n")

    options: dict[str, Any] = {"save_top_k": 2, "monitor": "step", "mode": "max", "save_last": True}
    kept = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, **options)
    trainer, _ = train(world_size, layout, folder, "last", STEPS, [Clock(), kept])
    return trainer.strategy.full_state_dict()


def _losses(record: Path) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for line in record.read_text().splitlines() if record.exists() else []:
        step, loss = line.split()
        found.setdefault(int(step), set()).add(loss)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_killed_at_any_moment_and_started_again(layout: dict[str, Any], tmp_path: Path) -> None:
    """Thirteen kills: every run that goes on sees the losses of the run that nobody killed, to the last bit."""
    dice = random.Random(str(layout))
    reference = tmp_path / "reference.txt"
    expected = launch_ranks(_until_killed, 2, layout, str(tmp_path / "reference"), str(reference), -1, 0.0)[0]
    losses = _losses(reference)
    assert set(losses) == set(range(1, STEPS + 1))
    kills, run = 0, 0
    while kills < 13:
        run += 1
        folder, record = tmp_path / f"run{run}", tmp_path / f"run{run}.txt"
        while True:
            victim, delay = (dice.randrange(2), dice.uniform(0, 0.9)) if kills < 13 else (-1, 0.0)
            try:
                ended = launch_ranks(_until_killed, 2, layout, str(folder), str(record), victim, delay)[0]
            except RanksFailed as failed:
                if not any("exit code -9" in text for text in failed.tracebacks.values()):
                    raise
                kills += 1
                for each in folder.glob("*.ckpt"):
                    if (each / MANIFEST).exists() or each.name == "last.ckpt":
                        verify(each)
                        load_full_state_dict(each)
                continue
            break
        assert _losses(record) == losses, f"run {run}"
        assert_same_state(ended, expected, 0.0)
