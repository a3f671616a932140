"""A module and its training on one process, in plain Lightning: nothing here knows of lnn_lightning."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

WIDTH, CLASSES, BATCH, STEPS, HALF = 8, 5, 8, 6, 3


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Module(pl.LightningModule):
    """Two groups of parameters in another order than the module's, a frozen layer, a scalar, a buffer, tied weights."""

    def __init__(self, width: int = WIDTH, lr: float = 0.02) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(CLASSES, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.head = nn.Linear(width, CLASSES, bias=False)
        self.head.weight = self.embed.weight
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("scale", torch.full((), 0.9))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.frozen(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.temperature * self.scale

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, labels = batch
        loss = F.cross_entropy(self(tokens).flatten(0, 1), labels.flatten())
        self.log("train_loss", loss)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        tokens, labels = batch
        self.log("test_loss", F.cross_entropy(self(tokens).flatten(0, 1), labels.flatten()))

    def configure_optimizers(self) -> Any:
        vectors = [p for p in self.parameters() if p.ndim < 2]
        matrices = [p for p in self.parameters() if p.ndim >= 2]
        groups = [{"params": vectors, "weight_decay": 0.0}, {"params": matrices, "weight_decay": 0.1}]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams["lr"], eps=1e-4)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Loader:
    """A dataloader that knows how far it was read, as torchdata's StatefulDataLoader does."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.position = batches, 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        start, self.position = self.position % len(self.batches), self.position % len(self.batches)
        for batch in self.batches[start:]:
            self.position += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Batches(pl.LightningDataModule):
    """Each data rank's share of the same batches."""

    def train_dataloader(self) -> Loader:
        strategy = self.trainer.strategy
        rank, size = getattr(strategy, "data_parallel_rank", 0), getattr(strategy, "data_parallel_size", 1)
        rng = torch.Generator().manual_seed(0)
        batches = [torch.randint(0, CLASSES, (BATCH, 6), generator=rng) for _ in range(STEPS)]
        shares = [batch.chunk(size)[rank] for batch in batches]
        return Loader([(tokens, (tokens * 2 + 1) % CLASSES) for tokens in shares])

    test_dataloader = train_dataloader


class Seen(pl.Callback):
    """Losses and learning rates; its state is in the checkpoint."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.ends = 0

    def state_dict(self) -> dict[str, Any]:
        return {"ends": self.ends}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.ends = state_dict["ends"]

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.ends += 1


def trainer(
    strategy: Any, devices: int, seen: pl.Callback, steps: int, folder: str | None = None, **options: Any
) -> pl.Trainer:
    """Given a folder, it gets a checkpoint half-way: `step=3.ckpt`."""
    saving = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=HALF)
    return pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        logger=False,
        enable_checkpointing=folder is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[seen, saving] if folder is not None else [seen],
        max_steps=steps,
        **({"precision": "64-true"} | options),
    )


def module() -> Module:
    torch.manual_seed(1)
    return Module().double()  # Lightning loads a checkpoint before it converts the module


def outcome(seen: Seen, state: dict[str, Tensor]) -> dict[str, Any]:
    return {
        "losses": seen.losses,
        "rates": seen.rates,
        "ends": seen.ends,
        "state": {key: value.clone() for key, value in state.items()},
    }


def run(ckpt_path: str | None) -> dict[str, Any]:
    """All steps on one process, or those that are left behind a checkpoint."""
    seen, model = Seen(), module()
    runner = trainer("auto", 1, seen, STEPS)
    runner.fit(model, datamodule=Batches(), ckpt_path=ckpt_path)
    return outcome(seen, model.state_dict())


if __name__ == "__main__":
    sys.modules["lnn_lightning"] = None  # type: ignore[assignment]  # an import of it fails
    exported, results = sys.argv[1:]
    tested = trainer("auto", 1, Seen(), STEPS).test(module(), datamodule=Batches(), ckpt_path=exported, verbose=False)
    loaded = Module.load_from_checkpoint(exported, weights_only=True)
    torch.save({"whole": run(None), "rest": run(exported), "tested": tested, "loaded": loaded.state_dict()}, results)
    assert not any(name.startswith("lnn_lightning.") for name in sys.modules), Path(__file__)
