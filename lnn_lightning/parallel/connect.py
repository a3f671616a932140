"""How the processes of a job find each other.

torch waits in silence for as long as a collective may take, and then counts the processes that came. Here each rank
signs in at a store on rank 0 first: who is missing is said, while waiting and at the end.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, PrefixStore, Store, TCPStore

from lnn_lightning.parallel.errors import ParallelError
from lnn_lightning.parallel.hosts import Host, Presence, hosts_in_words, ranks_in_words
from lnn_lightning.parallel.interface import source_address

log = logging.getLogger(__name__)

_WORD_EVERY = 60.0
_LONGEST_PAUSE = 0.5
_SLACK = 30.0
"""How many seconds longer than rank 0 the others wait, so that they hear what it has to say."""


class ConnectError(ParallelError):
    """Processes of the job did not find each other in time."""


def connect(address: str, port: int, rank: int, world_size: int, timeout: timedelta) -> tuple[Store, list[Presence]]:
    """Meets the other processes of the job at a store. Collective over all processes.

    Under torchrun the store may be the agent's, which outlives its workers: what an earlier start has left there counts
    for nothing, and the store that is returned shows nothing of it.

    Args:
        address: name or address of rank 0's host.
        port: port of the store.
        rank: this process.
        world_size: number of processes to wait for.
        timeout: how long to wait for all.

    Returns:
        A store of this start, for ``init_process_group``, and what each rank told of itself.

    Raises:
        ConnectError: not all came; on all that came, with the ranks that are missing.
    """
    store = _open_store(address, port, rank, timeout)
    own = Presence(Host.here(), source_address(address, port))
    meeting = PrefixStore("lnn_lightning/meeting", store)
    try:
        meeting.set(f"rank{rank}", json.dumps({**asdict(own), "start": secrets.token_hex(8)}))
        meet = _call_together if rank == 0 else _answer
        verdict = meet(meeting, rank, world_size, timeout)
    except DistError as error:
        raise ConnectError(
            f"Rank {rank} ({own.host.name}) lost the store at {address}:{port} while it waited for the others: rank 0, "
            f"which keeps it, has ended; look at what it says. ({error})"
        ) from error
    missing = verdict["missing"]
    came = {other: _presence(text) for other, text in enumerate(verdict["ranks"]) if other not in missing}
    if missing:
        raise ConnectError(_absent(missing, came, rank, timeout))
    return PrefixStore(f"lnn_lightning/{verdict['session']}", store), list(came.values())


def _presence(text: str) -> Presence:
    told = json.loads(text)
    return Presence(Host(**told["host"]), told["address"])


def _open_store(address: str, port: int, rank: int, timeout: timedelta) -> Store:
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    try:
        return TCPStore(
            address,
            port,
            is_master=rank == 0 and not served,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except DistError as error:
        if rank == 0 and not served:
            raise ConnectError(
                f"Rank 0 cannot open {address}:{port}, where the others are to find it: {error}\nIf the port is taken, "
                "set MASTER_PORT to a free one, the same for all processes. If the loopback interface is down, "
                "`ip link set lo up`."
            ) from error
        raise ConnectError(_unreachable(address, port, rank, timeout)) from error


def _call_together(meeting: Store, rank: int, world_size: int, timeout: timedelta) -> dict[str, Any]:
    """Rank 0's part: shows what all told, and begins when each has found there what it told in this start."""
    deadline, next_word = time.monotonic() + timeout.total_seconds(), time.monotonic() + _WORD_EVERY
    verdict: dict[str, Any] = {"ranks": [None] * world_size, "missing": [], "session": ""}
    for pause in _pauses():
        ranks = [_read(meeting, f"rank{other}") for other in range(world_size)]
        if ranks != verdict["ranks"]:
            verdict = {"ranks": ranks, "missing": [], "session": secrets.token_hex(8)}
            meeting.set("verdict", json.dumps(verdict))
        seen = f"seen/{verdict['session']}"
        missing = [other for other in range(1, world_size) if not meeting.check([f"{seen}/{other}"])]
        if not missing:
            meeting.set(f"begin/{verdict['session']}", "")
            return verdict
        if time.monotonic() > deadline:
            verdict["missing"] = missing
            meeting.set("verdict", json.dumps(verdict))
            time.sleep(2 * _LONGEST_PAUSE)  # the others read it before the store ends with this process
            return verdict
        if time.monotonic() > next_word:
            next_word += _WORD_EVERY
            left = deadline - time.monotonic()
            log.warning(
                f"Waiting for {ranks_in_words(missing)} of {world_size} processes, for up to {left:.0f} s more."
            )
        time.sleep(pause)
    raise AssertionError


def _answer(meeting: Store, rank: int, world_size: int, timeout: timedelta) -> dict[str, Any]:
    """The others' part: waits until rank 0 shows what this rank told in this start, and begins when all have."""
    deadline = time.monotonic() + timeout.total_seconds() + _SLACK
    own, session = _read(meeting, f"rank{rank}"), None
    for pause in _pauses():
        verdict = json.loads(_read(meeting, "verdict") or "{}")
        if len(verdict.get("ranks", [])) == world_size and verdict["ranks"][rank] == own:
            if verdict["missing"]:
                return verdict
            if session != verdict["session"]:
                session = verdict["session"]
                meeting.set(f"seen/{session}/{rank}", "")
            if meeting.check([f"begin/{session}"]):
                return verdict
        if time.monotonic() > deadline:
            raise ConnectError(
                f"Rank {rank} ({socket.gethostname()}) has waited for {timeout.total_seconds() + _SLACK:.0f} s at the "
                "store, and rank 0 did not come to it: look at what rank 0 says."
            )
        time.sleep(pause)
    raise AssertionError


def _read(meeting: Store, key: str) -> str | None:
    return meeting.get(key).decode() if meeting.check([key]) else None


def _pauses() -> Iterator[float]:
    """Short at first; a node that comes late is not worth a busy network."""
    pause = 0.01
    while True:
        yield pause
        pause = min(pause * 1.3, _LONGEST_PAUSE)


def _absent(missing: Sequence[int], came: Mapping[int, Presence], rank: int, timeout: timedelta) -> str:
    hosts = hosts_in_words({other: presence.host for other, presence in came.items()}, came)
    many = f"{len(missing)} of {len(missing) + len(came)} processes"
    return (
        f"{many} did not come within {timeout.total_seconds():.0f} s: {ranks_in_words(missing)}. Those that came are "
        f"on {hosts}; this is rank {rank}. Look at what the missing ones printed. Is the command running on every "
        "node, with the same `num_nodes` and `devices` (under SLURM: with `srun` before it)? "
        "`PTDPStrategy(timeout=...)` is how long is waited."
    )


def _unreachable(address: str, port: int, rank: int, timeout: timedelta) -> str:
    here = socket.gethostname()
    try:
        found = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)})
    except OSError as error:
        reason = (
            f"the name {address!r} cannot be resolved on {here} ({error}): set MASTER_ADDR to the address of rank 0"
        )
    else:
        reason = f"{address!r} is {', '.join(found)} on {here}"
        if all(each.startswith("127.") or each == "::1" for each in found):
            reason += ", which is this host itself: set MASTER_ADDR to an address of rank 0 that all hosts reach"
        else:
            reason += ": is rank 0 running there, and does a firewall let the port through?"
    return (
        f"Rank {rank} cannot reach rank 0 at {address}:{port} within {timeout.total_seconds():.0f} s: {reason}. Under "
        "torchrun MASTER_ADDR is what `--local-addr` of the first node says (docs/cluster.md)."
    )
