"""The configurations with experts run as they stand, with a smaller model; what they write can be read."""

import contextlib
import csv
import math
import sys
from pathlib import Path

import pytest

from examples import generate
from lnn_lightning.checkpoint import load_full_state_dict
from lnn_lightning.cli import main
from tests.helpers.ranks import launch_ranks
from tests.test_cli import ROOT

SMALL = ["n_layer=2", "n_head=2", "n_embd=16", "block_size=16", "warmup_steps=2", "lr=0.02"]
OWN = {"mixtral_experts": ["n_hidden=16", "n_expert=4"], "gpt_upcycled": []}
FEW = ["max_steps=20", "val_check_interval=10", "limit_val_batches=2", "log_every_n_steps=5"]
QUIET = ["enable_model_summary=false", "callbacks.refresh_rate=0"]


def fit(rank: int, ranks: int, folder: str) -> list[str]:
    """Runs the configurations one after the other; returns what went wrong."""
    failed = []
    for name, own in OWN.items():
        words = [f"--model.{each}" for each in SMALL + own]
        words += [f"--data.{each}" for each in (f"folder={folder}", "block_size=16", "batch_size=8")]
        words += [f"--trainer.{each}" for each in (*QUIET, *FEW, f"logger.init_args.save_dir={folder}/runs")]
        try:
            with contextlib.redirect_stdout(None):
                main(["fit", "--config", str(ROOT / f"configs/{name}.yaml"), *words])
        except Exception as error:  # noqa: BLE001 - told to the test
            failed.append(f"{name}: {error!r}")
    return failed


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for index in range(20):
        (folder / f"{index}.py").write_text(f"print({index})\n" * 100)
    for failed in launch_ranks(fit, 2, str(folder)):
        assert not failed
    return folder / "runs"


def logged(run: Path) -> dict[str, list[float]]:
    """The columns of a run's log, without what is empty."""
    with (run / "version_0/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) for row in rows if row[name]] for name in rows[0]}


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_learns(runs: Path, name: str) -> None:
    columns = logged(runs / name)
    first, second = columns["val_bpb"]
    assert second < first < 8 and math.isfinite(columns["train_loss"][-1])
    assert columns["train_loss"][-1] < columns["train_loss"][0]


@pytest.mark.slow
def test_load_of_the_experts_is_logged(runs: Path) -> None:
    for name, experts in ("gpt_upcycled", 8), ("mixtral_experts", 4):
        columns = logged(runs / name)
        assert len(columns["moe/load_max"]) == 4 and all(1 < value <= experts for value in columns["moe/load_max"])
        assert set(columns["moe/dropped"]) == {0}
        assert (runs / name / "version_0/moe_load.svg").is_file()
    assert all(0.005 < value < 0.08 for value in logged(runs / "gpt_upcycled")["moe/aux_loss"])


@pytest.mark.slow
def test_checkpoints_have_whole_experts(runs: Path) -> None:
    mixtral = load_full_state_dict(runs / "mixtral_experts/version_0/checkpoints/last.ckpt")
    assert mixtral["model.model.layers.1.mlp.experts.gate_up_proj"].shape == (4, 32, 16)
    upcycled = load_full_state_dict(runs / "gpt_upcycled/version_0/checkpoints/last.ckpt")
    assert "blocks.0.mlp.0.weight" in upcycled and "blocks.1.mlp.0.weight" not in upcycled
    assert upcycled["blocks.1.mlp.router.weight"].shape == (8, 16)
    experts = [upcycled[f"blocks.1.mlp.experts.{index}.0.weight"] for index in range(8)]
    assert len({expert.sum().item() for expert in experts}) == 8


@pytest.mark.slow
def test_upcycled_writes(runs: Path) -> None:
    model = generate.build(*generate.load(generate.find_checkpoint(runs / "gpt_upcycled")))
    assert len(generate.generate(model, b"print(", 8)) == 8


def test_says_what_the_mixtral_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "examples.mixtral", raising=False)
    with pytest.raises(ImportError, match="pip install transformers"):
        import examples.mixtral  # noqa: F401
