"""Every rank's end of the watch: hears what became of the others, tells the user, and ends a job that cannot go on."""

from __future__ import annotations

import logging
import multiprocessing
import os
import selectors
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic, sleep

from lnn_lightning.parallel.watch.activity import activity, describe
from lnn_lightning.parallel.watch.hub import ANSWER_WITHIN, Hub
from lnn_lightning.parallel.watch.stop import StopAgreement
from lnn_lightning.parallel.watch.wire import Connection, Frame

log = logging.getLogger(__name__)

GRACE = 10.0
"""Seconds a run gets to end by itself once it cannot go on; collectives of NCCL never return then."""
_TEXT_LIMIT = 1500
_SAY_AFTER = 1.0
"""Seconds behind which a run that has not ended by itself says why it must: most end with an error that says it."""
_MANY = 2**31


@dataclass(frozen=True)
class Loss:
    """Why a run cannot go on: what became of another rank.

    Attributes:
        rank: that rank.
        text: what to tell the user.
        gone: its process vanished; otherwise it failed, or ended too early.
        run: number of the run that it concerns and all behind it; None: any.
        only: it concerns that run alone.
    """

    rank: int
    text: str
    gone: bool
    run: int | None = None
    only: bool = False

    def concerns(self, run: int) -> bool:
        """Whether run number ``run`` cannot go on."""
        return self.run is None or (run == self.run if self.only else run >= self.run)


