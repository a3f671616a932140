"""Parameters, gradients and activations in files, under every layout: the same bits as in memory."""

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lnn_lightning import PTDPStrategy
from lnn_lightning.memory.offload import Offload
from lnn_lightning.memory.offload.activations import ActivationKeeper
from lnn_lightning.memory.offload.gradients import GradientPages
from lnn_lightning.memory.offload.parameters import ParameterPages
from lnn_lightning.parallel.data.shards import local_of
from lnn_lightning.parallel.errors import LayoutError
from lnn_lightning.parallel.step.standin import is_stand_in
from tests.helpers.ranks import launch_ranks
from tests.helpers.reference import quiet_trainer

WIDTH, BATCH, STEPS = 64, 8, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Model(pl.LightningModule):
    """A tied table, blocks, and a large parameter that glue uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, WIDTH)
        self.position = nn.Parameter(torch.randn(64, WIDTH))
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.table.weight

    def _loss(self, batch: Tensor) -> Tensor:
        x = self.table(batch) + self.position[: batch.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(x[:, :-1])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self._loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self._loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2, eps=1e-4, fused=True)  # as it is offloaded


class Looks(pl.Callback):
    """What a callback sees of parameters and gradients, wherever it looks."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def _look(self, module: pl.LightningModule) -> None:
        for parameter in module.parameters():
            if not is_stand_in(parameter):
                self.seen.append(local_of(parameter).detach().double().sum())
                if parameter.grad is not None:
                    self.seen.append(local_of(parameter.grad).double().sum())

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self._look(module)

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self._look(module)

    def on_validation_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self._look(module)


def fit(offload: Offload | None, layout: dict[str, Any], steps: int, folder: str, resume: str | None = None) -> Any:
    looks = Looks()
    strategy = PTDPStrategy(**layout, offload=offload)
    trainer = quiet_trainer(
        strategy,
        int(os.environ["WORLD_SIZE"]),
        max_steps=steps,
        max_epochs=-1,
        accumulate_grad_batches=2,
        gradient_clip_val=0.1,
        val_check_interval=2,
        check_val_every_n_epoch=None,
        limit_val_batches=1,
        callbacks=[looks],
    )
    torch.manual_seed(1)
    tokens = torch.randint(50, (4 * BATCH, 12))
    module = Model()
    share = layout.get("data_parallel_size", 1)  # an epoch has four batches, so that a run of two steps ends with it
    loader = DataLoader(tokens[: 4 * BATCH // share], batch_size=BATCH // share)
    trainer.fit(module, loader, DataLoader(tokens[:BATCH], batch_size=BATCH), ckpt_path=resume)
    trainer.save_checkpoint(folder)
    kept = [e for e in strategy.engine.extensions if isinstance(e, ParameterPages | GradientPages | ActivationKeeper)]
    return strategy.full_state_dict(), looks.seen, trainer.callback_metrics["val"], kept


def compare(rank: int, world_size: int, layout: dict[str, Any], what: tuple[str, ...], folder: str) -> None:
    plain = fit(None, layout, STEPS, f"{folder}/plain")
    offload = Offload(folder, what)
    moved = fit(offload, layout, STEPS, f"{folder}/moved")
    kinds = {ParameterPages: "parameters", GradientPages: "gradients", ActivationKeeper: "activations"}
    assert {kinds[type(each)] for each in moved[3]} == set(what) - {"optimizer"}
    for each in moved[3]:
        if isinstance(each, ParameterPages):
            assert each.nbytes > 4 * WIDTH * WIDTH
        elif isinstance(each, GradientPages):
            assert each._places
        else:
            assert each.moved_bytes > 0
    fit(offload, layout, 2, f"{folder}/half")
    resumed = fit(offload, layout, STEPS, f"{folder}/resumed", f"{folder}/half")
    elsewhere = fit(None, layout, STEPS, f"{folder}/elsewhere", f"{folder}/half")
    for which, other in {"moved": moved, "resumed": resumed, "elsewhere": elsewhere}.items():
        for name, value in plain[0].items():
            assert torch.equal(value, other[0][name]), f"{which}: {name}"
        assert torch.equal(plain[2], other[2]), which
    assert all(torch.equal(one, two) for one, two in zip(plain[1], moved[1], strict=True))


ALL = ("parameters", "gradients", "activations")
LAYOUTS: dict[str, tuple[int, dict[str, Any], tuple[str, ...]]] = {
    "one process": (1, {"microbatches": 2}, ALL),
    "with its optimizer": (1, {"microbatches": 2}, ("optimizer", *ALL)),
    "recomputation": (1, {"microbatches": 2, "recompute": "full"}, ALL),
    "zero bubble": (2, {"pipeline_parallel_size": 2, "schedule": "zero_bubble", "microbatches": 4}, ALL),
    "tensor": (2, {"tensor_parallel_size": 2}, ALL),
    "zero 1": (2, {"data_parallel_size": 2, "zero_stage": 1}, ("optimizer", "parameters", "activations")),
    "zero 3": (2, {"data_parallel_size": 2, "zero_stage": 3, "microbatches": 2}, ("optimizer", *ALL)),
    "zero 3, recomputation": (2, {"data_parallel_size": 2, "zero_stage": 3, "recompute": "full"}, ALL),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_same_bits_as_in_memory(name: str, tmp_path: Path) -> None:
    world_size, layout, what = LAYOUTS[name]
    launch_ranks(compare, world_size, layout, what, str(tmp_path))
    assert not list(tmp_path.glob("*.bin"))


def fails(rank: int, world_size: int, folder: str) -> str:
    if rank == 1:
        folder += "/missing"
    try:
        fit(Offload(folder, ("parameters",)), {"pipeline_parallel_size": 2}, 1, folder)
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_folder_that_one_rank_lacks_stops_all(tmp_path: Path) -> None:
    here, there = launch_ranks(fails, 2, str(tmp_path))
    assert "does not exist on this host" in there and "OffloadError" in there
    assert "does not exist on this host" in here


def refused(rank: int, world_size: int, folder: str) -> str:
    with pytest.raises(LayoutError) as caught:
        fit(Offload(folder, ("gradients",)), {"data_parallel_size": 2, "zero_stage": 1}, 1, folder)
    return str(caught.value)


def test_gradients_that_are_averaged_whole_are_refused(tmp_path: Path) -> None:
    assert "Set `zero_stage=2` or 3" in launch_ranks(refused, 2, str(tmp_path))[0]
