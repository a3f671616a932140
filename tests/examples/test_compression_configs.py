"""The configurations with compressed gradients run as they stand, with a smaller model."""

import contextlib
from pathlib import Path

from lnn_lightning.cli import main
from tests.helpers.ranks import launch_ranks
from tests.test_cli import ROOT

GIVEN = [
    *(f"--model.{each}" for each in ("n_layer=2", "n_head=2", "n_embd=16", "block_size=16", "warmup_steps=1")),
    *("--data.block_size=16", "--data.batch_size=8"),
    *(f"--trainer.{each}" for each in ("max_steps=3", "limit_val_batches=1", "val_check_interval=2", "logger=false")),
    *("--trainer.enable_model_summary=false", "--trainer.callbacks.refresh_rate=0"),
]


HOOKS = {"gpt_compressed": "gradient_compression", "gpt_ddp_powersgd": "ddp_comm_hook"}


def fit(rank: int, ranks: int, folder: str) -> None:
    for name, hook in HOOKS.items():
        words = [f"--data.folder={folder}", f"--trainer.default_root_dir={folder}/{name}"]
        words += [f"--trainer.strategy.init_args.{hook}.init_args.rank=4"]  # so small a model has few columns
        with contextlib.redirect_stdout(None):
            main(["fit", "--config", str(ROOT / f"configs/{name}.yaml"), *GIVEN, *words])


def test_start(tmp_path: Path) -> None:
    for index in range(20):
        (tmp_path / f"{index}.py").write_text(f"print({index})\n" * 100)
    launch_ranks(fit, 4, str(tmp_path))
    assert len([*tmp_path.rglob("last.ckpt")]) == 2
