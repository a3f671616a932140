"""Functions run on several ranks, quickly.

Importing torch, Lightning and transformers costs seconds a process. So the imports are done once, in a fork server that
lives as long as the test session (`preload`), and every job forks its ranks from it: a rank starts in some hundredths
of a second, with everything imported and nothing else: no process group, environment, random state, default dtype or
garbage is left over from the job before. The life of a job:

* the parent forks `world_size` workers, hands each its job through a pipe and waits for the answers;
* a worker that succeeds stays alive until all have answered (its store or its sockets may still be needed);
* a worker that fails answers with its traceback and exits at once, as under torchrun; the others get `GRACE` seconds
  to notice, then say where they hang and are killed;
* whatever happens, no worker outlives the call.

What a function returns travels by pickle: tensors and plain values, no live objects.
"""

import contextlib
import faulthandler
import multiprocessing as mp
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

GRACE = 10.0
"""Seconds the other ranks get to end by themselves once one has failed."""

GLOO_TIMEOUT = timedelta(seconds=60)

os.environ.setdefault("OMP_NUM_THREADS", "1")
_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["__main__", "tests.helpers.preload"])


class RanksFailed(RuntimeError):
    """One or more ranks failed; `tracebacks` holds what each of them said, the first to fail first."""

    def __init__(self, what: str, tracebacks: dict[int, str]) -> None:
        self.tracebacks = tracebacks
        texts = [f"----- rank {rank} -----\n{text.rstrip()}" for rank, text in tracebacks.items()]
        super().__init__("\n".join([what, *texts]))


@dataclass(frozen=True)
class _Job:
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    environment: dict[str, str]
    directory: str
    init_distributed: bool


@dataclass
class _Worker:
    rank: int
    process: mp.process.BaseProcess
    pipe: Connection
    output: Path
    stacks: Path
    answered: bool = False
    result: Any = None


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """Run the module-level `fn(rank, world_size, *args)` on `world_size` ranks, gloo ready; the results by rank."""
    return _run(fn, world_size, args, timeout, init_distributed=True)


def launch_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """As `run_ranks`, but leave it to `fn` (a Trainer) to initialise torch.distributed from torchrun's environment."""
    return _run(fn, world_size, args, timeout, init_distributed=False)


_PORTS = 5000
_next_port = os.getpid()


def free_port() -> int:
    """A TCP port that was free a moment ago, and that nobody is given by chance in the next one.

    Each worker of pytest-xdist has ports of its own, below those that the system gives to outgoing connections.
    """
    global _next_port
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 4
    for _ in range(_PORTS):
        _next_port += 1
        port = 12000 + worker * _PORTS + _next_port % _PORTS
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port is free")


def torchrun_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The variables torchrun sets for one rank of a job on one machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "ROLE_WORLD_SIZE": str(world_size),
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "tests",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "OMP_NUM_THREADS": "1",
    }


def shutdown() -> None:
    """End the fork server; the next job starts a new one."""
    from multiprocessing.forkserver import _forkserver  # there is no public way

    with contextlib.suppress(Exception):
        _forkserver._stop()


def _run(
    fn: Callable[..., Any], world_size: int, args: tuple[Any, ...], timeout: float, *, init_distributed: bool
) -> list[Any]:
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory, _forked(world_size, Path(directory)) as workers:
        deadline = time.monotonic() + timeout
        for worker in workers:
            environment = {**os.environ, **torchrun_environment(worker.rank, world_size, port)}
            job = _Job(fn, args, environment, os.getcwd(), init_distributed)
            worker.pipe.send_bytes(pickle.dumps(job))
        tracebacks, timed_out = _collect(workers, deadline)
        if tracebacks or timed_out:
            _explain_silence(workers, tracebacks, timed_out)
        _show_output(workers)
        if tracebacks:
            what = f"no answer within {timeout:.0f} s" if timed_out else "failed"
            raise RanksFailed(f"{fn.__qualname__} on {world_size} ranks: {what}", tracebacks)
        return [worker.result for worker in workers]


