"""What a user's hooks make of a checkpoint counts, as it does on one process."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lnn_lightning import PTDPStrategy
from lnn_lightning.checkpoint import load_full_state_dict
from tests.helpers.ranks import RanksFailed, launch_ranks
from tests.helpers.reference import quiet_trainer

LAYOUTS: dict[str, dict[str, Any]] = {
    "pipeline": {"pipeline_parallel_size": 2, "data_parallel_size": 1},
    "tensor": {"tensor_parallel_size": 2, "data_parallel_size": 1},
    "zero3": {"data_parallel_size": 2, "zero_stage": 3},
}


class Signed(nn.Linear):
    """Stored with the other sign before its second version."""

    _version = 2

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata.get("version", 1) < 2 and f"{prefix}weight" in state:
            state[f"{prefix}weight"] = -state[f"{prefix}weight"]
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 16), Signed(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(4, 4)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return (self.head(self.blocks(batch[0])) ** 2).mean()

    def validation_step(self, batch: list[Tensor]) -> None:
        self.training_step(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


class NewHead(Model):
    strict_loading = False

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for key in ("head.weight", "head.bias"):
            del checkpoint["state_dict"][key]


class OtherNames(Model):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {f"net.{key}": value for key, value in checkpoint["state_dict"].items()}
        checkpoint["state_dict"]["mine"] = torch.arange(3)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        assert state.pop("mine").tolist() == [0, 1, 2]
        for key in [key for key in state if key.startswith("net.")]:
            state[key.removeprefix("net.")] = state.pop(key)


class Longer(Model):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def _trainer(layout: dict[str, Any]) -> pl.Trainer:
    return quiet_trainer(PTDPStrategy(microbatches=1, **layout), 2, precision="64-true", max_epochs=1)


def _data() -> DataLoader:
    return DataLoader(TensorDataset(torch.linspace(-1, 1, 32, dtype=torch.float64).view(8, 4)), batch_size=4)


def _save(rank: int, world_size: int, layout: dict[str, Any], kind: type[Model], path: str) -> dict[str, Tensor]:
    torch.manual_seed(1)
    trainer = _trainer(layout)
    trainer.fit(kind(), _data())
    trainer.save_checkpoint(path)
    return trainer.strategy.full_state_dict()


def _load(rank: int, world_size: int, layout: dict[str, Any], kind: type[Model], path: str) -> Any:
    torch.manual_seed(2)
    trainer, module = _trainer(layout), kind()
    before = {key: value.detach().double() for key, value in module.state_dict().items()}
    trainer.validate(module, _data(), ckpt_path=path, verbose=False)
    return before, trainer.strategy.full_state_dict()


@pytest.mark.parametrize("name", LAYOUTS)
def test_hooks_leave_out_and_rename(name: str, tmp_path: Path) -> None:
    plain, renamed = str(tmp_path / "plain.ckpt"), str(tmp_path / "renamed.ckpt")
    state = launch_ranks(_save, 2, LAYOUTS[name], Model, plain)[0]
    for before, loaded in launch_ranks(_load, 2, LAYOUTS[name], NewHead, plain):
        for key, value in loaded.items():
            assert torch.equal(value, (before if key.startswith("head.") else state)[key]), key
    state = launch_ranks(_save, 2, LAYOUTS[name], OtherNames, renamed)[0]
    stored = load_full_state_dict(renamed)
    assert all(torch.equal(stored[f"net.{key}"], value) for key, value in state.items())
    for _, loaded in launch_ranks(_load, 2, LAYOUTS[name], OtherNames, renamed):
        assert all(torch.equal(loaded[key], value) for key, value in state.items())


def test_versions_of_modules_are_kept(tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    state = launch_ranks(_save, 2, LAYOUTS["pipeline"], Model, path)[0]
    for _, loaded in launch_ranks(_load, 2, LAYOUTS["tensor"], Model, path):
        assert all(torch.equal(loaded[key], value) for key, value in state.items())
    loaded = Model.load_from_checkpoint(path).state_dict()
    assert all(torch.equal(loaded[key].double(), value.float().double()) for key, value in state.items())


def test_what_does_not_fit_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    launch_ranks(_save, 2, LAYOUTS["pipeline"], Model, path)
    with pytest.raises(RanksFailed) as caught:
        launch_ranks(_load, 2, LAYOUTS["pipeline"], Longer, path)
    assert all("does not fit Longer" in text for text in caught.value.tracebacks.values())


def _save_over_a_folder(rank: int, world_size: int, layout: dict[str, Any], path: str) -> None:
    trainer = _trainer(layout)
    trainer.fit(Model(), _data())
    trainer.save_checkpoint(path)


def test_a_folder_of_other_files_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RanksFailed, match="is a folder of other files"):
        launch_ranks(_save_over_a_folder, 2, LAYOUTS["zero3"], str(tmp_path))
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_saved_after_training_is_complete_at_once(tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    for same in launch_ranks(_save_in_background, 2, path):
        assert same


def _save_in_background(rank: int, world_size: int, path: str) -> bool:
    trainer = _trainer({**LAYOUTS["pipeline"], "async_save": True})
    trainer.fit(Model(), _data())
    trainer.save_checkpoint(path)
    return load_full_state_dict(path).keys() == trainer.strategy.full_state_dict().keys()
