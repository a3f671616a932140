"""Peeking at a batch: what it is, and that the run is the same as without."""

import gc
import itertools
import multiprocessing
import queue
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Subset

from lnn_lightning.strategies.peek import peek_batch
from tests.helpers.ranks import launch_ranks

QUIET: dict[str, Any] = dict(
    logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu", enable_checkpointing=False
)
NOTHING = object()


class Peeking(SingleDeviceStrategy):
    def setup(self, trainer: pl.Trainer) -> None:
        before = random_states()
        self.peeked = peek_batch(trainer)
        assert same_states(before, random_states()), "random states are put back"
        super().setup(trainer)


def random_states() -> Any:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def same_states(one: Any, other: Any) -> bool:
    numpy = all(np.array_equal(a, b) for a, b in zip(one[2], other[2], strict=True))
    return torch.equal(one[0], other[0]) and one[1] == other[1] and numpy


def described(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return (str(batch.dtype), batch.tolist())
    if isinstance(batch, dict):
        return {key: described(value) for key, value in batch.items()}
    return [described(value) for value in batch] if isinstance(batch, (list, tuple)) else batch


class Model(pl.LightningModule):
    """Notes every batch it is given, and a number from each random generator."""

    def __init__(self, **hooks: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.log_: list[Any] = []
        self._hooks_given = hooks
        self.calls: list[str] = []

    def _note(self, kind: str, batch: Any) -> None:
        draws = (torch.rand(()).item(), random.random(), np.random.rand())
        self.log_.append((kind, described(batch), draws))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self._note("train", batch)
        return self.weight.sum()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._note(f"val {dataloader_idx}", batch)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._note(f"test {dataloader_idx}", batch)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self._note(f"predict {dataloader_idx}", batch)
        return 0

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


# ---------------------------------------------------------------------------------------------- data


class Numbers(Dataset):
    def __init__(self, length: int = 10) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.length:
            raise IndexError
        return index


class Noisy(Numbers):
    """Draws from everything, global and its own; counts, and opens something when first asked."""

    def __init__(self) -> None:
        super().__init__()
        self.torch, self.python = torch.Generator().manual_seed(1), random.Random(2)
        self.numpy, self.old = np.random.default_rng(3), np.random.RandomState(4)
        self.count, self.seen, self.opened = 0, [], None

    def __getitem__(self, index: int) -> Any:
        self.opened = self.opened or [self.count]
        self.count += 1
        self.seen.append(index)
        own = (torch.rand((), generator=self.torch).item(), self.python.random(), self.numpy.random(), self.old.rand())
        draws = (torch.rand(()).item(), random.random(), np.random.rand())
        return torch.tensor([index, self.count, len(self.seen), self.opened[0], *own, *draws], dtype=torch.float64)


class Counting(BatchSampler):
    """A batch sampler that goes on where it stopped."""

    def __init__(self, sampler: Any, batch_size: int = 2, drop_last: bool = False) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self.epoch = 0

    def __iter__(self) -> Iterator[list[int]]:
        self.epoch += 1
        yield from ([(3 * self.epoch + i) % 10, i] for i in range(4))


class Again(IterableDataset):
    """Can be read again; each time in another order."""

    def __init__(self, how: str = "global", length: int | None = None) -> None:
        self.how, self.length, self.epoch = how, length, 0
        self.rng = random.Random(5)

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        order = list(range(10))
        if self.how == "global":
            random.shuffle(order)
        elif self.how == "own":
            self.rng.shuffle(order)
        else:
            random.Random(self.epoch).shuffle(order)
        yield from order


class Eager(Again):
    """As `Again`, but decides when `iter` is called."""

    def __iter__(self) -> Iterator[int]:
        return iter(list(super().__iter__()))


class Sized(Again):
    def __len__(self) -> int:
        return 10


class Stream(IterableDataset):
    """What is read is gone."""

    def __init__(self, length: int = 23) -> None:
        self.items = iter(range(length))

    def __iter__(self) -> Iterator[int]:
        return self.items


class SizedStream(Stream):
    def __len__(self) -> int:
        return 12


class StreamBehind(Stream):
    """A new generator each time, that reads what there is once."""

    def __iter__(self) -> Iterator[int]:
        for item in self.items:
            yield item + random.randint(0, 100)


class Queue(IterableDataset):
    def __init__(self) -> None:
        self.queue: queue.Queue[int] = queue.Queue()
        for number in range(23):
            self.queue.put(number)

    def __iter__(self) -> Iterator[int]:
        while not self.queue.empty():
            yield self.queue.get()


def behind_a_closure() -> IterableDataset:
    items = iter(range(23))

    class Closed(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            yield from items

    return Closed()


def behind_a_call() -> IterableDataset:
    """Nothing shows that it can be read once only."""

    class Remote:
        __slots__ = ("at",)

        def __init__(self) -> None:
            self.at = 0

        def read(self) -> int:
            self.at += 1
            return self.at

    remote = Remote()

    class Reader(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            while remote.at < 20:
                yield remote.read()

    return Reader()


class Batches:
    """A loader of the user's own: begins anew with each `iter`, in another order each epoch."""

    def __init__(self, sized: bool = False) -> None:
        self.epoch, self.at, self.order = 0, 0, list(range(5))

    def __iter__(self) -> Any:
        self.epoch += 1
        self.at = 0
        random.Random(self.epoch).shuffle(self.order)
        return self

    def __next__(self) -> torch.Tensor:
        if self.at == len(self.order):
            raise StopIteration
        self.at += 1
        return torch.tensor([self.order[self.at - 1], self.epoch])


class SizedBatches(Batches):
    def __len__(self) -> int:
        return 5


class Popping:
    """Empties a list of its own."""

    def __init__(self) -> None:
        self.items = [torch.tensor(i) for i in range(7)]

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.items:
            yield self.items.pop(0)


class Endless:
    def __iter__(self) -> Iterator[torch.Tensor]:
        number = 0
        while True:
            yield torch.tensor(number)
            number += 1


class Stateful:
    """A loader that can be stored."""

    def __init__(self, items: Any = None) -> None:
        self.at, self.resumed, self.items = 0, False, items

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.at, self.resumed = (self.at if self.resumed else 0), False
        while self.at < 6:
            self.at += 1
            yield torch.tensor(self.at)

    def __len__(self) -> int:
        return 6

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.resumed = state["at"], True


class Transforming(DataLoader):
    """Counts its epochs and changes what comes out."""

    epoch = 0

    def __iter__(self) -> Any:
        self.epoch += 1
        for batch in super().__iter__():
            yield batch * 10 + self.epoch


class Skipping(DataLoader):
    def __iter__(self) -> Any:
        batches = iter(super().__iter__())
        next(batches, None)
        yield from batches


def generator(length: int = 5) -> Iterator[torch.Tensor]:
    for number in range(length):
        yield torch.tensor(number)


def noisy_generator() -> Iterator[torch.Tensor]:
    for _ in range(5):
        yield torch.tensor([random.random(), torch.rand(()).item()])


def seeded(number: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(number)


# ---------------------------------------------------------------------------------------------- with and without


def both(run: Callable[[SingleDeviceStrategy], Any]) -> tuple[Any, Any]:
    """What `run` returns with a strategy that peeks and with one that does not."""
    results = []
    for strategy in (Peeking("cpu"), SingleDeviceStrategy("cpu")):
        pl.seed_everything(0, verbose=False)
        results.append((run(strategy), getattr(strategy, "peeked", NOTHING)))
    (with_peek, peeked), (without, _) = results
    return (with_peek, without), peeked


LOADERS: dict[str, Callable[[], Any]] = {
    "sequential": lambda: DataLoader(Numbers(), 3),
    "shuffled": lambda: DataLoader(Numbers(), 3, shuffle=True),
    "shuffled by a generator": lambda: DataLoader(Numbers(), 3, shuffle=True, generator=seeded()),
    "sampler with a generator": lambda: DataLoader(Numbers(), 3, sampler=RandomSampler(Numbers(), generator=seeded())),
    "noisy": lambda: DataLoader(Noisy(), 3, shuffle=True),
    "noisy within": lambda: DataLoader(Subset(Noisy(), [3, 1, 4, 5]), 3, shuffle=True),
    "batch sampler with a state": lambda: DataLoader(Numbers(), batch_sampler=Counting(RandomSampler(Numbers()))),
    "sampler that is a stream": lambda: DataLoader(Numbers(), 2, sampler=iter([3, 1, 4, 1, 5, 9, 2])),
    "no batching": lambda: DataLoader(Numbers(), batch_size=None),
    "collate with a state": lambda: DataLoader(Numbers(), 3, collate_fn=collate_with_a_state()),
    "two workers": lambda: DataLoader(Numbers(), 3, shuffle=True, num_workers=2),
    "persistent workers": lambda: DataLoader(Numbers(), 3, shuffle=True, num_workers=1, persistent_workers=True),
    "needs its worker": lambda: DataLoader(Unready(), 3, shuffle=True, num_workers=1, worker_init_fn=make_ready),
    "subclass": lambda: Transforming(Numbers(), 3, shuffle=True),
    "dict": lambda: {"a": DataLoader(Numbers(), 3, shuffle=True), "b": [DataLoader(Numbers(4), 1)]},
    "dict with streams": lambda: {"a": generator(), "b": DataLoader(Stream(), 2), "c": DataLoader(Numbers(), 3)},
    "combined min": lambda: CombinedLoader([DataLoader(Numbers(), 3), DataLoader(Numbers(4), 1)], "min_size"),
    "combined max": lambda: CombinedLoader({"a": DataLoader(Numbers(), 3), "b": generator(2)}, "max_size"),
    "combined cycle": lambda: CombinedLoader([DataLoader(Numbers(), 3), DataLoader(Stream(4), 1)], "max_size_cycle"),
    "iterable, global shuffle": lambda: DataLoader(Again("global"), 3),
    "iterable, own shuffle": lambda: DataLoader(Again("own"), 3),
    "iterable, shuffle by epoch": lambda: DataLoader(Again("epoch"), 3),
    "iterable, eager": lambda: DataLoader(Eager("epoch"), 3),
    "iterable, eager, own": lambda: DataLoader(Eager("own"), 3),
    "iterable, eager, global": lambda: DataLoader(Eager("global"), 3),
    "iterable with a length": lambda: DataLoader(Sized("global"), 3),
    "iterable with a worker": lambda: DataLoader(Again("own"), 3, num_workers=1),
    "iterable subclass": lambda: Transforming(Again("global"), 3),
    "iterable skipping": lambda: Skipping(Stream(), 3),
    "stream": lambda: DataLoader(Stream(), 3),
    "stream with a length": lambda: DataLoader(SizedStream(), 3),
    "stream with a worker": lambda: DataLoader(Stream(), 3, num_workers=1),
    "stream, persistent worker": lambda: DataLoader(Stream(), 3, num_workers=1, persistent_workers=True),
    "stream behind a generator": lambda: DataLoader(StreamBehind(), 3),
    "stream in a subclass": lambda: Transforming(StreamBehind(), 3),
    "stream unbatched": lambda: DataLoader(StreamBehind(), batch_size=None),
    "stream behind a closure": lambda: DataLoader(behind_a_closure(), 3),
    "stream behind a call": lambda: DataLoader(behind_a_call(), 3),
    "queue": lambda: DataLoader(Queue(), 3),
    "generator": generator,
    "noisy generator": noisy_generator,
    "zip": lambda: zip(generator(), generator(9), strict=False),
    "file": lambda: map(torch.tensor, map(len, itertools.islice(open(__file__), 6))),
    "own loader": Batches,
    "own loader with a length": SizedBatches,
    "own loader that empties a list": Popping,
    "own loader, stored": Stateful,
    "range": lambda: range(4),
}


class Unready(Numbers):
    ready = False

    def __getitem__(self, index: int) -> Any:
        if not self.ready:
            raise RuntimeError("not in a worker")
        return super().__getitem__(index)


def make_ready(worker: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None
    info.dataset.ready = True


def collate_with_a_state() -> Callable[[Any], Any]:
    calls: list[int] = []

    def collate(items: Any) -> torch.Tensor:
        calls.append(1)
        return torch.tensor([len(calls), *items])

    return collate


@pytest.mark.parametrize("name", LOADERS)
def test_fit_sees_the_same_data(name: str) -> None:
    def run(strategy: SingleDeviceStrategy) -> Any:
        model = Model()
        trainer = pl.Trainer(max_epochs=2, strategy=strategy, **QUIET)
        trainer.fit(model, LOADERS[name](), DataLoader(Noisy(), 4))
        return model.log_

    (with_peek, without), peeked = both(run)
    assert with_peek == without and len([entry for entry in without if entry[0] == "train"]) >= 2
    if (
        "sampler that is" not in name
        and "worker" not in name
        and name not in ("own loader", "own loader with a length")
    ):
        first = next(batch for kind, batch, _ in without if kind == "train")
        assert described(peeked) == first, "it is the loop's first batch"
    assert peeked is not None and not multiprocessing.active_children()


@pytest.mark.parametrize("name", [name for name in LOADERS if not name.startswith(("combined", "dict"))])
@pytest.mark.parametrize("kind", ["validate", "test", "predict"])
def test_evaluation_sees_the_same_data(name: str, kind: str) -> None:
    if kind == "predict" and name in ("batch sampler with a state", "sampler that is a stream", "range"):
        pytest.skip("Lightning's predict loop cannot take it")

    def run(strategy: SingleDeviceStrategy) -> Any:
        model = Model()
        trainer = pl.Trainer(strategy=strategy, **QUIET)
        loader = LOADERS[name]()
        for _ in range(2):
            getattr(trainer, kind)(model, loader, **({} if kind == "predict" else {"verbose": False}))
        return model.log_

    (with_peek, without), _ = both(run)
    assert with_peek == without and without


def test_evaluation_over_several_loaders() -> None:
    for loaders in (
        lambda: [DataLoader(Numbers(0), 2), generator(), DataLoader(Stream(), 2)],
        lambda: [iter(()), DataLoader(Stream(0), 2), DataLoader(StreamBehind(), 3)],
        lambda: CombinedLoader([generator(), DataLoader(Numbers(), 3)], "min_size"),
        lambda: [DataLoader(Stream(), 2), DataLoader(Stream(), 2)],
    ):

        def run(strategy: SingleDeviceStrategy, loaders: Any = loaders) -> Any:
            model = Model()
            pl.Trainer(strategy=strategy, **QUIET).validate(model, loaders(), verbose=False)
            return model.log_

        (with_peek, without), peeked = both(run)
        assert with_peek == without and described(peeked) == without[0][1]


# ---------------------------------------------------------------------------------------------- hooks


@dataclass
class Hooks:
    """A data module whose hooks count their calls."""

    train: Callable[[], Any]
    val: Callable[[], Any] | None = None
    calls: list[str] = field(default_factory=list)

    def module(self) -> pl.LightningDataModule:
        hooks = self

        class Data(pl.LightningDataModule):
            def train_dataloader(self) -> Any:
                hooks.calls.append(f"train {self.trainer.current_epoch}")
                return hooks.train()

            def val_dataloader(self) -> Any:
                hooks.calls.append("val")
                return hooks.val() if hooks.val is not None else []

        return Data()


def drawing() -> Any:
    return DataLoader(Numbers(), 3, sampler=torch.randperm(10).tolist(), generator=seeded(random.randint(0, 99)))


@pytest.mark.parametrize("train", [*LOADERS.values(), drawing])
@pytest.mark.parametrize("reload", [0, 1])
def test_hooks_are_called_once(train: Callable[[], Any], reload: int) -> None:
    def run(strategy: SingleDeviceStrategy) -> Any:
        hooks, model = Hooks(train, lambda: DataLoader(Numbers(3), 2)), Model()
        settings: dict[str, Any] = dict(max_epochs=3, reload_dataloaders_every_n_epochs=reload, num_sanity_val_steps=1)
        pl.Trainer(strategy=strategy, **settings, **QUIET).fit(model, datamodule=hooks.module())
        return model.log_, sorted(hooks.calls)

    (with_peek, without), _ = both(run)
    assert with_peek == without
    assert len([call for call in without[1] if call.startswith("train")]) == (3 if reload else 1)


def test_a_hook_that_draws_is_called_again_only_when_the_numbers_have_moved() -> None:
    class Drawing(Model):
        def on_fit_start(self) -> None:
            torch.rand(3)

        def train_dataloader(self) -> Any:
            self.calls.append("train")
            return drawing()

    def run(strategy: SingleDeviceStrategy) -> Any:
        model = Drawing()
        pl.Trainer(strategy=strategy, max_epochs=2, **QUIET).fit(model)
        return model.log_, model.calls

    (with_peek, without), _ = both(run)
    assert with_peek[0] == without[0] and with_peek[1] == ["train"] * 2 and without[1] == ["train"]


@pytest.mark.parametrize("name", ["iterable with a length", "iterable, global shuffle", "noisy generator", "stream"])
@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start", "on_train_epoch_start"])
def test_numbers_drawn_in_between(name: str, hook: str) -> None:
    """What was drawn for the peek is drawn again if it would be other numbers; a stream loses nothing."""

    def run(strategy: SingleDeviceStrategy) -> Any:
        model = Model()
        setattr(model, hook, lambda: (random.random(), torch.rand(2)))
        pl.Trainer(strategy=strategy, max_epochs=1, **QUIET).fit(model, LOADERS[name]())
        return model.log_

    (with_peek, without), _ = both(run)
    if name == "noisy generator":  # what was drawn cannot be drawn again
        assert len(with_peek) == len(without) == 5
    else:
        assert with_peek == without


def test_an_epoch_set_in_between_counts() -> None:
    class Epochs(IterableDataset):
        epoch = 0

        def __iter__(self) -> Iterator[int]:
            yield from (100 * self.epoch + number for number in range(5))

    def run(strategy: SingleDeviceStrategy) -> Any:
        model, loader = Model(), DataLoader(Epochs(), 2)
        model.on_fit_start = lambda: setattr(loader.dataset, "epoch", 3)  # type: ignore[method-assign]
        pl.Trainer(strategy=strategy, max_epochs=1, **QUIET).fit(model, loader)
        return model.log_

    (with_peek, without), peeked = both(run)
    assert with_peek == without and peeked.tolist() == [0, 1] and without[0][1][1] == [300, 301]


# ---------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    "settings",
    [
        *[{"overfit_batches": 2}, {"fast_dev_run": 2}, {"limit_train_batches": 2}, {"limit_train_batches": 0.5}],
        *[{"max_steps": 3, "max_epochs": -1}, {"accumulate_grad_batches": 2}, {"val_check_interval": 2}],
    ],
)
@pytest.mark.parametrize("name", ["noisy", "iterable, own shuffle", "stream", "generator", "own loader with a length"])
def test_settings(settings: dict[str, Any], name: str) -> None:
    if settings.get("limit_train_batches") == 0.5 and name in ("iterable, own shuffle", "stream", "generator"):
        pytest.skip("Lightning wants a length for it")

    def run(strategy: SingleDeviceStrategy) -> Any:
        model = Model()
        trainer = pl.Trainer(strategy=strategy, **{"max_epochs": 2, **settings}, **QUIET)
        trainer.fit(model, LOADERS[name](), DataLoader(Numbers(4), 2))
        return model.log_

    (with_peek, without), _ = both(run)
    assert with_peek == without and without


def test_nothing_to_peek_at() -> None:
    def peeked(*loaders: Any, **settings: Any) -> Any:
        strategy, model = Peeking("cpu"), Model()
        trainer = pl.Trainer(strategy=strategy, max_epochs=1, **settings, **QUIET)
        trainer.fit(model, *loaders)
        return strategy.peeked, len(model.log_)

    items = generator()
    assert peeked(items, limit_train_batches=0) == (None, 0) and len(list(items)) == 5, "not even looked at"
    assert peeked(DataLoader(Numbers(0), 2)) == (None, 0)
    assert peeked(iter(())) == (None, 0) and peeked(DataLoader(Stream(0), 2)) == (None, 0)
    assert peeked({"a": DataLoader(Numbers(), 2), "b": DataLoader(Numbers(0), 2)})[0] is None
    with pytest.raises(TypeError, match="invalid dataloader"):
        peeked(object())
    trainer, model = pl.Trainer(**QUIET), Model()
    trainer.state.fn = TrainerFn.FITTING
    trainer.fit_loop._data_source.instance = model
    assert peek_batch(trainer) is None, "there is no such hook"


def test_an_error_of_the_users_comes_through_and_leaves_the_state() -> None:
    class Broken(Noisy):
        def __getitem__(self, index: int) -> Any:
            super().__getitem__(index)
            raise ValueError("broken item")

    for loader in (DataLoader(Broken(), 2), DataLoader(Broken(), 2, num_workers=1)):
        torch.manual_seed(3)
        before = random_states()
        with pytest.raises(ValueError, match="broken item"):
            pl.Trainer(strategy=Peeking("cpu"), max_epochs=1, **QUIET).fit(Model(), loader)
        assert same_states(before, random_states()) and loader.dataset.count == 0
        assert not multiprocessing.active_children()


# -------------------------------------------------------------------------------------------- to the device


class Transfers(Model):
    """Hooks that change the batch in place, draw numbers, count, and look at the Trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.stages, self.history = 0, [], []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.count += 1
        self.history.append(dataloader_idx)
        return batch.mul_(2)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        assert device == self.weight.device
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self._stages = [*getattr(self, "_stages", []), (self.trainer.state.stage, torch.is_grad_enabled())]
        return batch + random.random() + self.count


@pytest.mark.parametrize("name", ["shared memory", "generator", "stream"])
def test_hooks_on_the_way_to_the_device(name: str) -> None:
    shared = {"shared memory": lambda: DataLoader(torch.arange(4.0), batch_size=None), **LOADERS}

    def run(strategy: SingleDeviceStrategy) -> Any:
        model = Transfers()
        pl.Trainer(strategy=strategy, max_epochs=2, **QUIET).fit(model, shared[name]())
        return model.log_, model.count, model.history

    (with_peek, without), peeked = both(run)
    assert with_peek == without and described(peeked) == without[0][0][1]


@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        *[("fit", RunningStage.TRAINING), ("validate", RunningStage.VALIDATING)],
        *[("test", RunningStage.TESTING), ("predict", RunningStage.PREDICTING)],
    ],
)
def test_the_stage_is_the_loops(kind: str, stage: RunningStage) -> None:
    model, strategy = Transfers(), Peeking("cpu")
    getattr(pl.Trainer(strategy=strategy, max_epochs=1, **QUIET), kind)(model, DataLoader(Numbers(2), 2))
    assert model._stages == [(stage, kind == "fit")] * 2


def test_inputs_are_converted_and_data_modules_have_their_say() -> None:
    class Data(pl.LightningDataModule):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return {"x": batch}

    strategy = Peeking("cpu")
    data = Data()
    data.train_dataloader = lambda: DataLoader(torch.arange(4.0), 2)  # type: ignore[method-assign]
    trainer = pl.Trainer(strategy=strategy, max_epochs=1, precision="64-true", **QUIET)
    trainer.fit(Model(), datamodule=data)
    assert strategy.peeked["x"].dtype == torch.float64


# ---------------------------------------------------------------------------------------------- several ranks


class PeekingDDP(DDPStrategy):
    def setup(self, trainer: pl.Trainer) -> None:
        self.peeked = peek_batch(trainer)
        super().setup(trainer)


def _shares(rank: int, world_size: int) -> list[Any]:
    rows = []
    for name in ("shuffled", "noisy", "two workers", "stream"):
        results, peeking = [], PeekingDDP()
        for strategy in (peeking, DDPStrategy()):
            pl.seed_everything(0, verbose=False)
            model = Model()
            settings = {**QUIET, "devices": world_size, "max_epochs": 2}
            pl.Trainer(strategy=strategy, **settings).fit(model, LOADERS[name](), DataLoader(Noisy(), 4))
            results.append([entry[:2] for entry in model.log_])
        assert results[0] == results[1], name
        rows.append((name, described(peeking.peeked), next(batch for kind, batch in results[1] if kind == "train")))
    return rows


@pytest.mark.slow
def test_each_rank_peeks_at_its_own_share() -> None:
    first, second = launch_ranks(_shares, 2)
    for (name, peeked, batch), (_, other, _) in zip(first, second, strict=True):
        if name in ("shuffled", "two workers"):
            assert peeked == batch and peeked != other
        if name == "noisy":
            assert len(peeked[1]) == len(batch[1]) == 3


# ---------------------------------------------------------------------------------------------- more than one run


@pytest.mark.parametrize("name", [name for name in LOADERS if name != "file"])
def test_one_trainer_goes_on(name: str) -> None:
    """A second fit begins past epoch 0, where Lightning calls `iter` twice."""

    def run(strategy: SingleDeviceStrategy) -> Any:
        model, loader = Model(), LOADERS[name]()
        trainer = pl.Trainer(max_epochs=1, strategy=strategy, **QUIET)
        trainer.validate(model, DataLoader(Numbers(4), 2), verbose=False)
        trainer.fit(model, loader)
        trainer.fit_loop.max_epochs = 3
        trainer.fit(model, loader)
        return model.log_

    (with_peek, without), _ = both(run)
    if name == "stream behind a call":
        assert [e[1] for e in with_peek][:6] == [e[1] for e in without][:6]  # nothing tells that it is a stream
    else:
        assert with_peek == without


def test_resuming_a_stored_loader(tmp_path: Any) -> None:
    class Loader(Stateful):
        pass

    class StatefulDataLoader(DataLoader):
        """Like torchdata's: goes on within its epoch."""

        skip = 0

        def __iter__(self) -> Any:
            skip, self.skip = self.skip, 0
            for number, batch in enumerate(super().__iter__()):
                self.at = number + 1
                if number >= skip:
                    yield batch

        def state_dict(self) -> dict[str, Any]:
            return {"at": getattr(self, "at", 0)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.skip = state["at"]

    class BelowIteration(DataLoader):
        skip = 0

        def _get_iterator(self) -> Any:
            skip, self.skip = self.skip, 0
            iterator = super()._get_iterator()
            for _ in range(skip):
                next(iterator)
            return iterator

        def state_dict(self) -> dict[str, Any]:
            return {"skip": 2}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.skip = state["skip"]

    class Storing(Model):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.trainer.global_step == 3 and not path.exists():
                self.trainer.save_checkpoint(path)

    for make in (
        lambda: Loader(),
        lambda: Loader(iter(range(3))),
        lambda: StatefulDataLoader(Again("epoch"), 2),
        lambda: StatefulDataLoader(Numbers(), 2),
        lambda: BelowIteration(Again("epoch"), 2),
    ):
        path = tmp_path / "a.ckpt"
        path.unlink(missing_ok=True)

        def run(strategy: SingleDeviceStrategy, resume: bool, make: Any = make, path: Any = path) -> Any:
            model = Storing()
            trainer = pl.Trainer(max_epochs=2, strategy=strategy, **QUIET)
            trainer.fit(model, make(), ckpt_path=path if resume else None)
            return [batch for _, batch, _ in model.log_]

        (with_peek, without), _ = both(lambda strategy, run=run: run(strategy, False))
        assert with_peek == without
        (with_peek, without), _ = both(lambda strategy, run=run: run(strategy, True))
        assert with_peek == without and with_peek[0] != [1]


def test_hooks_that_depend_on_the_epoch_are_asked_again_on_resume(tmp_path: Any) -> None:
    path = tmp_path / "a.ckpt"

    def run(strategy: SingleDeviceStrategy) -> Any:
        class ByEpoch(Model):
            def train_dataloader(self) -> Any:
                return DataLoader(torch.arange(4) + 100 * self.trainer.current_epoch, 2)

        model = ByEpoch()
        trainer = pl.Trainer(max_epochs=2, strategy=strategy, **QUIET)
        trainer.fit(model, ckpt_path=path if path.exists() else None)
        return model.log_

    pl.seed_everything(0, verbose=False)
    model = Model()
    trainer = pl.Trainer(max_epochs=1, **QUIET)
    trainer.fit(model, DataLoader(torch.arange(4), 2))
    trainer.save_checkpoint(path)
    (with_peek, without), _ = both(run)
    assert with_peek == without and without[0][1][1] == [100, 101]


def test_another_loader_for_the_next_run_is_taken() -> None:
    strategy, model = Peeking("cpu"), Model()
    trainer = pl.Trainer(strategy=strategy, max_epochs=1, **QUIET)

    class Fails(Model):
        def on_fit_start(self) -> None:
            raise KeyError("before the loop asked")

    with pytest.raises(KeyError):
        trainer.fit(Fails(), DataLoader(Numbers(3), 1))
    trainer.fit(model, DataLoader(torch.arange(50, 53), 1))
    assert [batch[1] for _, batch, _ in model.log_] == [[50], [51], [52]]


def test_nothing_is_left_on_the_loader() -> None:
    loader, own = DataLoader(Stream(), 3), Batches()
    before = set(vars(loader))
    trainer = pl.Trainer(strategy=Peeking("cpu"), max_epochs=1, **QUIET)
    trainer.fit(Model(), loader)
    assert {name for name in vars(loader) if name not in before} <= {"__pl_attrs_record"}
    assert trainer.train_dataloader is loader
    assert all("install" not in repr(entry) for entry in vars(loader).get("__pl_attrs_record", []))
    model = Model()
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, own)
    assert isinstance(trainer.train_dataloader, Batches) and trainer.train_dataloader.epoch == own.epoch
    gc.collect()
    assert not multiprocessing.active_children()
