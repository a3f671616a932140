"""A resumed run is the run that was not interrupted: generators, dataloaders, wherever it was saved."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from lnn_lightning import PTDPStrategy
from lnn_lightning.strategies.positions import random_state, restore_random_state
from tests.helpers.ranks import launch_ranks
from tests.helpers.reference import quiet_trainer

BATCHES = 4


class Noisy(Dataset):
    """Augments with all three generators, in this process."""

    def __len__(self) -> int:
        return 4 * BATCHES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        noise = torch.randn(6) + random.random() + float(np.random.rand())
        return torch.full((6,), float(index)) / 16 + noise, index % 3


class Resumable:
    """A dataloader that knows where it is, as torchdata's ``StatefulDataLoader`` does; every data rank has its own."""

    def __init__(self, seed: int) -> None:
        self.dataset, self.seed, self.epoch, self.position = Noisy(), seed, 0, 0
        self.sampler = self

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Any]:
        if self.position >= BATCHES:
            self.position = 0
        order = torch.randperm(16, generator=torch.Generator().manual_seed(100 * self.seed + self.epoch)).view(4, 4)
        while self.position < BATCHES:
            self.position += 1
            yield default_collate([self.dataset[int(index)] for index in order[self.position - 1]])

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed, "epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seed, self.epoch, self.position = state["seed"], state["epoch"], state["position"]


