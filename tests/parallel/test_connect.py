"""Meeting at the store, and who is said to be missing."""

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from lnn_lightning.parallel.connect import ConnectError, Presence, choose_gloo_interface, connect
from lnn_lightning.parallel.hosts import Host
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
