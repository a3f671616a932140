"""Checkpoints of divided runs, exported and used where this package is not."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lnn_lightning import PTDPStrategy
from lnn_lightning.checkpoint.export import export
from tests.checkpoint import plain
from tests.helpers.ranks import launch_ranks

ROOT = Path(__file__).parents[2]


def half_way(rank: int, world_size: int, layout: dict[str, Any], folder: str) -> dict[str, Any]:
    seen = plain.Seen()
    trainer = plain.trainer(PTDPStrategy(**layout), world_size, seen, plain.HALF, folder)
    module = plain.module()
    trainer.fit(module, datamodule=plain.Batches())
    return plain.outcome(seen, trainer.strategy.full_state_dict())


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
