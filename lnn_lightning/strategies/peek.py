"""One batch of the loop that is about to start, with everything left as if it had not been looked at.

Datasets that are read by index are read through a copy of the loader without workers, and what that changed is undone.
Of others the batch is put back (:mod:`~lnn_lightning.strategies.putback`). A ``*_dataloader`` hook is called once: the
loop gets what it returned.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.connectors.data_connector import _request_dataloader
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.data import _is_dataloader_shuffled
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from lnn_lightning.parallel.step.batch import own_copy
from lnn_lightning.strategies.effects import EffectWatch
from lnn_lightning.strategies.putback import (
    Change,
    PutBack,
    Tape,
    global_random_cells,
    record,
    survey,
)

_NOTHING = object()
_RECORD = "__pl_attrs_record"  # what Lightning does again to a loader that it makes anew


@dataclass(frozen=True)
class _Loop:
    """The loop that is about to start."""

    loop: Any
    stage: RunningStage
    limit: int | float
    mode: str


def _loop_of(trainer: pl.Trainer) -> _Loop:
    if trainer.state.fn == TrainerFn.FITTING:
        return _Loop(trainer.fit_loop, RunningStage.TRAINING, trainer.limit_train_batches, "max_size_cycle")
    if trainer.state.fn == TrainerFn.VALIDATING:
        return _Loop(trainer.validate_loop, RunningStage.VALIDATING, trainer.limit_val_batches, "sequential")
    if trainer.state.fn == TrainerFn.TESTING:
        return _Loop(trainer.test_loop, RunningStage.TESTING, trainer.limit_test_batches, "sequential")
    return _Loop(trainer.predict_loop, RunningStage.PREDICTING, trainer.limit_predict_batches, "sequential")


def peek_batch(trainer: pl.Trainer) -> Any:
    """One batch as the loop that is about to start would give it to the step.

    To be called in ``Strategy.setup``, on every rank. The order of the data, random states, one-pass iterables and the
    module's attributes are then as if it had not been called.

    Args:
        trainer: in ``fit``, ``validate``, ``test`` or ``predict``.

    Returns:
        The batch, on the device of the module's parameters; None if there is none.

    Raises:
        Exception: whatever the user's hooks, loaders and datasets raise.
    """
    where = _loop_of(trainer)
    if where.limit == 0 or not where.loop._data_source.is_defined():
        return None

    def look() -> Any:
        found = _first_batch(trainer, where)
        return None if found is None else _transferred(trainer, where.stage, *found)

    batch, change = record(global_random_cells(), look)
    change.undo()
    return batch


# ------------------------------------------------------------------------------------------------ the loaders


def _first_batch(trainer: pl.Trainer, where: _Loop) -> tuple[Any, int] | None:
    """The batch and the index of its loader. Iterators are made and asked in the order in which the loop does it."""
    source = where.loop._data_source
    raw, called = record(global_random_cells(), lambda: _request_dataloader(source))
    combined = raw if isinstance(raw, CombinedLoader) else CombinedLoader(raw, where.mode)  # type: ignore[arg-type]
    loaders = list(combined.flattened)
    journal: list[Change] = []
    readings: list[_Reading] = []

    def begin(loader: Any) -> _Reading:
        readings.append(_read(trainer, where.stage, loader, journal))
        return readings[-1]

    try:
        if combined._mode == "sequential":
            for index, loader in enumerate(loaders):
                if (item := next(begin(loader).iterator, _NOTHING)) is not _NOTHING:
                    return item, index
            return None
        iterators = [begin(loader).iterator for loader in loaders]
        items = [next(iterator, _NOTHING) for iterator in iterators]
    finally:
        for reading in readings:
            reading.end()
        for change in reversed(journal):
            change.undo()
        for index, reading in enumerate(readings):
            loaders[index] = reading.instead
        if any(new is not old for new, old in zip(loaders, combined.flattened, strict=True)):
            combined.flattened = loaders
        _keep_for_the_loop(trainer, source, raw if combined is raw else combined.iterables, called)
    missing = [item is _NOTHING for item in items]
    if all(missing) or (any(missing) and combined._mode != "max_size"):
        return None
    shape = CombinedLoader(combined.iterables)
    shape.flattened = [None if item is _NOTHING else item for item in items]
    return shape.iterables, 0


def _keep_for_the_loop(trainer: pl.Trainer, source: Any, loaders: Any, called: Change) -> None:
    """Answers the loop's request with what was requested here, unless the answer would be another one by now."""
    instance, position = source.instance, (trainer.current_epoch, trainer.global_step)

    def dataloader() -> Any:
        del source.__dict__["dataloader"]
        if source.instance is not instance:
            return source.dataloader()
        if source.is_module():
            if (trainer.current_epoch, trainer.global_step) != position or not called.is_undone():
                return source.dataloader()
            called.redo()
        return loaders

    source.__dict__["dataloader"] = dataloader


