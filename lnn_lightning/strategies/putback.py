"""Taking an item out of an iterable and putting it back.

An iterable changes when it is read: in its attributes and containers, in random generators, and in streams (a
generator, a file) that cannot be turned back. What can be turned back is. The item taken and the iterator it came from
are kept on a :class:`Tape`, which the next ``iter`` gets instead of a new iterator, so that a stream loses nothing; the
changes are then made again. If by then something else has changed what they started from (a seed, an epoch), the
iterable is read anew.
"""

from __future__ import annotations

import functools
import logging
import numbers
import operator
import pickle
import random
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

T = TypeVar("T")

_MOST_OBJECTS = 20_000
_MOST_ITEMS = 1_000_000
_DESCEND_ITEMS = 1_000
_METHODS = ("__iter__", "__next__", "__getitem__", "__getitems__", "__call__")
# Without state that reading data changes, or not to be meddled with.
_LEFT_ALONE = (
    *(str, bytes, numbers.Number, Tensor, nn.Module, type, types.ModuleType, threading.Thread, logging.Logger),
    *(BaseException, torch.dtype, torch.device, type(None)),
)


# ------------------------------------------------------------------------------------------------ state


@dataclass(frozen=True)
class Cell:
    """A piece of state that can be read, compared and written.

    Attributes:
        read: gives a copy of it.
        write: puts a copy back.
        same: compares two copies.
        is_random: it is the state of a random generator.
    """

    read: Callable[[], Any]
    write: Callable[[Any], None]
    same: Callable[[Any, Any], bool]
    is_random: bool = False


class Change:
    """What an operation changed, so that it can be undone and made again.

    Args:
        before: all that it could have changed, as it was.
        changed: what it changed, with the states before and after.
    """

    def __init__(self, before: list[tuple[Cell, Any]], changed: list[tuple[Cell, Any, Any]]) -> None:
        self._data = [(cell, state) for cell, state in before if not cell.is_random]
        self._changed = changed

    @property
    def is_random(self) -> bool:
        """Whether at most random generators changed."""
        return all(cell.is_random for cell, _, _ in self._changed)

    def is_undone(self, random_only: bool = False) -> bool:
        """Whether the operation would do the same now, or draw the same numbers."""
        drawn = [(cell, before) for cell, before, _ in self._changed if cell.is_random]
        data = [] if random_only else self._data
        return all(cell.same(cell.read(), before) for cell, before in (*data, *drawn))

    def undo(self) -> None:
        """Makes everything as before the operation."""
        for cell, before, _ in self._changed:
            cell.write(before)

    def redo(self) -> None:
        """Makes what is as before the operation as it was after it."""
        for cell, before, after in self._changed:
            if cell.same(cell.read(), before):
                cell.write(after)


def record(cells: Iterable[Cell], operation: Callable[[], T]) -> tuple[T, Change]:
    """Runs an operation and notes what it changed; undoes the changes if it fails."""
    before = [(cell, cell.read()) for cell in cells]

    def change() -> Change:
        now = ((cell, old, cell.read()) for cell, old in before)
        return Change(before, [(cell, old, new) for cell, old, new in now if not cell.same(old, new)])

    try:
        result = operation()
    except BaseException:
        change().undo()
        raise
    return result, change()


def global_random_cells() -> list[Cell]:
    """The global generators of torch (CUDA if it is in use), Python and numpy."""
    cells = [
        Cell(torch.get_rng_state, torch.set_rng_state, torch.equal, True),
        Cell(random.getstate, random.setstate, operator.eq, True),
    ]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            read = functools.partial(torch.cuda.get_rng_state, index)
            cells.append(Cell(read, functools.partial(_set_cuda_state, index), torch.equal, True))
    if (numpy := sys.modules.get("numpy")) is not None:
        cells.append(Cell(numpy.random.get_state, numpy.random.set_state, _same_pickled, True))
    return cells


def _set_cuda_state(index: int, state: Tensor) -> None:
    torch.cuda.set_rng_state(state, index)


def _same_pickled(one: Any, other: Any) -> bool:
    return pickle.dumps(one) == pickle.dumps(other)


def _generator_cell(value: Any) -> Cell | None:
    if isinstance(value, torch.Generator):
        return Cell(value.get_state, value.set_state, torch.equal, True)  # type: ignore[arg-type]
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return Cell(value.getstate, value.setstate, operator.eq, True)
    if (numpy := sys.modules.get("numpy")) is not None:
        if isinstance(value, numpy.random.RandomState):
            return Cell(value.get_state, value.set_state, _same_pickled, True)
        if isinstance(value, numpy.random.Generator):
            bits = value.bit_generator
            return Cell(lambda: bits.state, functools.partial(setattr, bits, "state"), _same_pickled, True)
    return None


def _container_cell(value: Any) -> Cell:
    def write(items: Any) -> None:
        if isinstance(value, list):
            value[:] = items
        else:
            value.clear()
            value.extend(items) if isinstance(value, deque) else value.update(items)

    return Cell(lambda: dict(value) if isinstance(value, dict) else list(value), write, _same_items)


def _same_items(one: Any, other: Any) -> bool:
    if len(one) != len(other):
        return False
    if isinstance(one, dict):
        return all(key in other and _same_item(other[key], value) for key, value in one.items())
    return all(map(_same_item, one, other))


def _same_item(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, (int, float, str, bytes)) and one == other)


def _attribute_cell(owner: Any) -> Cell:
    def write(attributes: Mapping[str, Any]) -> None:
        for name in [name for name in vars(owner) if name not in attributes]:
            del owner.__dict__[name]
        owner.__dict__.update(attributes)

    return Cell(lambda: dict(vars(owner)), write, _same_items)


