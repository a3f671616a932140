"""Work on state that is elsewhere: read ahead, compute, write behind, in a thread of its own, in order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Protocol

import torch
from torch import Tensor

from lnn_lightning.memory.offload.store import Region, Store


class Slot:
    """Buffers of one piece of work, used again by later ones.

    Args:
        store: where its contents come from and go to.
        writing: writes under way by place, of all slots.
    """

    def __init__(self, store: Store, writing: dict[tuple[int, int], Future[None]]) -> None:
        self.store, self._writing = store, writing
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}
        self._own: list[tuple[tuple[int, int], Future[None]]] = []

    def buffer(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory for one of the tensors of a piece of work."""
        kept = self._buffers.get((name, dtype))
        if kept is None or kept.numel() < numel:
            kept = self._buffers[name, dtype] = self.store.buffer(numel, dtype)
        return kept[:numel]

    def read(self, region: Region, into: Tensor, start: int) -> Future[None]:
        """Starts to read a part of a region; what is being written there is read when it is complete."""
        before = self._writing.get((region.offset, start))
        if before is not None:
            before.result()
        return self.store.read(region, into, start)

    def write(self, region: Region, value: Tensor, start: int) -> None:
        """Starts to write a part of a region; ``value`` is a buffer of this slot."""
        key = (region.offset, start)
        self._writing[key] = future = self.store.write(region, value, start)
        self._own.append((key, future))

    @property
    def writes(self) -> bool:
        """Whether its buffers are still being written."""
        return any(not future.done() for _, future in self._own)

    def settle(self) -> None:
        """Waits for its writes, and raises their error."""
        while self._own:
            key, future = self._own.pop()
            if self._writing.get(key) is future:
                del self._writing[key]
            future.result()


class Work(Protocol):
    """A piece of work of a lane."""

    @property
    def owner(self) -> int:
        """For whom; see :meth:`Lane.wait_for`."""

    def read(self, slot: Slot) -> list[Future[None]]:
        """Starts to read what it needs."""

    def update(self, slot: Slot) -> None:
        """Computes, and starts to write."""


class Lane:
    """Does pieces of work one after another.

    Args:
        store: where state is.
        prefetch: pieces of work whose state is read ahead.
    """

    def __init__(self, store: Store, prefetch: int) -> None:
        self._prefetch = prefetch
        writing: dict[tuple[int, int], Future[None]] = {}
        self._slots = deque(Slot(store, writing) for _ in range(prefetch + 2))  # one computes, one is being written
        self._changed = threading.Condition()
        self._queue: deque[Work] = deque()
        self._left: dict[int, int] = {}
        self._held: dict[int, Work] = {}
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, works: Sequence[Work], held: bool = False) -> None:
        """Does them when what was given before is done.

        Args:
            works: pieces of work.
            held: only read ahead until :meth:`let_go`.

        Raises:
            BaseException: what an earlier piece of work failed with.
        """
        with self._changed:
            self._raise()
            if not works:
                return
            for work in works:
                self._queue.append(work)
                if held:
                    self._held[id(work)] = work
                else:
                    self._count(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="offload-update", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def let_go(self) -> None:
        """Whatever was held is done."""
        with self._changed:
            for work in self._held.values():
                self._count(work)
            self._held.clear()
            self._changed.notify_all()

    def _count(self, work: Work) -> None:
        self._left[work.owner] = self._left.get(work.owner, 0) + 1

    def reorder(self, key: Callable[[Work], int]) -> None:
        """Sorts what nobody has begun with."""
        with self._changed:
            self._queue = deque(sorted(self._queue, key=key))

    @property
    def pending(self) -> bool:
        """Whether anything is not done yet, other than what is held."""
        return bool(self._left)

    def has(self, owner: int) -> bool:
        """Whether work of an owner is not done yet."""
        return owner in self._left

    def wait_for(self, owners: Iterable[int]) -> None:
        """Waits until all work of some owners is computed (it may still be written).

        Raises:
            BaseException: what a piece of work failed with.
        """
        if not self._left and self._error is None:
            return
        with self._changed:
            for owner in owners:
                self._changed.wait_for(lambda owner=owner: owner not in self._left)  # type: ignore[misc]
            self._raise()

    def finish(self) -> None:
        """Waits until all work is done and written.

        Raises:
            BaseException: what a piece of work failed with.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._left)
            try:
                for slot in self._slots:
                    slot.settle()
            except BaseException as error:
                self._error = self._error or error
            self._raise()

    def close(self) -> None:
        """Ends the thread, when all work is done."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    # ---------------------------------------------------------------- in the thread

    def _run(self) -> None:
        ahead: deque[tuple[Work, Slot, list[Future[None]]]] = deque()
        while True:
            try:
                if not self._fill(ahead):
                    return
                work, slot, reads = ahead[0]
                with self._changed:
                    self._changed.wait_for(lambda work=work: id(work) not in self._held)  # type: ignore[misc]
                for read in reads:
                    read.result()
                work.update(slot)
                ahead.popleft()
                self._done(work, slot)
            except BaseException as error:  # noqa: BLE001 - raised by whoever waits
                self._fail(error, ahead)

    def _fill(self, ahead: deque[tuple[Work, Slot, list[Future[None]]]]) -> bool:
        """Reads ahead what is queued and has a slot; waits if there is nothing at all. False: it is over."""
        while len(ahead) <= self._prefetch:
            with self._changed:
                if not ahead:
                    self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return bool(ahead)
                if ahead and self._slots[0].writes:
                    return True
                slot, work = self._slots.popleft(), self._queue.popleft()
            entry: tuple[Work, Slot, list[Future[None]]] = (work, slot, [])
            ahead.append(entry)
            slot.settle()
            entry[2].extend(work.read(slot))
        return True

    def _done(self, work: Work, slot: Slot) -> None:
        with self._changed:
            self._slots.append(slot)
            self._left[work.owner] -= 1
            if not self._left[work.owner]:
                del self._left[work.owner]
            self._changed.notify_all()

    def _fail(self, error: BaseException, ahead: deque[tuple[Work, Slot, list[Future[None]]]]) -> None:
        with self._changed:
            self._error = self._error or error
            for _, slot, _ in ahead:
                self._slots.append(slot)
            ahead.clear()
            self._queue.clear()
            self._held.clear()
            self._left.clear()
            self._changed.notify_all()
