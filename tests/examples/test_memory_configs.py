"""The configurations of memory techniques run as they stand, with a smaller model, a few processes for all of them."""

import contextlib
from pathlib import Path

import pytest
import torch

from examples.cnn import DigitVGG, DrawnDigits, draw
from lnn_lightning.cli import main
from tests.helpers.ranks import launch_ranks
from tests.test_cli import ROOT

GPT = [f"--model.{each}" for each in ("n_layer=4", "n_head=2", "n_embd=16", "block_size=16", "warmup_steps=1")]
FEW = [f"--trainer.{each}" for each in ("max_steps=2", "limit_val_batches=1", "logger=false")]
ON_TWO = ["gpt_recompute", "gpt_adafactor", "gpt_bf16_master"]


def fit(name: str, folder: str, *words: str) -> None:
    quiet = [
        f"--trainer.{each}=false" for each in ("enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    ]
    given = GPT + [f"--data.{each}" for each in (f"folder={folder}", "block_size=16", "batch_size=8")]
    given = given if name.startswith("gpt") else []
    root = [f"--trainer.default_root_dir={folder}"]
    main(["fit", "--config", str(ROOT / f"configs/{name}.yaml"), *given, *FEW, *quiet, *root, *words])


def on_two(rank: int, ranks: int, folder: str) -> list[str]:
    """Runs the configurations for two devices one after the other; returns what went wrong."""
    failed = []
    for name in ON_TWO:
        try:
            with contextlib.redirect_stdout(None):
                fit(name, folder)
        except Exception as error:  # noqa: BLE001 - told to the test
            failed.append(f"{name}: {error!r}")
    return failed


@pytest.fixture
def text(tmp_path: Path) -> Path:
    for index in range(20):
        (tmp_path / f"{index}.py").write_text(f"print({index})\n" * 100)
    return tmp_path


def test_two_devices(text: Path) -> None:
    for failed in launch_ranks(on_two, 2, str(text)):
        assert not failed


@pytest.mark.parametrize("name", ["gpt_offload", "cnn_gist"])
def test_one_device(name: str, text: Path) -> None:
    (text / "offload").mkdir()
    places = {
        "gpt_offload": [f"--trainer.strategy.init_args.target={text / 'offload'}"],
        "cnn_gist": ["--model.width=2", "--data.samples=64", "--data.batch_size=16"],
    }
    launch_ranks(alone, 1, name, str(text), places[name])


def alone(rank: int, ranks: int, name: str, folder: str, words: list[str]) -> None:
    fit(name, folder, *words)


def test_digits_can_be_told_apart() -> None:
    images, digits = draw(256, seed=0).tensors
    again, _ = draw(256, seed=0).tensors
    assert torch.equal(images, again) and set(digits.tolist()) == set(range(10))
    means = torch.stack([images[digits == digit].mean(0).flatten() for digit in range(10)])
    guesses = torch.cdist(images.flatten(1), means).argmin(1)
    assert (guesses == digits).float().mean() > 0.5
    assert DigitVGG(width=2)(images[:2]).shape == (2, 10)
    assert len(DrawnDigits(samples=64, batch_size=16).train_dataloader()) == 4
