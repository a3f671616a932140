"""Runs whose ranks look after each other: what the user is told when one is lost, fails or hangs."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.utilities.exceptions import SIGTERMException, _TunerExitException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lnn_lightning.parallel.errors import HangError, LostRankError
from lnn_lightning.parallel.layout import AXES, Mesh
from lnn_lightning.parallel.watch import Watch, start_watch
from lnn_lightning.parallel.watch.activity import raised_at

if TYPE_CHECKING:
    from lnn_lightning.strategies.mesh import MeshStrategy

SHARE_OF_TIMEOUT = 0.9
"""After this part of a collective's timeout without progress, all ranks say what they are doing."""
_COLLECTIVE = (
    "gloo",
    "nccl",
    "processgroup",
    "tcpstore",
    "connection closed by peer",
    "connection reset by peer",
    "caused pair closure",
)
_TIMEOUT = ("timed out", "timeout")
_NEWS = 3.0
"""Seconds within which the watch hears why a collective failed."""

_watch: tuple[Any, Watch] | None = None
"""The process group of this process, and the watch over its ranks."""


def watch_ranks(strategy: MeshStrategy) -> Watch:
    """The watch over the ranks of the process group; the first call starts it. Collective."""
    global _watch
    group = dist.group.WORLD
    if _watch is not None and _watch[0] is group:
        return _watch[1]
    if _watch is not None:
        _watch[1].leave()
    assert strategy.cluster_environment is not None
    host = strategy.cluster_environment.main_address
    watch = start_watch(
        strategy.global_rank,
        strategy.world_size,
        place_of(strategy.global_rank, strategy.mesh),
        host,
        strategy.num_nodes > 1,
        strategy.broadcast,
        strategy.reduce_boolean_decision,
        lambda flag: strategy.reduce_boolean_decision(flag, all=False),
    )
    if strategy.world_size > 1 and not watch.watched:
        rank_zero_warn(
            f"Some rank could not connect to rank 0 on {host}: only timeouts will notice a rank that is lost, and no "
            "message will name it. Let the hosts of the job reach each other on all TCP ports."
        )
    _watch = (group, watch)
    return watch


def place_of(rank: int, mesh: Mesh) -> str:
    """This rank and its place in the mesh and among the hosts."""
    short = ("pipeline stage", "data rank", "tensor rank")
    places = ", ".join(f"{name} {mesh.rank(axis)}" for name, axis in zip(short, AXES, strict=True))
    return f"rank {rank} ({places}; host {socket.gethostname()}, pid {os.getpid()})"


class WatchedLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher for processes; errors come out of it with their cause in another rank."""

    def __init__(self, strategy: MeshStrategy, num_processes: int) -> None:
        assert strategy.cluster_environment is not None
        super().__init__(strategy.cluster_environment, num_processes, strategy.num_nodes)
        self._strategy = strategy

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        try:
            result = super().launch(function, *args, trainer=trainer, **kwargs)
        except BaseException as error:
            watch = self._strategy.watch_or_none
            explained = _explain(error, watch) if watch is not None else None
            if explained is None:
                raise
            raise explained from error
        if (watch := self._strategy.watch_or_none) is not None:
            watch.end_run(completed=True)
        return result


def _explain(error: BaseException, watch: Watch) -> Exception | None:
    """The error to raise in place of one whose cause is elsewhere; None: it is this rank's own, and all hear of it."""
    if isinstance(error, (SIGTERMException, _TunerExitException)):
        watch.end_run(completed=True)  # all ranks make it at the same place
        return None
    if isinstance(error, LostRankError):
        return None
    collective = _first(error, lambda each: isinstance(each, dist.DistError) or _speaks_of(each, _COLLECTIVE))
    if collective is not None:
        loss = watch.loss(wait=_NEWS)
        if loss is not None:
            return LostRankError(f"{loss.text} This rank cannot go on without it.")
        if watch.watched and _speaks_of(collective, _TIMEOUT):
            with raised_at(error):
                what = (str(collective).splitlines() or [""])[0][:300]
                said = f"A collective timed out ({what}). What each rank is doing:\n{watch.ask_all()}"
            watch.tell_failed(said)
            return HangError(said)
    watch.tell_failed(f"{type(error).__name__}: {error}")
    return None


def _speaks_of(error: BaseException, signs: tuple[str, ...]) -> bool:
    return isinstance(error, (RuntimeError, OSError)) and any(sign in str(error).lower() for sign in signs)


def _first(error: BaseException | None, wanted: Callable[[BaseException], bool]) -> BaseException | None:
    """The error, or the first of those that led to it, that is wanted."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if wanted(error):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None
