"""The watch without a job: several ends of it in one process."""

import json
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from lnn_lightning.parallel.watch import Watch, activity, doing, hub, start_watch, while_doing
from lnn_lightning.parallel.watch.hub import Hub
from lnn_lightning.parallel.watch.start import connect
from lnn_lightning.parallel.watch.stop import StopAgreement
from tests.helpers.ranks import RanksFailed, run_ranks

HOST = "127.0.0.1"


class Job:
    """A hub and some ranks."""

    def __init__(self, size: int) -> None:
        self.hub = Hub(size, HOST, "rank 0 (here)")
        self.hub.start()
        self.ended: list[int] = []
        self.watches = [self.join(rank) for rank in range(size)]

    def join(self, rank: int) -> Watch:
        connection, who = connect(HOST, self.hub.port, self.hello(rank))
        assert connection is not None and who == "rank 0 (here)"
        end = lambda: self.ended.append(rank)  # noqa: E731
        watch = Watch(rank, f"rank {rank} (here)", connection, hub_who=who, tick=0.1, end=end)
        watch.start()
        return watch

    def hello(self, rank: int) -> dict[str, Any]:
        return {"kind": "hello", "rank": rank, "token": self.hub.token, "who": f"rank {rank} (here)"}

    def kill(self, rank: int) -> None:
        """What the kernel does with the connection of a killed process."""
        watch = self.watches[rank]
        assert watch._connection is not None
        watch._left = True
        watch._connection.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for watch in self.watches:
            watch.leave()


@pytest.fixture
def job() -> Iterator[Callable[[int], Job]]:
    with ExitStack() as stack:

        def make(size: int) -> Job:
            made = Job(size)
            stack.callback(made.close)
            return made

        yield make


