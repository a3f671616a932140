"""The hub in rank 0: knows every rank by its open connection, and passes on what one of them has to say to all."""

from __future__ import annotations

import hmac
import logging
import secrets
import selectors
import socket
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from lnn_lightning.parallel.watch.wire import Connection, Frame

log = logging.getLogger(__name__)

ANSWER_WITHIN = 3.0
"""Seconds a rank gets to say what it is doing."""
PROMISE_WITHIN = 10.0
"""Seconds all ranks get to promise where they wait for the agreement on a stop."""
HELLO_WITHIN = 10.0
HELLO_LIMIT = 4096
REPORT_LIMIT = 24_000


@dataclass
class _Member:
    connection: Connection
    who: str
    doing: str = "starting"
    heard: float = field(default_factory=monotonic)
    left: bool = False


@dataclass
class _Question:
    """What is each rank doing?"""

    askers: set[int]
    waiting: set[int]
    deadline: float
    answers: dict[int, str] = field(default_factory=dict)


@dataclass
class _Stop:
    """A stop being agreed on (``target`` unknown) or under way."""

    reasons: list[str]
    waiting: set[int]
    deadline: float
    target: int = 0
    decided: bool = False
    made: set[int] = field(default_factory=set)


class Hub(threading.Thread):
    """Listens in a daemon thread of rank 0.

    Args:
        world_size: number of ranks.
        host: name or address to listen on; empty: on all interfaces.
        who: rank 0's place in the job, for messages.
    """

    def __init__(self, world_size: int, host: str, who: str) -> None:
        super().__init__(name="rank-watch-hub", daemon=True)
        self.world_size, self.who, self.token = world_size, who, secrets.token_hex(16)
        self.said_goodbye = threading.Event()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=max(128, world_size))
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._members: dict[int, _Member] = {}
        self._strangers: dict[Connection, float] = {}
        self._question: _Question | None = None
        self._stop_round: _Stop | None = None

    # ---------------------------------------------------------------- life

    def run(self) -> None:
        """Until the process ends."""
        try:
            self._selector.register(self._listener, selectors.EVENT_READ)
            while True:
                for key, events in self._selector.select(timeout=0.5):
                    if key.fileobj is self._listener:
                        self._welcome_stranger()
                    elif events & selectors.EVENT_WRITE:
                        key.fileobj.flush()  # type: ignore[union-attr]
                    else:
                        self._read(key.fileobj, key.data)  # type: ignore[arg-type]
                self._look_at_the_clock()
                self._watch_for_room()
        except Exception:
            log.exception("The watch over the ranks ended; only timeouts notice a lost rank now.")
            self._tell({"kind": "unwatched"}, self._members)

    def close_in_child(self) -> None:
        """In a forked process: it must not keep the connections open."""
        self._listener.close()
        for connection in [*self._strangers, *(member.connection for member in self._members.values())]:
            connection.close()

    def _welcome_stranger(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        if len(self._strangers) > self.world_size + 16:
            sock.close()
            return
        connection = Connection(sock, HELLO_LIMIT)
        self._strangers[connection] = monotonic() + HELLO_WITHIN
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: Connection, rank: int | None) -> None:
        frames, still_open = connection.receive()
        for frame in frames:
            if rank is None:
                rank = self._introduce(connection, frame)
                still_open = still_open and rank is not None
            else:
                self._handle(rank, frame)
        if not still_open:
            self._drop(connection, rank)

    def _introduce(self, connection: Connection, frame: Frame) -> int | None:
        rank, token, who = frame.get("rank"), frame.get("token"), frame.get("who")
        known = isinstance(token, str) and hmac.compare_digest(token.encode(), self.token.encode())
        if frame["kind"] != "hello" or not known or not isinstance(who, str):
            return None
        if not isinstance(rank, int) or not 0 <= rank < self.world_size or rank in self._members:
            return None
        del self._strangers[connection]
        connection.line_limit *= 16
        self._members[rank] = _Member(connection, who)
        self._selector.modify(connection, selectors.EVENT_READ, rank)
        connection.send({"kind": "welcome", "who": self.who})
        return rank

    def _drop(self, connection: Connection, rank: int | None) -> None:
        self._strangers.pop(connection, None)
        self._selector.unregister(connection)
        connection.close()
        if rank is None:
            return
        member = self._members.pop(rank)
        self._no_longer_wait_for(rank)
        if not member.left:
            seen = monotonic() - member.heard
            self._tell(
                {"kind": "gone", "rank": rank, "who": member.who, "doing": member.doing, "seen": round(seen, 1)},
                self._members,
            )

    def _look_at_the_clock(self) -> None:
        now = monotonic()
        for connection in [each for each, deadline in self._strangers.items() if deadline < now]:
            self._drop(connection, None)
        if self._question is not None and self._question.deadline < now:
            self._answer()
        stop = self._stop_round
        if stop is not None and not stop.decided and stop.deadline < now:
            self._tell({"kind": "release"}, self._members)
            self._begin_stop(stop.reasons)

    def _watch_for_room(self) -> None:
        for rank, member in self._members.items():
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if member.connection.has_unsent else 0)
            if self._selector.get_key(member.connection).events != events:
                self._selector.modify(member.connection, events, rank)

    def _tell(self, frame: Frame, ranks: Iterable[int]) -> None:
        for rank in list(ranks):
            if rank in self._members:
                self._members[rank].connection.send(frame)

    # ---------------------------------------------------------------- what members say

    def _handle(self, rank: int, frame: Frame) -> None:
        member, kind = self._members[rank], frame["kind"]
        member.heard = monotonic()
        if kind == "doing":
            member.doing = str(frame.get("text"))
        elif kind == "failed":
            told = {"kind": "failed", "rank": rank, "who": member.who, "run": frame.get("run")}
            self._tell({**told, "error": str(frame.get("error"))}, self._members.keys() - {rank})
        elif kind == "goodbye":
            member.left = True
            told = {"kind": "left", "rank": rank, "who": member.who, "run": frame.get("run")}
            self._tell(told, self._members.keys() - {rank})
            self._no_longer_wait_for(rank)
            if rank == 0:
                self.said_goodbye.set()
        elif kind == "ask":
            self._ask(rank)
        elif kind == "answer" and self._question is not None:
            self._question.answers[rank] = str(frame.get("text"))
            self._question.waiting.discard(rank)
            if not self._question.waiting:
                self._answer()
        elif kind == "stop":
            if self._stop_round is None:
                self._begin_stop([str(frame.get("reason"))])
            elif not self._stop_round.decided and frame.get("reason") not in self._stop_round.reasons:
                self._stop_round.reasons.append(str(frame.get("reason")))
        elif kind == "promise":
            self._promised(rank, frame.get("check"))
        elif kind == "stopped" and self._stop_round is not None:
            self._stop_round.made.add(rank)
            if self._stop_round.made >= self._present():
                self._stop_round = None

    def _present(self) -> set[int]:
        return {rank for rank, member in self._members.items() if not member.left}

    def _no_longer_wait_for(self, rank: int) -> None:
        if self._question is not None:
            self._question.waiting.discard(rank)
        if self._stop_round is not None:
            self._promised(rank, 0)

    # ---------------------------------------------------------------- what is each rank doing?

    def _ask(self, rank: int) -> None:
        if self._question is not None:
            self._question.askers.add(rank)
            return
        present = self._present()
        self._question = _Question({rank}, present, monotonic() + ANSWER_WITHIN)
        self._tell({"kind": "question"}, present)

    def _answer(self) -> None:
        assert self._question is not None
        question, self._question = self._question, None
        silent_first = sorted(range(self.world_size), key=lambda rank: (rank in question.answers, rank))
        text = "\n".join(f"  {self._line_about(rank, question)}" for rank in silent_first)
        if len(text) > REPORT_LIMIT:
            text = text[:REPORT_LIMIT] + "\n  ... (cut)"
        self._tell({"kind": "report", "text": text}, question.askers)

    def _line_about(self, rank: int, question: _Question) -> str:
        if rank not in self._members:
            return f"rank {rank}: is gone"
        if rank in question.answers:
            return f"{self._members[rank].who}: {question.answers[rank]}"
        member = self._members[rank]
        if member.left:
            return f"{member.who}: has ended"
        return (
            f"{member.who}: DOES NOT ANSWER (its process is stopped, or does not get to run); last heard of "
            f"{monotonic() - member.heard:.0f} s ago: {member.doing}"
        )

    # ---------------------------------------------------------------- a stop that all make at the same check

    def _begin_stop(self, reasons: list[str]) -> None:
        present = self._present()
        self._stop_round = _Stop(reasons, set(present), monotonic() + PROMISE_WITHIN)
        self._tell({"kind": "hold"}, present)

    def _promised(self, rank: int, check: Any) -> None:
        stop = self._stop_round
        if stop is None or stop.decided or not isinstance(check, int):
            return
        stop.target = max(stop.target, check)
        stop.waiting.discard(rank)
        if not stop.waiting:
            stop.decided = True
            self._tell({"kind": "stop_at", "check": stop.target, "reasons": stop.reasons}, self._members)
