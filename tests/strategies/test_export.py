"""Checkpoints of divided runs, exported and used where this package is not."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from lnn_lightning import PTDPStrategy
from lnn_lightning.checkpoint.export import export
from lnn_lightning.precision import MeshMixedPrecision
from tests.checkpoint import plain
from tests.helpers.ranks import launch_ranks

ROOT = Path(__file__).parents[2]


def half_way(rank: int, world_size: int, layout: dict[str, Any], folder: str) -> dict[str, Any]:
    seen = plain.Seen()
    trainer = plain.trainer(PTDPStrategy(**layout), world_size, seen, plain.HALF, folder)
    module = plain.module()
    trainer.fit(module, datamodule=plain.Batches())
    return plain.outcome(seen, trainer.strategy.full_state_dict())


class Scales(pl.Callback):
    """The loss scale of each step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.seen.append(trainer.precision_plugin.scaler.get_scale())  # type: ignore[attr-defined]


def scaled(rank: int, world_size: int, ours: bool, steps: int, folder: str | None, path: str | None) -> list[float]:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
    kind = MeshMixedPrecision if ours else MixedPrecision
    seen, strategy = Scales(), PTDPStrategy(data_parallel_size=world_size) if ours else "auto"
    plugin = kind("16-mixed", device="cpu", scaler=scaler)
    trainer = plain.trainer(strategy, world_size, seen, steps, folder, plugins=[plugin], precision=None)
    torch.manual_seed(1)
    trainer.fit(plain.Module(), datamodule=plain.Batches(), ckpt_path=path)
    return seen.seen


def test_the_loss_scale_goes_out_and_in(tmp_path: Path) -> None:
    for ours in (True, False):
        folder = tmp_path / str(ours)
        scales = launch_ranks(scaled, 1, ours, plain.HALF, str(folder), None)[0]
        file = folder / "step=3.ckpt"
        if ours:
            export(file, file := folder / "plain.ckpt")
        assert scales == [64.0, 128.0, 256.0]
        rest = launch_ranks(scaled, 1, not ours, plain.STEPS, None, str(file))[0]
        assert rest == [512.0, 1024.0, 2048.0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "microbatches": 2},
    ],
)
def test_an_exported_run_goes_on_without_this_package(layout: dict[str, Any], tmp_path: Path) -> None:
    exported, results = tmp_path / "plain.ckpt", tmp_path / "results.pt"
    first = launch_ranks(half_way, 4, layout, str(tmp_path))[0]
    export(tmp_path / "step=3.ckpt", exported)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.checkpoint.plain", str(exported), str(results)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    found = torch.load(results, weights_only=True)
    whole, rest = found["whole"], found["rest"]
    assert first["losses"] + rest["losses"] == pytest.approx(whole["losses"], rel=1e-9)
    assert first["rates"] + rest["rates"] == whole["rates"]
    assert rest["ends"] == whole["ends"] == 1
    assert rest["state"].keys() == whole["state"].keys() == found["loaded"].keys()
    for key, value in whole["state"].items():
        assert torch.allclose(rest["state"][key], value, rtol=1e-9, atol=1e-12), key
        loaded = found["loaded"][key]  # `load_from_checkpoint` makes a module in single precision
        assert torch.equal(loaded, first["state"][key].to(loaded.dtype)), key
    assert found["tested"][0]["test_loss"] < first["losses"][0]
