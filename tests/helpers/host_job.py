"""What runs on each host in tests of several: small trainings, and what happens with a disk that is not shared.

    python -m tests.helpers.host_job '{"nodes": 2, "devices": 1, "layouts": [...], "shared": ..., "private": ...}'

Each rank leaves its losses and the errors it has caught in `rank{n}.json` in the shared folder.
"""

import json
import os
import shutil
import socket
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

STEPS = 3
"""Batches of each epoch; every layout trains one and saves, the next goes on from there."""

BATCH = 8


class Tiny(pl.LightningModule):
    """Four blocks between two linears, in double precision."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(6, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(4))
        self.last = nn.Linear(16, 3)
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01, eps=1e-4)


def data(batches: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.stack([torch.randn(6, generator=generator, dtype=torch.float64) for _ in range(batches * BATCH)])
    return TensorDataset(x, (x.sum(dim=1) > 0).long() + (x[:, 0] > 1).long())


def reference(batches: int) -> list[float]:
    """The losses of the same training in plain PyTorch on one process."""
    module = Tiny().double()
    optimizer = module.configure_optimizers()
    losses = []
    for index, batch in enumerate(DataLoader(data(batches), batch_size=BATCH)):
        loss = module.training_step(batch, index)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Shares(pl.LightningDataModule):
    """Each data rank's share of the batches of one epoch."""

    def __init__(self, epoch: int) -> None:
        super().__init__()
        self.epoch = epoch

    def train_dataloader(self) -> DataLoader:
        strategy = self.trainer.strategy
        rank, size = strategy.data_parallel_rank, strategy.data_parallel_size
        step = BATCH // size
        x, y = data((self.epoch + 1) * STEPS).tensors
        starts = range(self.epoch * STEPS * BATCH + rank * step, len(x), BATCH)
        batches = [(x[at : at + step], y[at : at + step]) for at in starts]
        return DataLoader(batches, batch_size=None, collate_fn=_as_is)  # type: ignore[arg-type]


def _as_is(batch: Any) -> Any:
    return batch


def make_trainer(job: dict[str, Any], layout: dict[str, Any], **options: Any) -> pl.Trainer:
    from lnn_lightning import PTDPStrategy

    return pl.Trainer(
        accelerator="cpu",
        devices=job["devices"],
        num_nodes=job["nodes"],
        strategy=PTDPStrategy(**layout),
        precision="64-true",
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **{"logger": False, "enable_checkpointing": False, **options},
    )


def main(job: dict[str, Any]) -> None:
    from lnn_lightning.parallel import shared_folder

    shared_folder.PATIENCE = 0.5
    folder = Path(job["shared"])
    result: dict[str, Any] = {"host": socket.gethostname(), "losses": [], "errors": {}}
    previous = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for phase, layout in enumerate(job["layouts"]):
            trainer = make_trainer(job, layout, max_epochs=phase + 1)
            module = Tiny()
            trainer.fit(module, datamodule=Shares(phase), ckpt_path=previous)
            previous = str(folder / f"{job['name']}-{phase}.ckpt")
            trainer.save_checkpoint(previous)
            result["losses"].append(module.losses)
    result["warnings"] = [str(each.message) for each in caught]
    result["watched"] = trainer.strategy.watch.watched
    result["interface"] = os.environ.get("GLOO_SOCKET_IFNAME")
    if "private" in job:
        result["errors"] = on_a_private_disk(job, trainer, Path(previous or ""))
    (folder / f"{job['name']}-rank{trainer.global_rank}.json").write_text(json.dumps(result))


def on_a_private_disk(job: dict[str, Any], trainer: pl.Trainer, good: Path) -> dict[str, str]:
    """Saving to, resuming from and going on with the last one in a folder that each host has for itself."""
    private, layout = Path(job["private"]), job["layouts"][-1]
    strategy = trainer.strategy
    errors = {"save": _error_of(lambda: trainer.save_checkpoint(private / "saved" / "new.ckpt"))}
    errors["left"] = ", ".join(sorted(each.name for each in private.rglob("*")))
    if trainer.global_rank == 0:
        shutil.copytree(good, private / "last" / "last.ckpt")
    strategy.barrier()
    epochs = len(job["layouts"]) + 1

    def fit(path: str, **options: Any) -> None:
        other = make_trainer(job, layout, max_epochs=epochs, **options)
        other.fit(Tiny(), datamodule=Shares(len(job["layouts"])), ckpt_path=path)

    errors["load"] = _error_of(lambda: fit(str(private / "last" / "last.ckpt")))
    callback = pl.callbacks.ModelCheckpoint(private / "last", save_last=True)
    errors["last"] = _error_of(lambda: fit("last", enable_checkpointing=True, callbacks=[callback]))
    if trainer.global_rank == 1:
        shutil.copytree(good, private / "last" / "last.ckpt")
        with open(private / "last" / "last.ckpt" / "meta.pt", "r+b") as file:
            file.seek(-30, os.SEEK_END)
            file.write(b"other")
    strategy.barrier()
    errors["other"] = _error_of(lambda: fit(str(private / "last" / "last.ckpt")))
    return errors


def _error_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