class Watch:
    """Looks after the other ranks in a daemon thread. Without a connection (``None``) there are no others.

    Args:
        rank: this rank.
        who: this rank's place in the job, for messages.
        connection: to the hub.
        hub: the hub, in rank 0.
        hub_who: rank 0's place in the job, for messages.
        tick: seconds between what the hub hears of this rank.
        vote: a collective "does any rank say so?", where there are others but no connection to a hub.
        end: ends the process when the grace is over.
    """

    def __init__(
        self,
        rank: int,
        who: str,
        connection: Connection | None = None,
        hub: Hub | None = None,
        hub_who: str = "rank 0",
        tick: float = 1.0,
        vote: Callable[[bool], bool] | None = None,
        end: Callable[[], None] | None = None,
    ) -> None:
        self.rank, self.who, self.grace = rank, who, GRACE
        self._hub_who, self._tick_seconds, self._last_tick = hub_who, tick, 0.0
        self._connection, self._hub, self._vote, self._end = connection, hub, vote, end or end_process
        self.agreement = StopAgreement()
        self.patience: float | None = None
        self._runs, self._in_run, self._failing, self._completed = 0, False, False, 0
        self._losses: list[Loss] = []
        self._deadline: float | None = None
        self._said_why = False
        self._reported_at: float | None = None
        self._heard, self._report_came, self._sent = threading.Event(), threading.Event(), threading.Event()
        self._report = ""
        self._outgoing: deque[Frame] = deque()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._pending_reasons: deque[str] = deque()
        self._left = False
        self._thread: threading.Thread | None = None

    # ---------------------------------------------------------------- for the main thread

    @property
    def watched(self) -> bool:
        """Whether there is a connection to the hub."""
        return self._connection is not None

    def begin_run(self, patience: float | None = None) -> None:
        """From here on the job cannot do without any rank.

        Args:
            patience: seconds with no progress behind which all ranks are asked what they are doing.
        """
        self.patience = patience
        self._runs += 1
        self._in_run, self._failing, self._said_why = True, False, False
        self._consider()

    def end_run(self, completed: bool) -> None:
        """The run is over; ``completed``: not by an error."""
        self._in_run, self._deadline = False, None
        if completed:
            self._completed = self._runs

    def loss(self, wait: float = 0.0) -> Loss | None:
        """Why the current run cannot go on, if it cannot; waits a moment for news."""
        deadline = monotonic() + (wait if self.watched else 0.0)
        while True:
            self._heard.clear()
            found = [loss for loss in self._losses if loss.concerns(self._runs)]
            if found:
                return found[0]
            if not self._heard.wait(max(0.0, deadline - monotonic())) and monotonic() >= deadline:
                return None

    def tell_failed(self, error: str) -> None:
        """The run failed here: the others cannot go on."""
        self._failing, self._deadline = True, None
        self._consider()
        self._sent.clear()
        self._send({"kind": "failed", "run": self._runs, "error": error[:_TEXT_LIMIT]})
        if self.watched:
            self._sent.wait(1.0)  # the process may end at once

    def ask_all(self) -> str:
        """What each rank is doing, a line for each."""
        if not self.watched:
            return ""
        self._report_came.clear()
        self._send({"kind": "ask"})
        if not self._report_came.wait(ANSWER_WITHIN + 3.0):
            return (
                f"  {self._hub_who}: DOES NOT ANSWER (its process is stopped, or does not get to run). It is the one "
                f"that knows of the others.\n  {self.who}: {describe()}"
            )
        return self._report

    def request_stop(self, reason: str) -> None:
        """Asks all ranks for a stop. May be called in a signal handler."""
        self._pending_reasons.append(reason)
        if self.watched:
            self._wake()

    def check_stop(self) -> tuple[str, ...]:
        """All ranks call this at the same places: the reasons of a stop that all make here, otherwise nothing."""
        if self.watched:
            reasons = self.agreement.check()
            if reasons:
                self._send({"kind": "stopped"})
            return reasons
        if self._vote is not None and not self._vote(bool(self._pending_reasons)):
            return ()
        reasons = tuple(dict.fromkeys(self._pending_reasons)) or (("another rank",) if self._vote is not None else ())
        self._pending_reasons.clear()
        return reasons

    def start(self) -> None:
        """Begins to listen."""
        if self.watched:
            self._thread = threading.Thread(target=self._listen, name="rank-watch", daemon=True)
            self._thread.start()

    def leave(self) -> None:
        """An ordinary end: the others need not worry."""
        if self._left:
            return
        self._left = True
        if self._thread is not None:
            self._send({"kind": "goodbye", "run": self._completed})
            self._thread.join(2.0)
            if self._hub is not None:
                self._hub.said_goodbye.wait(2.0)

    def close_in_child(self) -> None:
        """In a forked process: it must not keep the connection open when this process is killed."""
        self._left = True
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._hub is not None:
            self._hub.close_in_child()
        self._vote = None

    def _send(self, frame: Frame) -> None:
        if self.watched:
            self._outgoing.append(frame)
            self._wake()

    def _wake(self) -> None:
        with suppress(OSError):  # full: the thread will wake anyway
            os.write(self._wake_write, b"x")

    # ---------------------------------------------------------------- the thread

    def _listen(self) -> None:
        connection = self._connection
        assert connection is not None
        try:
            self._serve(connection)
        except Exception:
            log.exception("This rank's watch over the others ended; only timeouts notice a lost rank now.")
            connection.send({"kind": "goodbye", "run": _MANY})
        finally:
            self.agreement.release()

    def _serve(self, connection: Connection) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(connection, selectors.EVENT_READ)
            selector.register(self._wake_read, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select(timeout=self._tick_seconds)}
                if self._wake_read in ready:
                    os.read(self._wake_read, 4096)
                while self._pending_reasons:
                    connection.send({"kind": "stop", "reason": self._pending_reasons.popleft()})
                while self._outgoing:
                    frame = self._outgoing.popleft()
                    connection.send(frame)
                    if frame["kind"] == "goodbye":
                        return
                    if frame["kind"] == "failed":
                        self._sent.set()
                if connection in ready and not self._hear(connection):
                    break
                self._tick(connection)
        self.agreement.release()
        while not self._left:  # rank 0 is gone, or has ended
            self._look_at_the_clock()
            sleep(0.2)

    def _hear(self, connection: Connection) -> bool:
        frames, still_open = connection.receive()
        for frame in frames:
            self._handle(connection, frame)
        if not still_open and not self._left and not any(loss.rank == 0 and not loss.only for loss in self._losses):
            self._lost(Loss(0, f"{self._hub_who} is gone: its process ended without a word.", gone=True))
        return still_open

    def _handle(self, connection: Connection, frame: Frame) -> None:
        kind, rank, who = frame["kind"], frame.get("rank", 0), frame.get("who")
        if kind == "gone":
            text = (
                f"{who} is gone: its process ended without a word (killed, out of memory, or its machine failed). It "
                f"was last in: {frame.get('doing')} ({frame.get('seen')} s before)."
            )
            self._lost(Loss(rank, text, gone=True))
        elif kind == "failed":
            text = f"{who} failed: {frame.get('error')}"
            self._lost(Loss(rank, text, gone=False, run=frame.get("run"), only=True))
        elif kind == "left":
            text = f"{who} has ended, while this rank has more to do that needs it."
            self._lost(Loss(rank, text, gone=False, run=int(frame.get("run") or 0) + 1))
        elif kind == "question":
            connection.send({"kind": "answer", "text": describe()[:_TEXT_LIMIT]})
        elif kind == "report":
            self._report = str(frame.get("text"))
            self._report_came.set()
        elif kind == "hold":
            connection.send({"kind": "promise", "check": self.agreement.hold()})
        elif kind == "release":
            self.agreement.release()
        elif kind == "stop_at":
            self.agreement.decide(int(frame["check"]), tuple(frame["reasons"]))

    def _lost(self, loss: Loss) -> None:
        self._losses.append(loss)
        if loss.gone:
            self.say(f"{loss.text} Here: {activity()[0]}.")
            self.agreement.release()
        self._consider()
        self._heard.set()

    def _consider(self) -> None:
        """Begins the grace of a run that cannot go on; one that failed here, too, comes to its end with the others."""
        losses = [loss for loss in self._losses if loss.concerns(self._runs) and (loss.gone or not self._failing)]
        if self._in_run and self._deadline is None and losses:
            self._deadline = monotonic() + self.grace

    def _tick(self, connection: Connection) -> None:
        self._look_at_the_clock()
        connection.flush()
        if monotonic() - self._last_tick > self._tick_seconds:
            self._last_tick = monotonic()
            connection.send({"kind": "doing", "text": activity()[0][:_TEXT_LIMIT]})

    def _look_at_the_clock(self) -> None:
        deadline = self._deadline
        if deadline is not None and monotonic() > deadline:
            self._end_run_that_hangs()
        elif deadline is not None and not self._said_why and monotonic() > deadline - self.grace + _SAY_AFTER:
            self._said_why = True
            if (loss := self.loss()) is not None and not loss.gone:
                self.say(loss.text)
        seconds = activity()[1]
        if self.rank == 0 and self._in_run and self.patience is not None and seconds > self.patience:
            begun = monotonic() - seconds
            if self._reported_at is None or begun > self._reported_at:
                self._reported_at = monotonic()
                threading.Thread(target=self._say_what_all_do, args=(seconds,), daemon=True).start()

    def _say_what_all_do(self, seconds: float) -> None:
        self.say(f"no progress for {seconds:.0f} s. What each rank is doing:\n{self.ask_all()}")

    def _end_run_that_hangs(self) -> None:
        loss = self.loss()
        why = loss.text if loss is not None else "another rank is lost."
        self.say(f"{why} This rank did not come to an end by itself ({describe()}); its process ends now.")
        self._end()

    def say(self, text: str) -> None:
        """On stderr, at once."""
        with suppress(OSError, ValueError):
            print(f"[lnn_lightning, rank {self.rank}] {text}", file=sys.stderr, flush=True)


def end_process() -> None:
    """Ends this process and its workers hard: its main thread may be in a call that never returns."""
    for child in multiprocessing.active_children():
        child.terminate()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(1)