def eventually(condition: Callable[[], Any], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_a_connection_that_closes_is_a_rank_that_is_gone(job: Callable[[int], Job], capfd: Any) -> None:
    three = job(3)
    for watch in three.watches:
        watch.begin_run()
    with while_doing("backward of micro-batch %d, stage %d", 2, 1):
        assert eventually(lambda: "stage 1" in three.hub._members[1].doing)
        three.kill(1)
        for rank in (0, 2):
            loss = three.watches[rank].loss(wait=5)
            assert loss is not None and loss.rank == 1 and loss.gone
            assert loss.text.startswith("rank 1 (here) is gone")
            assert "last in: backward of micro-batch 2, stage 1" in loss.text
    assert capfd.readouterr().err.count("rank 1 (here) is gone") == 2


def test_an_ordinary_end_is_no_alarm(job: Callable[[int], Job], capfd: Any) -> None:
    three = job(3)
    for watch in three.watches:
        watch.begin_run()
    three.watches[2].end_run(completed=True)
    three.watches[2].leave()
    three.watches[0].end_run(completed=True)
    three.watches[0].leave()
    assert three.watches[1].loss(wait=0.5) is None
    assert capfd.readouterr().err == ""
    three.watches[1].end_run(completed=True)
    three.watches[1].begin_run()  # one run more than the others have made
    loss = three.watches[1].loss(wait=1)
    assert loss is not None and "has ended, while this rank has more to do" in loss.text and not loss.gone


def test_a_failure_concerns_its_run_alone(job: Callable[[int], Job]) -> None:
    two = job(2)
    two.watches[1].begin_run()
    two.watches[1].tell_failed("ValueError: no")
    two.watches[1].end_run(completed=False)
    assert two.watches[0].loss(wait=0.3) is None
    two.watches[0].begin_run()
    loss = two.watches[0].loss()
    assert loss is not None and loss.text == "rank 1 (here) failed: ValueError: no"
    two.watches[0].end_run(completed=False)
    for watch in two.watches:
        watch.begin_run()
    assert two.watches[0].loss(wait=0.3) is None


def test_a_run_that_does_not_end_by_itself_is_ended(job: Callable[[int], Job], capfd: Any) -> None:
    three = job(3)
    for watch in three.watches[:2]:
        watch.grace = 0.3
        watch.begin_run()
    three.watches[0].end_run(completed=True)
    three.kill(2)
    assert eventually(lambda: three.ended)
    assert set(three.ended) == {1}
    assert "did not come to an end by itself" in capfd.readouterr().err


def test_ranks_that_all_fail_come_to_their_end_by_themselves(job: Callable[[int], Job], capfd: Any) -> None:
    """They may save what they can, together, for longer than the grace."""
    three = job(3)
    for watch in three.watches:
        watch.grace = 0.3
        watch.begin_run()
    three.watches[0].tell_failed("KeyboardInterrupt: ")
    three.watches[1].tell_failed("KeyboardInterrupt: ")
    assert eventually(lambda: three.ended)
    assert set(three.ended) == {2}
    assert "rank 0 (here) failed: KeyboardInterrupt" in capfd.readouterr().err
    three.kill(2)
    assert eventually(lambda: {*three.ended} == {0, 1, 2})


def test_without_the_hub_rank_0_is_gone(job: Callable[[int], Job]) -> None:
    two = job(2)
    two.watches[1].grace = 0.3
    two.watches[1].begin_run()
    two.watches[0]._left = True
    for peer in list(two.hub._members.values()):
        peer.connection.socket.shutdown(socket.SHUT_RDWR)
    loss = two.watches[1].loss(wait=5)
    assert loss is not None and loss.text.startswith("rank 0 (here) is gone")
    assert eventually(lambda: two.ended)


def test_strangers_are_not_let_in(job: Callable[[int], Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "HELLO_WITHIN", 0.2)
    two = job(2)
    for hello in (
        {**two.hello(0), "token": "0" * 32},
        {**two.hello(0), "rank": 7},
        two.hello(1),  # there is one
        {"kind": "gone", "rank": 1},
        {**two.hello(0), "who": "x" * hub.HELLO_LIMIT},
    ):
        assert connect(HOST, two.hub.port, hello) == (None, "")
    with socket.create_connection((HOST, two.hub.port), timeout=5) as sock:
        sock.sendall(b"[" * 3000 + b"\n")
        assert sock.recv(10) == b""
    with socket.create_connection((HOST, two.hub.port), timeout=5) as sock:
        sock.sendall(json.dumps(two.hello(1)).encode())  # without an end, for ever
        assert sock.recv(10) == b""
    assert two.watches[0].loss() is None and two.watches[1].ask_all().count("\n") == 1


def test_what_each_rank_is_doing(job: Callable[[int], Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "ANSWER_WITHIN", 0.5)
    three = job(3)
    doing("waiting for a batch")
    assert eventually(lambda: three.hub._members[2].doing == "waiting for a batch")
    stopped = three.watches[2]
    stopped._handle = lambda *_: None  # type: ignore[method-assign]
    lines = three.watches[1].ask_all().splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("  rank 2 (here): DOES NOT ANSWER") and lines[0].endswith("ago: waiting for a batch")
    assert lines[1].startswith("  rank 0 (here): waiting for a batch for ") and "test_watch.py:" in lines[1]


def test_the_line_of_the_user() -> None:
    def inner() -> str:
        found: list[str] = []
        thread = threading.Thread(target=lambda: found.append(activity.main_thread_line()))
        thread.start()
        thread.join()
        return found[0]

    innermost, caller = inner().split(", called from ")
    assert "threading.py" in innermost
    assert caller.startswith(f"{__file__}:") and caller.endswith("(inner)")


def test_all_stop_at_the_same_check(job: Callable[[int], Job]) -> None:
    """Ranks run ahead of each other, as in a pipeline; several ask at once."""
    size = 4
    four = job(size)
    stopped: dict[int, tuple[int, tuple[str, ...]]] = {}
    ahead = threading.Semaphore(3)

    def run(rank: int) -> None:
        rng = random.Random(rank)
        for check in range(100_000):
            time.sleep(rng.random() * 1e-3)
            if rank == 0 and check % 2:
                ahead.release()
            elif rank == 1 and check % 2:
                ahead.acquire(timeout=0.01)
            if reasons := four.watches[rank].check_stop():
                stopped[rank] = (check, reasons)
                return

    for _ in range(3):
        stopped.clear()
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        four.watches[2].request_stop("SIGTERM")
        four.watches[2].request_stop("SIGTERM")
        four.watches[1].request_stop("SIGTERM")
        for thread in threads:
            thread.join(10)
        assert len(stopped) == size and len(set(stopped.values())) == 1
        assert next(iter(stopped.values()))[1] == ("SIGTERM",)
        assert eventually(lambda: four.hub._stop_round is None)


def test_a_promise_is_taken_back() -> None:
    agreement = StopAgreement()
    assert agreement.check() == ()
    assert agreement.hold() == 2
    threading.Timer(0.2, agreement.release).start()
    begin = time.monotonic()
    assert agreement.check() == () and time.monotonic() - begin > 0.1


def test_alone_or_without_a_hub() -> None:
    alone = Watch(0, "rank 0")
    alone.start()
    alone.begin_run()
    assert alone.check_stop() == () and alone.loss(wait=5) is None and alone.ask_all() == ""
    alone.request_stop("SIGTERM")
    assert alone.check_stop() == ("SIGTERM",) and alone.check_stop() == ()
    voter = Watch(0, "rank 0", vote=lambda mine: True)
    assert voter.check_stop() == ("another rank",)


# ------------------------------------------------------------------------------------------------ real processes


def _killed_with_a_child(rank: int, world_size: int) -> None:
    import torch.distributed as dist

    def share(text: str) -> str:
        box = [text]
        dist.broadcast_object_list(box)
        return box[0]

    watch = start_watch(rank, world_size, f"rank {rank}", "localhost", False, share, bool, bool)
    assert watch.watched
    watch.begin_run()
    if rank == 1:
        if os.fork() == 0:
            time.sleep(3)  # as a worker of a data loader that outlives its rank for a while
            os._exit(0)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    loss = watch.loss(wait=1.5)
    sys.exit(loss.text if loss is not None else "nothing heard")


def test_a_forked_child_does_not_hold_the_connection() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_killed_with_a_child, 2)
    assert "rank 1 is gone" in caught.value.tracebacks[0]