@dataclass(frozen=True)
class _Reading:
    """A loader that is being read.

    Attributes:
        iterator: to be asked.
        instead: what the loop gets for the loader.
        end: to be called behind the reading.
    """

    iterator: Iterator[Any]
    instead: Any
    end: Callable[[], None]


def _read(trainer: pl.Trainer, stage: RunningStage, loader: Any, journal: list[Change]) -> _Reading:
    if isinstance(loader, DataLoader):
        if isinstance(loader.dataset, IterableDataset) and not loader.num_workers:
            return _read_and_put_back(loader, journal)
        return _read_copy(trainer, stage, loader, journal)
    cells, is_stream = survey(loader)
    if isinstance(loader, (Sequence, Tensor)) or not _is_iterable(loader):
        return _Reading(iter(loader) if _is_iterable(loader) else iter(()), loader, lambda: None)
    tape = Tape(lambda: iter(loader), [*global_random_cells(), *cells], is_stream, journal)
    return _Reading(tape, PutBack(loader, tape), tape.stop)


def _is_iterable(loader: Any) -> bool:
    """If it is not, Lightning will say so."""
    return hasattr(type(loader), "__iter__") or hasattr(type(loader), "__getitem__")


# ------------------------------------------------------------------------------------------------ DataLoader


def _read_copy(trainer: pl.Trainer, stage: RunningStage, loader: DataLoader, journal: list[Change]) -> _Reading:
    """Reads a copy: in this process if items are read by index, else in a worker, which has a dataset of its own."""
    cells, _ = survey((loader.dataset, loader.collate_fn, loader.generator))
    sampler_cells, sampler_is_stream = survey((loader.sampler, loader.batch_sampler))
    made: list[Any] = []

    def make() -> Iterator[Any]:
        if isinstance(loader.dataset, IterableDataset):
            return iter(_watched(_in_one_worker(loader), made))
        other = _copied(loader)
        if sampler_is_stream:
            _read_in_order(other)
        else:
            other = _as_lightning_prepares(trainer, stage, other)
        return _WithHelp(_in_this_process(other), _watched(_in_one_worker(other), made) if loader.num_workers else None)

    def end() -> None:
        tape.stop()
        for iterator in made:
            if hasattr(iterator, "_shutdown_workers"):
                iterator._shutdown_workers()

    tape = Tape(make, [*global_random_cells(), *cells, *sampler_cells], False, journal)
    return _Reading(tape, loader, end)