class Ahead(DataLoader):
    """Asks its sampler when its iterator is made, as a loader with workers does, which would take seconds here."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return iter(list(super().__iter__()))


class Model(pl.LightningModule):
    epochs: ClassVar[list[tuple[int, int]]] = []

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)
        self.third, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.seen: dict[int, float] = {}

    def on_train_epoch_start(self) -> None:
        self.epochs.append((self.current_epoch, self.global_step))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = F.dropout(torch.tanh(self.first(x)), 0.3)
        x = F.dropout(torch.tanh(self.third(torch.tanh(self.second(x)))), 0.3)
        return F.cross_entropy(self.head(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.head(self.first(batch[0])), batch[1]), sync_dist=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen[self.global_step] = float(outputs["loss"])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01)


def _run(
    world_size: int,
    layout: dict[str, Any],
    folder: str | None,
    path: str | None,
    stateful: bool = True,
    validate: bool = True,
    limits: dict[str, int] | None = None,
    ahead: bool = False,
    saved: str | None = None,
) -> tuple[dict[int, float], dict[str, Tensor]]:
    torch.manual_seed(3)
    random.seed(4)
    np.random.seed(5)
    model = Model()
    callbacks: list[pl.Callback] = []
    if folder is not None:
        batches = ModelCheckpoint(
            folder, "b{step}", save_top_k=-1, every_n_train_steps=1, save_on_train_epoch_end=False
        )
        epochs = ModelCheckpoint(folder, "e{step}", save_top_k=-1, every_n_epochs=1, save_on_train_epoch_end=True)
        validated = ModelCheckpoint(folder, "v{step}", save_top_k=-1, save_on_train_epoch_end=False, monitor="val_loss")
        callbacks = [batches, epochs, validated]
    trainer = quiet_trainer(
        PTDPStrategy(microbatches=2, **layout),
        world_size,
        callbacks=callbacks,
        enable_checkpointing=folder is not None,
        use_distributed_sampler=ahead,
        **(limits or {"max_epochs": 3}),
    )
    share = layout.get("data_parallel_size", 1)
    loader: Any = Resumable(trainer.global_rank if share > 1 else 0)
    if not stateful:
        loader = (Ahead if ahead else DataLoader)(Noisy(), batch_size=4 // share, shuffle=True)
    trainer.fit(model, loader, DataLoader(Noisy(), batch_size=8) if validate else None, ckpt_path=path)
    if saved is not None:
        trainer.save_checkpoint(saved)
    return model.seen, trainer.strategy.full_state_dict()


def _interrupted(
    rank: int, world_size: int, layout: dict[str, Any], folder: str, names: list[str], **options: Any
) -> Any:
    whole = _run(world_size, layout, folder, None, **options)
    return whole, {name: _run(world_size, layout, None, f"{folder}/{name}.ckpt", **options) for name in names}


def _interrupted_steps(*args: Any) -> Any:
    return _interrupted(*args, limits={"max_steps": 12, "max_epochs": -1})


def _interrupted_unvalidated(*args: Any) -> Any:
    return _interrupted(*args, validate=False)


@pytest.mark.parametrize("run", [_interrupted, _interrupted_steps])
@pytest.mark.parametrize("layout", [{"pipeline_parallel_size": 2}, {"data_parallel_size": 2, "zero_stage": 2}], ids=str)
def test_resumed_anywhere_is_uninterrupted(layout: dict[str, Any], run: Any, tmp_path: Path) -> None:
    """In the middle of an epoch, behind its validation and at its end."""
    names = [f"bstep={step}" for step in (1, 3, 6)] + ["estep=4", "estep=8", "vstep=4"]
    _check(launch_ranks(run, 2, layout, str(tmp_path), names))


def test_resumed_behind_the_last_batch_of_an_epoch(tmp_path: Path) -> None:
    """Lightning goes on with the next epoch then, without the validation that was due: so there is none here."""
    names = ["bstep=4", "bstep=8", "estep=4"]
    _check(launch_ranks(_interrupted_unvalidated, 2, {"pipeline_parallel_size": 2}, str(tmp_path), names))


def _chained(rank: int, world_size: int, folder: str, chain: list[str], limits: dict[str, int]) -> Any:
    layout, path, results = {"pipeline_parallel_size": 2}, None, []
    for index, name in enumerate([*chain, ""]):
        Model.epochs.clear()
        losses, _ = _run(world_size, layout, f"{folder}/{index}", path, validate=False, limits=limits)
        results.append((losses, Model.epochs[:]))
        path = f"{folder}/{index}/{name}.ckpt"
    return results


@pytest.mark.parametrize("limits", [{"max_steps": 16, "max_epochs": -1}, {"max_epochs": 4}], ids=str)
def test_resumed_again_and_again(limits: dict[str, int], tmp_path: Path) -> None:
    """Behind last batches and at ends of epochs, each time from what a resumed run saved; epochs are counted right."""
    chain = ["bstep=4", "estep=8", "bstep=10", "estep=12"]
    for results in launch_ranks(_chained, 2, str(tmp_path), chain, limits):
        whole, begun = results[0]
        assert begun == [(0, 0), (1, 4), (2, 8), (3, 12)]
        for start, (losses, epochs) in zip([0, 4, 8, 10, 12], results, strict=True):
            assert losses == {step: loss for step, loss in whole.items() if step > start}, start
            assert epochs == [each for each in begun if each[1] >= start], start


def _check(results: Any) -> None:
    for (losses, state), resumed in results:
        for name, (found, ended) in resumed.items():
            step = int(name.partition("=")[2])
            assert found == {key: loss for key, loss in losses.items() if key > step}, name
            for key, value in state.items():
                assert torch.equal(ended[key], value), (name, key)


def _shuffled(rank: int, world_size: int, layout: dict[str, Any], folder: str, ahead: bool) -> Any:
    options: dict[str, Any] = {"stateful": False, "validate": False, "ahead": ahead}
    longer, shorter = ({"max_steps": steps, "max_epochs": -1} for steps in (2 * BATCHES, BATCHES))
    whole = _run(world_size, layout, folder, None, limits=longer, **options)
    _run(world_size, layout, None, None, limits=shorter, saved=f"{folder}/step=4.ckpt", **options)
    names = ["estep=4", "bstep=4", "step=4"]
    paths = {name: f"{folder}/{name}.ckpt" for name in names}
    return whole, {name: _run(world_size, layout, None, path, limits=longer, **options) for name, path in paths.items()}


@pytest.mark.parametrize("ahead", [False, True], ids=["order of the generators", "order of the epoch, read ahead"])
def test_a_plain_shuffling_loader_goes_on_between_epochs(ahead: bool, tmp_path: Path) -> None:
    """Its order comes from the generators, which are where they were, or from the epoch that begins."""
    layout = {"data_parallel_size": 2, "zero_stage": 1} if ahead else {"pipeline_parallel_size": 2}
    _check(launch_ranks(_shuffled, 2, layout, str(tmp_path), ahead))


def _cut_short(rank: int, world_size: int, layout: dict[str, Any], folder: str) -> Any:
    longer, shorter = ({"max_steps": steps, "max_epochs": -1} for steps in (10, 6))
    whole = _run(world_size, layout, None, None, limits=longer)
    _run(world_size, layout, folder, None, limits=shorter, saved=f"{folder}/step=6.ckpt")
    resumed, begun = {}, {}
    for name in ("step=6", "estep=6"):
        Model.epochs.clear()
        resumed[name] = _run(world_size, layout, None, f"{folder}/{name}.ckpt", limits=longer)
        begun[name] = Model.epochs[:]
    assert begun == {name: [(2, 8)] for name in resumed}
    return whole, resumed


@pytest.mark.parametrize("stage", [1, 3])
def test_an_epoch_that_was_cut_short_goes_on(stage: int, tmp_path: Path) -> None:
    """Saved when ``max_steps`` had ended the run in the middle of an epoch, of which the rest is still to be read."""
    _check(launch_ranks(_cut_short, 2, {"data_parallel_size": 2, "zero_stage": stage}, str(tmp_path)))


def _other_size(rank: int, world_size: int, path: str) -> Any:
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found, _ = _run(world_size, {"data_parallel_size": world_size}, None, path)
    return sorted(found), [str(each.message) for each in caught if "dataloaders of 2 data ranks" in str(each.message)]


def test_another_number_of_data_ranks_is_told_that_the_epoch_starts_anew(tmp_path: Path) -> None:
    launch_ranks(_interrupted, 2, {"data_parallel_size": 2}, str(tmp_path), [])
    steps, said = launch_ranks(_other_size, 1, f"{tmp_path}/bstep=6.ckpt")[0]
    assert steps[0] == 7
    assert said, "the loaders of the two ranks were not in the same state"


def test_generators_go_on() -> None:
    state = random_state()
    drawn = torch.rand(3), random.gauss(0, 1), np.random.normal(size=3)
    restore_random_state(state)
    again = torch.rand(3), random.gauss(0, 1), np.random.normal(size=3)
    assert torch.equal(drawn[0], again[0]) and drawn[1] == again[1] and np.array_equal(drawn[2], again[2])
