"""Hosts on one machine: each a network, name and mount namespace, joined by a veth pair.

A host's own name points to its loopback, as on Debian; the other's name to its address. Needs root and `ip`.
"""

import contextlib
import functools
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Host:
    """One of the hosts. `prefix` in front of a command runs it there."""

    name: str
    address: str
    namespace: str
    prefix: tuple[str, ...]

    def start(self, command: Sequence[str | Path], output: Path, **environment: str) -> subprocess.Popen[bytes]:
        """Start a command here."""
        return start([*self.prefix, *map(str, command)], output, **environment)

    def with_disk(self, path: Path) -> tuple[str, ...]:
        """The prefix for commands that have a disk of their own over a path."""
        return (*self.prefix, "sh", "-ec", f'mount -t tmpfs none {shlex.quote(str(path))}; exec "$@"', "sh")


def start(command: Sequence[str], output: Path, **environment: str) -> subprocess.Popen[bytes]:
    """Start a command from the root of the checkout, in a process group of its own."""
    with open(output, "wb") as sink:
        return subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@functools.cache
def why_not() -> str | None:
    """Why hosts cannot be made here; None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in "ip", "unshare", "mount":
        if shutil.which(tool) is None:
            return f"network namespaces need the command `{tool}`"
    try:
        with two_hosts() as hosts:
            for host in hosts:
                _run(*host.prefix, "true")
    except (subprocess.SubprocessError, OSError) as error:
        said = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip()
        return f"no network namespaces here: {error} {said}"
    return None


def need_namespaces() -> None:
    """Skip the test where hosts cannot be made."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts that reach each other; whatever was started there ends with them."""
    tag = f"{os.getpid() % 100000}{int(time.monotonic() * 1000) % 1000}"
    net = f"10.{77 + os.getpid() % 100}.{int(time.monotonic()) % 250}"
    namespaces, links, addresses = (
        [f"lnn{tag}{i}" for i in "ab"],
        [f"v{tag}{i}" for i in "ab"],
        [f"{net}.1", f"{net}.2"],
    )
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hosts-")))
        for namespace in namespaces:
            _run("ip", "netns", "add", namespace)
            stack.callback(_remove, namespace)
        _run("ip", "link", "add", links[0], "type", "veth", "peer", "name", links[1])
        hosts = []
        for index, namespace in enumerate(namespaces):
            _run("ip", "link", "set", links[index], "netns", namespace)
            _run("ip", "-n", namespace, "address", "add", f"{addresses[index]}/24", "dev", links[index])
            _run("ip", "-n", namespace, "link", "set", links[index], "up")
            _run("ip", "-n", namespace, "link", "set", "lo", "up")
            names = folder / f"hosts-{index}"
            other = f"{addresses[1 - index]} node{1 - index}"
            names.write_text(f"127.0.0.1 localhost\n127.0.1.1 node{index}\n{other}\n")
            enter = f'mount --bind {names} /etc/hosts; hostname node{index}; exec "$@"'
            prefix = ("ip", "netns", "exec", namespace, "unshare", "--mount", "--uts", "sh", "-ec", enter, "sh")
            hosts.append(Host(f"node{index}", addresses[index], namespace, prefix))
        yield hosts[0], hosts[1]


def finish(processes: Sequence[subprocess.Popen[bytes]], timeout: float) -> list[int]:
    """Exit codes, when all have ended; those that run for longer are killed with their children (-9)."""
    deadline = time.monotonic() + timeout
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, deadline - time.monotonic()))
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return [process.wait() for process in processes]


def _remove(namespace: str) -> None:
    """Delete a namespace with what runs there; the veth pair goes with it."""
    pids = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True).stdout.split()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)
