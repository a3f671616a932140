"""What compression does to the demo's loss, and the picture of it.

    python -m benchmarks.compression_curves train runs/compression            # every curve: an hour on two cores
    python -m benchmarks.compression_curves train runs/compression --only none "PowerSGD, rank 32"
    python -m benchmarks.compression_curves table runs/compression
    python -m benchmarks.compression_curves draw runs/compression docs/images/compression_curves.svg   # needs matplotlib

The training is that of configs/gpt_single.yaml (data, model, 600 steps, the batch of 32 in two halves), in the Trainer
with `PTDPStrategy(data_parallel_size=2, gradient_compression=...)`. Each contestant and seed leaves one JSON file.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lnn_lightning import PTDPStrategy
from lnn_lightning.communication import Cast, Compression
from tests.helpers.ranks import launch_ranks

STEPS, EVERY = 600, 50

CONTESTANTS: dict[str, Compression | None] = {
    "none": None,
    "Cast, bf16": Cast("bf16"),
}


class Curve(pl.Callback):
    """Validation loss by step."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.losses: list[float] = []

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.steps.append(trainer.global_step)
            self.losses.append(float(trainer.callback_metrics["val_loss"]))


def train(
    rank: int, world_size: int, compression: Compression | None, seed: int, steps: int, every: int
) -> dict[str, Any]:
    """One training of the demo; runs on each rank."""
    from examples.gpt import ByteGPT
    from examples.text import TextFolder

    pl.seed_everything(seed, verbose=False)
    curve = Curve()
    strategy = PTDPStrategy(data_parallel_size=world_size, gradient_compression=compression)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy,
        max_steps=steps,
        val_check_interval=every,
        check_val_every_n_epoch=None,
        limit_val_batches=16,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[curve],
    )
    module = ByteGPT(n_layer=4, n_head=4, n_embd=128, block_size=128, lr=0.004, warmup_steps=50)
    start = time.perf_counter()
    trainer.fit(module, datamodule=TextFolder(block_size=128, batch_size=32 // world_size))
    traffic = strategy._compressors.traffic if strategy._compressors is not None else None
    return {
        "steps": curve.steps,
        "losses": curve.losses,
        "seconds": time.perf_counter() - start,
        "bytes": traffic.payload if traffic is not None else None,
        "plain": traffic.plain if traffic is not None else None,
    }


def run(name: str, compression: Compression | None, seed: int, folder: Path, steps: int, every: int) -> dict[str, Any]:
    """Trains and keeps the curve."""
    found = launch_ranks(train, 2, compression, seed, steps, every, timeout=3600)[0]
    found |= {"name": name, "seed": seed, "settings": repr(compression)}
    folder.mkdir(parents=True, exist_ok=True)
    slug = "".join(c if c.isalnum() else "_" for c in name)
    (folder / f"{slug}-{seed}-{steps}.json").write_text(json.dumps(found))
    return found