def survey(root: Any) -> tuple[list[Cell], bool]:
    """Looks through everything an iterable holds.

    Returns:
        What can be turned back, and whether there is a stream that cannot.
    """
    cells: list[Cell] = []
    has_stream = False
    seen: dict[int, Any] = {}
    todo = [root]
    while todo and len(seen) < _MOST_OBJECTS:
        value = todo.pop()
        if id(value) in seen or isinstance(value, _LEFT_ALONE) or _is_foreign(value):
            continue
        seen[id(value)] = value
        if (generator := _generator_cell(value)) is not None:
            cells.append(generator)
        elif isinstance(value, (list, tuple, set, deque, dict)):
            if not isinstance(value, tuple) and len(value) <= _MOST_ITEMS:
                cells.append(_container_cell(value))
            items = list(value.values() if isinstance(value, dict) else value)
            todo += items[:_DESCEND_ITEMS]
        elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            todo += _held_by_function(value)
        elif _is_stream(value):
            has_stream = True
        elif isinstance(getattr(value, "__dict__", None), dict):
            if value is root or any(hasattr(type(value), name) for name in _METHODS):
                cells.append(_attribute_cell(value))
            todo += [*vars(value).values(), *(getattr(type(value), name, None) for name in _METHODS)]
    return cells, has_stream


def _is_foreign(value: Any) -> bool:
    return isinstance(value, pl.Trainer) or type(value).__module__.startswith(
        ("lightning.pytorch", "torch.distributed")
    )


def _is_stream(value: Any) -> bool:
    """Whether it can be read only once. An iterator written in Python is what its attributes are."""
    following = getattr(type(value), "__next__", None)
    if following is not None and not isinstance(following, types.FunctionType):
        return True
    kind = type(value)
    return hasattr(kind, "put") and hasattr(kind, "get") and not hasattr(kind, "__getitem__")  # a queue


def _held_by_function(function: Any) -> list[Any]:
    if isinstance(function, functools.partial):
        return [function.func, *function.args, *function.keywords.values()]
    if isinstance(function, types.MethodType):
        return [function.__self__, function.__func__]
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    named = [function.__globals__.get(name) for name in function.__code__.co_names]
    return cells + [value for value in named if _generator_cell(value) is not None or _is_stream(value)]


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


# ------------------------------------------------------------------------------------------------ items


class Tape(Iterator[Any]):
    """The beginning of an iteration: recorded, and played again later.

    Args:
        make: makes the iterator.
        cells: what it may change.
        is_stream: what it reads cannot be read again.
        journal: gets the changes in the order they were made; they are for the caller to undo.
        draw: makes the random draws that making the iterator takes.
    """

    def __init__(
        self,
        make: Callable[[], Iterator[Any]],
        cells: list[Cell],
        is_stream: bool,
        journal: list[Change],
        draw: Callable[[], Any] | None = None,
    ) -> None:
        self._make, self._cells, self._is_stream, self._journal, self._draw = make, cells, is_stream, journal, draw
        self._pulled: deque[tuple[Any, Change]] = deque()
        self._is_recording = self.is_open = True
        self.on_retire: list[Callable[[], None]] = []
        self._live, self._creation = self._recorded(make)

    def _recorded(self, operation: Callable[[], T]) -> tuple[T, Change]:
        result, change = record(self._cells, operation)
        self._journal.append(change)
        return result, change

    def stop(self) -> None:
        """Ends the recording; the changes must be undone then."""
        self._is_recording = False
        self._journal = []

    def retire(self) -> None:  # not `close`: that is what `yield from` calls on an iterator
        """From now on iterations begin anew."""
        self.is_open = False
        while self.on_retire:
            self.on_retire.pop()()

    def retiring(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, after which nothing is taken from the tape: it sets the iterable to another place."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.retire()
            return function(*args, **kwargs)

        return call

    def begins(self) -> bool:
        """Whether the iteration that begins now is this one."""
        as_recorded = self.is_open and self._creation.is_undone()
        if not self.is_open or not (as_recorded or self._is_stream):
            self.retire()
            return False
        if not as_recorded and self._draw is not None and not self._creation.is_undone(random_only=True):
            self._draw()
        self._creation.redo()
        return True

    def __next__(self) -> Any:
        if self._is_recording:
            self._pulled.append(self._recorded(lambda: next(self._live)))
            return self._pulled[-1][0]
        if not self._pulled:
            return next(self._live)
        self.retire()
        item, change = self._pulled.popleft()
        if self._is_stream or change.is_undone() or not self._creation.is_random:
            change.redo()
            return item
        # What it was drawn from has changed since.
        self._pulled.clear()
        self._live, creation = record(self._cells, self._make)
        creation.undo()
        return next(self._live)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._live, name)


class PutBack:
    """An iterable with a tape in front; passes as what it stands for.

    Args:
        iterable: what it stands for.
        tape: the beginning of its next iteration.
    """

    def __init__(self, iterable: Any, tape: Tape) -> None:
        self.__dict__.update(_iterable=iterable, _tape=tape)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.__dict__["_iterable"])

    def __iter__(self) -> Iterator[Any]:
        tape = self.__dict__["_tape"]
        return tape if tape.begins() else iter(self.__dict__["_iterable"])

    def __next__(self) -> Any:
        tape = self.__dict__["_tape"]
        return next(tape if tape.is_open else self.__dict__["_iterable"])

    def __len__(self) -> int:
        return len(self.__dict__["_iterable"])

    def __getattr__(self, name: str) -> Any:
        if name == "load_state_dict":
            return self.__dict__["_tape"].retiring(self.__dict__["_iterable"].load_state_dict)
        return getattr(self.__dict__["_iterable"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_iterable"], name, value)
