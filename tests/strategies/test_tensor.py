"""Tensor parallelism in the Trainer: what happens around the steps."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lnn_lightning import PTDPStrategy
from lnn_lightning.parallel.errors import StepError
from tests.helpers.ranks import launch_ranks
from tests.helpers.reference import quiet_trainer, relative_error

WIDTH, CLASSES = 16, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(F.gelu(self.up(self.norm(x))))


class Model(pl.LightningModule):
    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(WIDTH, CLASSES)
        for block in self.blocks if frozen else ():
            for parameter in (*block.norm.parameters(), block.down.bias, block.scale):
                parameter.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch).flatten(0, 1), (batch.flatten() + 1) % CLASSES)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        logits = self(batch)
        self.log("val_loss", F.cross_entropy(logits.flatten(0, 1), (batch.flatten() + 1) % CLASSES))
        self.log("accuracy", (logits.argmax(-1) == (batch + 1) % CLASSES).double().mean())

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)


class Unfreeze(pl.Callback):
    """What was frozen when the strategy was set up learns from the third batch on."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> None:
        if index == 2:
            pl_module.requires_grad_(True)


def _loader() -> DataLoader:
    rng = torch.Generator().manual_seed(3)
    return DataLoader([torch.randint(0, CLASSES, (4, 6), generator=rng) for _ in range(5)], batch_size=None)  # type: ignore[arg-type]


def _trainer(world_size: int, layout: dict[str, Any] | None, **options: Any) -> pl.Trainer:
    strategy: Any = "auto" if layout is None else PTDPStrategy(**layout)
    return quiet_trainer(strategy, world_size, precision="64-true", max_epochs=1, **options)


def _state(trainer: pl.Trainer) -> dict[str, Tensor]:
    full = getattr(trainer.strategy, "full_state_dict", trainer.lightning_module.state_dict)
    return {name: value.clone() for name, value in full().items()}


def _unfreezes(rank: int, world_size: int, layout: dict[str, Any] | None) -> dict[str, Tensor]:
    torch.manual_seed(1)
    trainer = _trainer(world_size, layout, callbacks=[Unfreeze()])
    trainer.fit(Model(frozen=True), _loader())
    return _state(trainer)


LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_size": 2, "microbatches": 2},
    "sequence": {"tensor_parallel_size": 2, "microbatches": 2, "sequence_parallel": True},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_parameters_that_learn_later(name: str) -> None:
    expected = launch_ranks(_unfreezes, 1, None)[0]
    for state in launch_ranks(_unfreezes, 2, LAYOUTS[name]):
        for key, value in expected.items():
            assert relative_error(state[key], value) < 1e-9, key


def _all_loops(rank: int, world_size: int, layout: dict[str, Any] | None) -> Any:
    torch.manual_seed(1)
    module = Model()
    trainer = _trainer(world_size, layout)
    before = trainer.validate(module, _loader(), verbose=False)
    trainer.fit(module, _loader(), _loader())
    predictions = trainer.predict(module, _loader())
    return before, {k: float(v) for k, v in trainer.callback_metrics.items()}, predictions, _state(trainer)


@pytest.mark.parametrize("name", LAYOUTS)
def test_validate_fit_and_predict(name: str) -> None:
    """Evaluation comes first, and gives whole logits and metrics."""
    before, metrics, predictions, state = launch_ranks(_all_loops, 1, None)[0]
    for found in launch_ranks(_all_loops, 2, LAYOUTS[name]):
        assert found[0][0] == pytest.approx(before[0], rel=1e-9)
        assert found[1] == pytest.approx(metrics, rel=1e-9)
        for ours, theirs in zip(found[2], predictions, strict=True):
            assert type(ours) is Tensor
            assert relative_error(ours, theirs) < 1e-9
        for key, value in state.items():
            assert relative_error(found[3][key], value) < 1e-9, key


def _twice(rank: int, world_size: int) -> str:
    module = Model()
    _trainer(world_size, LAYOUTS["tensor"]).fit(module, _loader())
    with pytest.raises(StepError) as caught:
        _trainer(world_size, LAYOUTS["tensor"]).fit(module, _loader())
    return str(caught.value)


def test_a_divided_module_is_not_divided_again() -> None:
    assert all("already divided by another strategy" in text for text in launch_ranks(_twice, 2))