class _WithHelp(Iterator[Any]):
    """Reads a loader in this process, or with a worker if it fails: it may need what `worker_init_fn` sets up."""

    def __init__(self, loader: DataLoader, with_worker: DataLoader | None) -> None:
        self._iterator = iter(loader)
        self._with_worker = with_worker

    def __next__(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            raise
        except Exception:
            if self._with_worker is None:
                raise
            self._iterator, self._with_worker = iter(self._with_worker), None
            return next(self._iterator)


def _watched(loader: DataLoader, made: list[Any]) -> DataLoader:
    """Notes the iterators below ``DataLoader.__iter__``, which have the workers."""

    def get_iterator() -> Any:
        made.append(type(loader)._get_iterator(loader))
        return made[-1]

    loader.__dict__["_get_iterator"] = get_iterator
    return loader


def _copied(loader: DataLoader) -> DataLoader:
    other = copy.copy(loader)
    other.__dict__.update(_iterator=None, persistent_workers=False)
    for name in ("__pl_saved_kwargs", _RECORD):  # Lightning changes these in place
        if name in other.__dict__:
            other.__dict__[name] = copy.copy(other.__dict__[name])
    return other


def _in_this_process(loader: DataLoader) -> DataLoader:
    other = _copied(loader)
    other.__dict__.update(num_workers=0, timeout=0)
    return other


def _in_one_worker(loader: DataLoader) -> DataLoader:
    other = _copied(loader)
    other.__dict__.update(num_workers=1, prefetch_factor=1)
    return other


def _read_in_order(loader: DataLoader) -> None:
    """Replaces a sampler that can be read only once."""
    sampler: SequentialSampler = SequentialSampler(loader.dataset)  # type: ignore[arg-type]
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    batches = BatchSampler(sampler, size or 1, False) if loader.batch_sampler is not None else None
    loader.__dict__.update(sampler=sampler, batch_sampler=batches)


def _as_lightning_prepares(trainer: pl.Trainer, stage: RunningStage, loader: DataLoader) -> DataLoader:
    """With the sampler that gives this rank its share."""
    shuffle = stage == RunningStage.TRAINING or _is_dataloader_shuffled(loader)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they come again when the loop starts
        prepared = trainer._data_connector._prepare_dataloader(loader, shuffle=shuffle, mode=stage)
    assert isinstance(prepared, DataLoader)
    return prepared


def _read_and_put_back(loader: DataLoader, journal: list[Change]) -> _Reading:
    """Below ``DataLoader.__iter__``, which the user's class may override: it is what the loop will iterate."""
    cells, is_stream = survey((loader.dataset, loader.collate_fn, loader.generator))
    cells = [*global_random_cells(), *cells]
    other = _copied(loader)
    tapes: list[Tape] = []

    def draw() -> None:
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # as DataLoader's iterators do

    def get_iterator() -> Tape:
        tapes.append(Tape(lambda: type(other)._get_iterator(other), cells, is_stream, journal, draw))
        return tapes[-1]

    def end() -> None:
        for tape in tapes:
            tape.stop()
        if tapes:
            _install(loader, tapes[-1])

    other.__dict__["_get_iterator"] = get_iterator
    return _Reading(iter(other), loader, end)


def _install(loader: DataLoader, tape: Tape) -> None:
    """Lets the next iteration of a loader, and of one that Lightning makes from it, begin with the tape."""
    if not tape.is_open:
        return
    kept: list[Any] = getattr(loader, _RECORD, [])

    def get_iterator() -> Any:
        return tape if tape.begins() else type(loader)._get_iterator(loader)

    def remove() -> None:
        for name in ("_get_iterator", "load_state_dict"):
            loader.__dict__.pop(name, None)
        object.__setattr__(loader, _RECORD, kept)

    loader.__dict__["_get_iterator"] = get_iterator
    object.__setattr__(loader, _RECORD, [*kept, ((tape,), _install)])
    if (load := getattr(loader, "load_state_dict", None)) is not None:
        loader.__dict__["load_state_dict"] = tape.retiring(load)
    tape.on_retire.append(remove)


# ------------------------------------------------------------------------------------------------ the batch


def _transferred(trainer: pl.Trainer, stage: RunningStage, batch: Any, dataloader_idx: int) -> Any:
    """The batch through the hooks on its way to the device; they get a copy, as they may change it."""
    module = trainer.lightning_module
    try:
        batch = copy.deepcopy(batch)
    except Exception:  # noqa: BLE001 - something in it that is no data
        batch = own_copy(batch)
    parameter = next(module.parameters(), None)
    device = parameter.device if parameter is not None else module.device
    with _running(trainer, stage), EffectWatch(module).preserved():
        batch = trainer.precision_plugin.convert_input(batch)
        batch = module._on_before_batch_transfer(batch, dataloader_idx=dataloader_idx)
        device = device if device.type != "meta" else torch.device("cpu")
        return module._apply_batch_transfer_handler(batch, device=device, dataloader_idx=dataloader_idx)


@contextmanager
def _running(trainer: pl.Trainer, stage: RunningStage) -> Iterator[None]:
    before, trainer.state.stage = trainer.state.stage, stage
    try:
        with torch.set_grad_enabled(stage == RunningStage.TRAINING):
            yield
    finally:
        trainer.state.stage = before
