"""Two hosts, one process group: network namespaces on a veth pair, started by torchrun and by SLURM's variables."""

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import host_job
from tests.helpers.hosts import Host, finish, two_hosts, why_not
from tests.helpers.srun import srun_environment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
]
JOB = [sys.executable, "-m", "tests.helpers.host_job"]
BETWEEN: dict[str, Any] = {"pipeline_parallel_size": 2}


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as both:
        yield both


def results(folder: Path, name: str, world_size: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{name}-rank{rank}.json").read_text()) for rank in range(world_size)]


def check_losses(ranks: list[dict[str, Any]], phases: int) -> None:
    """Every phase went on where the last had stopped, with the losses of one process."""
    expected = host_job.reference(phases * host_job.STEPS)
    for phase in range(phases):
        # each data rank has the loss of its share
        means = [sum(step) / len(ranks) for step in zip(*(one["losses"][phase] for one in ranks), strict=True)]
        assert means == pytest.approx(expected[phase * host_job.STEPS :][: host_job.STEPS], rel=1e-9)


def test_torchrun_on_two_hosts(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """Two processes each: pipeline between the hosts, data ranks within; saved, and resumed in another layout."""
    layouts = [
        {**BETWEEN, "data_parallel_size": 2, "microbatches": 2},
        {**BETWEEN, "tensor_parallel_size": 2},
    ]
    job = {"name": "torchrun", "nodes": 2, "devices": 2, "layouts": layouts, "shared": str(tmp_path)}
    torchrun = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    torchrun += ["--rdzv-endpoint", "node0:29500", "--rdzv-id", "tests", "-m", "tests.helpers.host_job"]
    processes = [
        host.start([sys.executable, *torchrun, json.dumps(job)], output=tmp_path / host.name) for host in hosts
    ]
    codes = finish(processes, 120)
    assert codes == [0, 0], "\n".join((tmp_path / host.name).read_text()[-3000:] for host in hosts)
    ranks = results(tmp_path, "torchrun", 4)
    assert [one["host"] for one in ranks] == ["node0", "node0", "node1", "node1"]
    assert all(one["interface"].startswith("v") for one in ranks)
    assert not any("spread over several hosts" in text for one in ranks for text in one["warnings"])
    check_losses(ranks, len(layouts))


def test_slurm_on_two_hosts(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """One task each: a pipeline between the hosts, data ranks, tensor ranks (a warning); a disk that is not shared."""
    layouts = [{**BETWEEN}, {"data_parallel_size": 2}, {"tensor_parallel_size": 2}]
    private = tmp_path / "private"
    private.mkdir()
    job = {"name": "slurm", "nodes": 2, "devices": 1, "layouts": layouts}
    job |= {"shared": str(tmp_path), "private": str(private)}
    prefixes = [hosts[0].prefix, [*hosts[1].prefix, "sh", "-ec", f'mount -t tmpfs none {private}; exec "$@"', "sh"]]
    environment = srun_environment(tmp_path / "bin", prefixes, tasks_per_node=1, job_id=1234)
    command = ["srun", *map(shlex.quote, JOB), shlex.quote(json.dumps(job))]
    code, text = batch(f"{' '.join(command)}\n", environment, tmp_path / "output", 120)
    assert code == 0, text[-4000:]
    ranks = results(tmp_path, "slurm", 2)
    check_losses(ranks, len(layouts))
    print(json.dumps(ranks, indent=1))


def batch(script: str, environment: dict[str, str], output: Path, timeout: float) -> tuple[int, str]:
    import os
    import subprocess

    from tests.helpers.hosts import ROOT

    with open(output, "wb") as sink:
        process = subprocess.Popen(
            ["bash", "-c", script],
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        (code,) = finish([process], timeout)
    return code, output.read_text()