@contextlib.contextmanager
def _forked(world_size: int, directory: Path) -> Iterator[list[_Worker]]:
    workers: list[_Worker] = []
    try:
        for rank in range(world_size):
            output, stacks = directory / f"output-{rank}", directory / f"stacks-{rank}"
            pipe, child_pipe = _context.Pipe()
            process = _context.Process(target=_work, args=(child_pipe, str(output), str(stacks)), name=f"rank-{rank}")
            process.start()
            child_pipe.close()
            workers.append(_Worker(rank, process, pipe, output, stacks))
        yield workers
    finally:
        for worker in workers:
            worker.pipe.close()  # the sign for a worker that waits to go
        for worker in workers:
            worker.process.join(2.0 if worker.answered else 0.0)
            if worker.process.is_alive():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(worker.process.pid, signal.SIGKILL)  # with its data loader workers
                worker.process.kill()
            worker.process.join()


def _collect(workers: list[_Worker], deadline: float) -> tuple[dict[int, str], bool]:
    """Wait for the answers: the tracebacks of the ranks that failed, and whether time ran out without one."""
    tracebacks: dict[int, str] = {}
    while waiting := {worker.pipe: worker for worker in workers if not worker.answered}:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            return tracebacks, not tracebacks
        for pipe in ready:
            worker = waiting[pipe]
            worker.answered = True
            failure = _receive(worker)
            if failure is not None:
                tracebacks[worker.rank] = failure
                deadline = min(deadline, time.monotonic() + GRACE)
    return tracebacks, False


def _receive(worker: _Worker) -> str | None:
    """Take a worker's answer; its traceback if it failed."""
    try:
        succeeded, value = pickle.loads(worker.pipe.recv_bytes())
    except (EOFError, OSError):
        worker.process.join(5.0)
        return f"the process died without a word (exit code {worker.process.exitcode})"
    if not succeeded:
        return value
    worker.result = value
    return None


def _explain_silence(workers: list[_Worker], tracebacks: dict[int, str], timed_out: bool) -> None:
    """Let the ranks that have not answered write down where they are."""
    silent = [worker for worker in workers if not worker.answered]
    for worker in silent:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.process.pid, signal.SIGUSR1)
    if silent:
        time.sleep(0.5)
    reason = "no answer in time" if timed_out else f"still running {GRACE:.0f} s after another rank failed"
    for worker in silent:
        stacks = worker.stacks.read_text(errors="replace") if worker.stacks.exists() else ""
        tracebacks[worker.rank] = f"{reason}; killed. It was here:\n{stacks}"


def _show_output(workers: list[_Worker]) -> None:
    """Print what the ranks printed, so that pytest shows it with a failed test."""
    for worker in workers:
        text = worker.output.read_text(errors="replace") if worker.output.exists() else ""
        if text.strip():
            print(f"----- output of rank {worker.rank} -----\n{text.rstrip()}")


def _work(pipe: Connection, output: str, stacks: str) -> None:
    """The life of a worker: one job."""
    os.setsid()
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    stacks_file = open(stacks, "w")  # noqa: SIM115 (lives as long as the process)
    faulthandler.register(signal.SIGUSR1, stacks_file, all_threads=True)
    try:
        job_bytes = pipe.recv_bytes()
    except EOFError:
        os._exit(0)
    try:
        succeeded, answer = True, pickle.dumps((True, _run_job(job_bytes)))
    except BaseException:  # a SystemExit or KeyboardInterrupt in a rank is a failure to report, too
        succeeded, answer = False, pickle.dumps((False, traceback.format_exc()))
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(OSError, EOFError):
        pipe.send_bytes(answer)
        if succeeded:
            pipe.recv_bytes()  # until the parent lets go
    os._exit(0 if succeeded else 1)


def _run_job(job_bytes: bytes) -> Any:
    job: _Job = pickle.loads(job_bytes)
    os.environ.clear()
    os.environ.update(job.environment)
    os.chdir(job.directory)
    torch.set_num_threads(1)
    if job.init_distributed:
        dist.init_process_group("gloo", timeout=GLOO_TIMEOUT)
    return job.fn(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), *job.args)
