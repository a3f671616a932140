"""Ranks of one attempt find each other in a store where earlier attempts have left their names."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from lnn_lightning.parallel.attempts import meet

SOON = timedelta(seconds=5)


def attempt(store: dist.Store, ranks: range, world_size: int, delays: dict[int, float]) -> dict[int, str]:
    names: dict[int, str] = {}

    def join(rank: int) -> None:
        names[rank] = meet(store, rank, world_size, SOON)

    threads = [threading.Timer(delays.get(rank, 0.0), join, (rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return names


def test_attempts_have_names_of_their_own() -> None:
    store, seen = dist.HashStore(), set()
    for delays in ({}, {0: 0.2}, {2: 0.2}, {1: 0.1, 0: 0.2}):
        names = attempt(store, range(3), 3, delays)
        assert len(names) == 3
        seen |= {*names.values()}
    assert len(seen) == 4


def test_an_attempt_that_did_not_come_about_leaves_no_trap() -> None:
    """Two of three ranks have joined when they were killed; then all start again."""
    store = dist.HashStore()
    for rank in (1, 2):
        store.set(f"lnn_lightning/name/{rank}", "dead")
        store.set(f"lnn_lightning/seen/{rank}", "dead")
    store.set("lnn_lightning/names", '["dead", "dead", "dead"]')
    assert len(set(attempt(store, range(3), 3, {1: 0.1}).values())) == 1


def test_who_is_missing() -> None:
    store = dist.HashStore()
    with pytest.raises(TimeoutError, match=r"Ranks \[1, 2\] did not join"):
        meet(store, 0, 3, timedelta(seconds=0.1))
    with pytest.raises(TimeoutError, match="Rank 0 did not join"):
        meet(store, 1, 3, timedelta(seconds=0.1))
