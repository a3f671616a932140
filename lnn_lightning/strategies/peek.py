"""One batch of the loop that is about to start, with everything left as if it had not been looked at.

Datasets that are read by index are read through a copy of the loader without workers, and what that changed is undone. Of
others the batch is put back (:mod:`~lnn_lightning.strategies.putback`). A ``*_dataloader`` hook is called once: the loop
gets what it returned.
"""

from __future__ import annotations

import copy
import functools
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
    Cell,
    Change,
    PutBack,
    Tape,
    global_random_cells,
    load_state_anew,
    record,
    survey,
)

_RECORD = "__pl_attrs_record"  # what Lightning does again to a loader that it makes anew


class _Empty(Exception):
    """The loader has no batch."""


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
    """The batch and the index of its loader."""
    source = where.loop._data_source
    raw, called = record(global_random_cells(), lambda: _request_dataloader(source))
    combined = raw if isinstance(raw, CombinedLoader) else CombinedLoader(raw, where.mode)  # type: ignore[arg-type]
    loaders = list(combined.flattened)
    items: list[Any] = []
    index = 0
    try:
        for index, loader in enumerate(loaders):
            try:
                item, loaders[index] = _peek_loader(trainer, where.stage, loader)
            except _Empty:
                if combined._mode not in ("sequential", "max_size"):
                    return None
                item = None
                if combined._mode == "sequential":
                    continue
            items.append(item)
            if combined._mode == "sequential":
                return item, index
    finally:
        if any(new is not old for new, old in zip(loaders, combined.flattened, strict=True)):
            combined.flattened = loaders
        _keep_for_the_loop(trainer, source, raw if combined is raw else combined.iterables, called)
    if combined._mode == "sequential" or all(item is None for item in items):
        return None
    shape = CombinedLoader(combined.iterables)
    shape.flattened = items
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


def _peek_loader(trainer: pl.Trainer, stage: RunningStage, loader: Any) -> tuple[Any, Any]:
    """The first item of a loader, and what to put in its place.

    Raises:
        _Empty: there is none.
    """
    if isinstance(loader, DataLoader):
        return _peek_dataloader(trainer, stage, loader), loader
    if isinstance(loader, (Sequence, Tensor)):
        return _next(iter(loader)), loader
    if not hasattr(type(loader), "__iter__") and not hasattr(type(loader), "__getitem__"):
        raise _Empty  # and Lightning will say what is wrong
    cells, is_stream = survey(loader)
    tape = Tape(lambda: iter(loader), [*global_random_cells(), *cells], is_stream)
    return _pull(tape), PutBack(loader, tape)


def _pull(tape: Tape) -> Any:
    try:
        return _next(tape, tape.pull)
    finally:
        tape.rewind()


def _next(iterator: Iterator[Any], take: Callable[[], Any] | None = None) -> Any:
    try:
        return take() if take is not None else next(iterator)
    except StopIteration:
        raise _Empty from None


# ------------------------------------------------------------------------------------------------ DataLoader


def _peek_dataloader(trainer: pl.Trainer, stage: RunningStage, loader: DataLoader) -> Any:
    by_index = not isinstance(loader.dataset, IterableDataset)
    cells, is_stream = survey((loader.dataset, loader.collate_fn, loader.generator))
    sampler_cells, sampler_is_stream = survey((loader.sampler, loader.batch_sampler))
    cells = [*global_random_cells(), *cells, *sampler_cells]
    if loader.num_workers == 0 and (is_stream or not by_index):
        return _peek_and_put_back(loader, cells, is_stream or sampler_is_stream)

    def look() -> Any:
        other = _copied(loader)
        if sampler_is_stream and by_index:
            _read_in_order(other)
        elif by_index:
            other = _as_lightning_prepares(trainer, stage, other)
        if loader.num_workers == 0:
            return _first_of(_in_this_process(other))
        # A worker has a dataset of its own: a stream is not used up, and what it opens is not open here.
        if by_index and not is_stream:
            try:
                return _first_of(_in_this_process(other))
            except _Empty:
                raise
            except Exception:  # noqa: BLE001, S110 - it may need what `worker_init_fn` sets up
                pass
        return _first_of(_in_one_worker(other))

    item, change = record(cells, look)
    change.undo()
    return item


def _first_of(loader: DataLoader) -> Any:
    """The first item; no worker is left."""
    made: list[Any] = []

    def get_iterator() -> Any:
        made.append(type(loader)._get_iterator(loader))
        return made[-1]

    loader.__dict__["_get_iterator"] = get_iterator
    try:
        return _next(iter(loader))
    finally:
        for iterator in made:
            if hasattr(iterator, "_shutdown_workers"):
                iterator._shutdown_workers()


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


def _peek_and_put_back(loader: DataLoader, cells: list[Cell], is_stream: bool) -> Any:
    """Below ``DataLoader.__iter__``, which the user's class may override: it is what the loop will iterate."""
    other = _copied(loader)
    tapes: list[Tape] = []

    def get_iterator() -> Tape:
        tapes.append(_PullingTape(lambda: type(other)._get_iterator(other), cells, is_stream))
        return tapes[-1]

    other.__dict__["_get_iterator"] = get_iterator
    try:
        item = _next(iter(other))
    finally:
        for tape in reversed(tapes):
            tape.rewind()
    if tapes:
        tapes[-1].__class__ = Tape
        _install(loader, tapes[-1])
    return item


class _PullingTape(Tape):
    """A tape that is being recorded."""

    def __next__(self) -> Any:
        return self.pull()


def _install(loader: DataLoader, tape: Tape) -> None:
    """Lets the next iteration of a loader, and of one that Lightning makes from it, begin with the tape."""

    def get_iterator() -> Any:
        return tape if tape.begins() else type(loader)._get_iterator(loader)

    def remove() -> None:
        for name in ("_get_iterator", "load_state_dict"):
            loader.__dict__.pop(name, None)
        records = [entry for entry in getattr(loader, _RECORD, []) if entry[1] is not _install]
        if hasattr(loader, _RECORD):
            object.__setattr__(loader, _RECORD, records)

    loader.__dict__["_get_iterator"] = get_iterator
    object.__setattr__(loader, _RECORD, [*getattr(loader, _RECORD, []), ((tape,), _install)])
    if hasattr(type(loader), "load_state_dict"):
        original = functools.partial(type(loader).load_state_dict, loader)
        loader.__dict__["load_state_dict"] = functools.partial(_load_state_anew, original, tape)
    tape.on_close.append(remove)


def _load_state_anew(load: Callable[..., Any], tape: Tape, *args: Any, **kwargs: Any) -> Any:
    tape.close()
    return load(*args, **kwargs)


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
