"""Restarts by torchrun: a part of its store that holds nothing of earlier attempts.

torchrun's agent keeps one store for all attempts, and ranks that start again find there the addresses that gloo and
NCCL of the dead ones have left: they connect to nobody, or fail. Nothing that torchrun tells a process numbers the
attempts alike on all hosts. So the ranks of an attempt find each other by names that they draw at random.
"""

from __future__ import annotations

import json
import os
import secrets
from datetime import timedelta
from time import monotonic, sleep

from torch.distributed import PrefixStore, Store, TCPStore

_PREFIX = "lnn_lightning"
_PAUSE = 0.02


def store_of_attempt(
    address: str, port: int, rank: int, world_size: int, timeout: timedelta = timedelta(minutes=10)
) -> Store | None:
    """The store for the process group of this attempt; None: the usual one is fresh. Collective over all ranks.

    Args:
        address: host of the store.
        port: its port.
        rank: this rank.
        world_size: number of ranks.
        timeout: how long to wait for the others.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    store = TCPStore(address, port, world_size=world_size, is_master=False, timeout=timeout)
    return PrefixStore(f"{_PREFIX}/{meet(store, rank, world_size, timeout)}", store)


def meet(store: Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """A name for the attempt, the same on all its ranks, in a store with remains of earlier ones.

    Rank 0 shows the names that it finds until every rank has seen its own among them and has said so.

    Raises:
        TimeoutError: some rank did not come.
    """
    own, deadline = secrets.token_hex(8), monotonic() + timeout.total_seconds()
    store.set(f"{_PREFIX}/name/{rank}", own)
    while monotonic() < deadline:
        if rank == 0:
            names = _texts(store, "name", world_size)
            names[0] = own
            store.set(f"{_PREFIX}/names", json.dumps(names))
            if _texts(store, "seen", world_size)[1:] == [own] * (world_size - 1):
                return own
        elif store.check([f"{_PREFIX}/names"]):
            names = json.loads(store.get(f"{_PREFIX}/names"))
            if len(names) == world_size and names[rank] == own:
                store.set(f"{_PREFIX}/seen/{rank}", names[0])
                return str(names[0])
        sleep(_PAUSE)
    missing = [other for other, seen in enumerate(_texts(store, "seen", world_size)) if other and seen != own]
    who = f"Ranks {missing} did" if rank == 0 else "Rank 0 did"
    raise TimeoutError(f"{who} not join this attempt within {timeout.total_seconds():.0f} s.")


def _texts(store: Store, kind: str, world_size: int) -> list[str]:
    keys = [f"{_PREFIX}/{kind}/{rank}" for rank in range(world_size)]
    present = [key for key in keys if store.check([key])]
    found = dict(zip(present, store.multi_get(present), strict=True)) if present else {}
    return [found[key].decode() if key in found else "" for key in keys]
