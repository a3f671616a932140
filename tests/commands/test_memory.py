"""`lnn-lightning memory`."""

import re
from pathlib import Path

import pytest

from lnn_lightning.commands.memory import memory

ROOT = Path(__file__).parents[2]


def words(folder: Path) -> list[str]:
    for index in range(20):
        (folder / f"{index}.py").write_text(f"print({index})\n" * 100)
    model = [f"--model.{each}" for each in ("n_layer=4", "n_head=2", "n_embd=16", "block_size=16", "warmup_steps=1")]
    data = [f"--data.{each}" for each in (f"folder={folder}", "block_size=16", "batch_size=4")]
    return ["--config", str(ROOT / "configs/gpt_pipeline.yaml"), *model, *data]


def test_a_cluster_on_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is started: 64 ranks are predicted here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT)
    layout = ["data_parallel_size=auto", "tensor_parallel_size=2", "zero_stage=1"]
    options = [f"--trainer.strategy.init_args.{each}" for each in layout]
    assert memory([*words(tmp_path), *options, "--trainer.devices=8", "--trainer.num_nodes=8"]) == 0
    said = capsys.readouterr().out
    rows = [line.split() for line in said.splitlines() if re.match(r"[01]  ", line)]
    assert {row[0] for row in rows} == {"0", "1"} and rows[-1][1].endswith("15"), said
    assert "Not measured: the configuration has several machines." in said
    assert not list(tmp_path.glob("runs*")) and not list(tmp_path.glob("lightning_logs*"))


def test_other_strategies_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT)
    assert memory([*words(tmp_path), "--trainer.strategy=ddp"]) == 1
    assert "The memory of a DDPStrategy is not known here" in capsys.readouterr().err


@pytest.mark.slow
def test_measured_beside_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    devices = ["--trainer.devices=2", "--trainer.strategy.init_args.data_parallel_size=1"]
    assert memory([*words(tmp_path), *devices]) == 0
    said = capsys.readouterr().out
    rows = [line for line in said.splitlines() if re.match(r"[01]  ", line)]
    assert len(rows) == 2, said
    for row in rows:
        pairs = re.findall(r"([\d.]+) / ([\d.]+)", row)
        assert len(pairs) == 5 and all(expected == found for expected, found in pairs[:4]), row
