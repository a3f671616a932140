"""Meeting at the store, and who is said to be missing."""

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from lnn_lightning.parallel.connect import ConnectError, connect
from lnn_lightning.parallel.hosts import Host, Presence
from lnn_lightning.parallel.interface import choose_gloo_interface
from tests.helpers.ranks import free_port


def together(*actions: Callable[[], Any]) -> list[Any]:
    """What each action returns or raises, when they run at the same time."""
    answers: list[Any] = [None] * len(actions)

    def run(index: int) -> None:
        try:
            answers[index] = actions[index]()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            answers[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def test_all_come() -> None:
    port = free_port()
    answers = together(
        *(lambda rank=rank: connect("127.0.0.1", port, rank, 3, timedelta(seconds=20)) for rank in range(3))
    )
    for store, everyone in answers:
        assert everyone == [Presence(Host.here(), "127.0.0.1")] * 3
        store.set("key", "value")
        assert choose_gloo_interface(everyone, 0) is None  # one host


def test_a_store_that_outlives_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun's agent: a second start meets anew, whoever comes first, and sees nothing of the first."""
    port = free_port()
    server = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")

    def come(rank: int, delay: float) -> Any:
        time.sleep(delay)
        store, everyone = connect("127.0.0.1", port, rank, 3, timedelta(seconds=5))
        store.set(f"of{rank}", "")
        return store, len(everyone)

    for delays in ([0, 0, 0], [0, 0.3, 0.6], [0.6, 0.3, 0]):
        answers = together(*(lambda rank=rank, delay=delay: come(rank, delay) for rank, delay in enumerate(delays)))
        assert [count for _, count in answers] == [3] * 3
        assert all(store.check(["of0", "of1", "of2"]) and not store.check(["old"]) for store, _ in answers)
        answers[0][0].set("old", "")
    # one of the first start is not there any more: what it told then does not stand for it
    late = together(*(lambda rank=rank: connect("127.0.0.1", port, rank, 3, timedelta(seconds=1)) for rank in (0, 2)))
    assert all("1 of 3 processes did not come within 1 s: rank 1." in str(error) for error in late)
    del server


def test_a_node_that_never_comes_is_named() -> None:
    """On every rank that came, in bounded time; nobody is left waiting."""
    port, start = free_port(), time.monotonic()
    came = (0, 1, 4)
    answers = together(*(lambda rank=rank: connect("127.0.0.1", port, rank, 6, timedelta(seconds=1)) for rank in came))
    assert time.monotonic() - start < 10
    for rank, error in zip(came, answers, strict=True):
        assert isinstance(error, ConnectError)
        assert "3 of 6 processes did not come within 1 s: ranks 2, 3, 5." in str(error)
        assert f"{Host.here().name} (ranks 0, 1, 4); this is rank {rank}" in str(error)


def test_rank_0_that_never_comes() -> None:
    with pytest.raises(ConnectError, match="which is this host itself: set MASTER_ADDR"):
        connect("127.0.0.1", free_port(), 1, 2, timedelta(seconds=1))


def test_a_name_that_nobody_knows() -> None:
    with pytest.raises(ConnectError, match="'nowhere.invalid' cannot be resolved on .*: set MASTER_ADDR"):
        connect("nowhere.invalid", free_port(), 1, 2, timedelta(seconds=1))


def test_a_port_that_is_taken() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConnectError, match=f"(?s)cannot open 127.0.0.1:{port}.*set MASTER_PORT"):
            connect("127.0.0.1", port, 0, 2, timedelta(seconds=1))


def test_the_interface_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    everyone = [Presence(Host(name, "", 0), "127.0.0.1") for name in ("a", "b")]
    assert choose_gloo_interface(everyone, 0) is None
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"
