"""Two hosts, one process group: network namespaces on a veth pair, started by torchrun and by SLURM's variables."""

import csv
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from lnn_lightning.checkpoint import load_full_state_dict
from lnn_lightning.parallel.connect import ConnectError
from tests.helpers import host_job
from tests.helpers.hosts import ROOT, Host, finish, need_namespaces, start, two_hosts
from tests.helpers.ranks import launch_ranks
from tests.helpers.srun import options_of, srun_environment

pytestmark = pytest.mark.slow
Ranks = list[dict[str, Any]]
PIPELINE: dict[str, Any] = {"pipeline_parallel_size": 2}
WITH_PYTHON = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
LIMIT = 120


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    need_namespaces()
    with two_hosts() as both:
        yield both


def results(folder: Path, name: str, world_size: int) -> Ranks:
    return [json.loads((folder / f"{name}-rank{rank}.json").read_text()) for rank in range(world_size)]


def check_losses(ranks: Ranks, layouts: int) -> None:
    """Every layout went on where the last one had stopped, with the losses of one process."""
    expected = host_job.reference(layouts * host_job.STEPS)
    for number in range(layouts):
        # each data rank has the loss of its share
        means = [sum(step) / len(ranks) for step in zip(*(one["losses"][number] for one in ranks), strict=True)]
        assert means == pytest.approx(expected[number * host_job.STEPS :][: host_job.STEPS], rel=1e-9)


def warnings_of(ranks: Ranks) -> list[str]:
    return [text for one in ranks for text in one["warnings"] if "spread over several hosts" in text]


def test_torchrun_on_two_hosts(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """Two processes each: a pipeline between the hosts, data ranks within; resumed with tensor ranks within."""
    layouts = [{**PIPELINE, "data_parallel_size": 2, "microbatches": 2}, {**PIPELINE, "tensor_parallel_size": 2}]
    job = {"name": "torchrun", "nodes": 2, "devices": 2, "layouts": layouts, "shared": str(tmp_path)}
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=node0:29500", "--rdzv-id=tests", "-m", "tests.helpers.host_job", json.dumps(job)]
    codes = finish([host.start(command, tmp_path / host.name) for host in hosts], LIMIT)
    assert codes == [0, 0], "\n".join((tmp_path / host.name).read_text()[-3000:] for host in hosts)
    ranks = results(tmp_path, "torchrun", 4)
    assert all(one["watched"] for one in ranks)
    # c10d numbers the nodes as they come; neighbours are on one host
    assert ranks[0]["host"] == ranks[1]["host"] != ranks[2]["host"] == ranks[3]["host"]
    assert all(one["interface"].startswith("v") for one in ranks)
    assert not warnings_of(ranks)
    check_losses(ranks, len(layouts))


@pytest.fixture(scope="module")
def slurm_ranks(hosts: tuple[Host, Host], tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """One task on each host, in several layouts, and what they said of a folder where node1 has a disk of its own."""
    folder = tmp_path_factory.mktemp("slurm")
    private = folder / "private"
    private.mkdir()
    job = {
        "name": "slurm",
        "nodes": 2,
        "devices": 1,
        "layouts": [PIPELINE, {"data_parallel_size": 2}, {"tensor_parallel_size": 2}],
        "shared": str(folder),
        "private": str(private),
    }
    prefixes = [hosts[0].prefix, hosts[1].with_disk(private)]
    variables = srun_environment(folder / "bin", prefixes, tasks_per_node=1, job_id=1234, submitted=ROOT)
    command = [str(folder / "bin" / "srun"), sys.executable, "-m", "tests.helpers.host_job", json.dumps(job)]
    codes = finish([start(command, folder / "output", **variables)], LIMIT)
    assert codes == [0], (folder / "output").read_text()[-5000:]
    return results(folder, "slurm", 2)


def test_slurm_on_two_hosts(slurm_ranks: Ranks) -> None:
    """A pipeline, data ranks and tensor ranks between the hosts, each resumed from the one before."""
    assert [one["host"] for one in slurm_ranks] == ["node0", "node1"]
    assert all(one["watched"] for one in slurm_ranks)
    assert all(one["interface"].startswith("v") for one in slurm_ranks)
    check_losses(slurm_ranks, 3)


def test_tensor_ranks_on_two_hosts_are_warned_of(slurm_ranks: Ranks) -> None:
    (text,) = warnings_of(slurm_ranks)
    assert "tensor_parallel_size=2 does not divide the processes of every host (1 on node0, 1 on node1)" in text


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("save", ["is not shared by all hosts", "is not seen on node1 (rank 1)", "default_root_dir", "dirpath"]),
        ("load", ["last.ckpt is there on node0 (rank 0) but not on node1 (rank 1)"]),
        ("last", ["do not see the same checkpoints to go on from", "last.ckpt; node1 (rank 1): none"]),
        ("other", ["is not the same checkpoint on all hosts: on node1 (rank 1) is another"]),
    ],
)
def test_a_disk_that_is_not_shared(slurm_ranks: Ranks, what: str, words: list[str]) -> None:
    """Both ranks stop with one error, in saving, in loading, and where `ckpt_path="last"` finds different ones."""
    first, second = (one["errors"][what] for one in slurm_ranks)
    assert first == second
    assert first.startswith("CheckpointError: ")
    for each in words:
        assert each in first
    assert ".shared-" not in slurm_ranks[0]["errors"]["left"]


def _fit_alone(rank: int, world_size: int) -> str:
    os.environ["WORLD_SIZE"] = "2"
    job = {"devices": 1, "nodes": 2}
    try:
        host_job.make_trainer(job, {"timeout": timedelta(seconds=2)}).fit(host_job.Tiny())
    except ConnectError as error:
        return str(error)
    return ""


def test_a_node_that_never_comes() -> None:
    start = time.monotonic()
    (text,) = launch_ranks(_fit_alone, 1)
    assert "1 of 2 processes did not come within 2 s: rank 1." in text
    assert time.monotonic() - start < 30


# ------------------------------------------------------------------------------------------------ examples/cluster


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples and their configuration, saving often, where they may leave their runs; and some text."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    config = (ROOT / "configs" / "gpt_cluster.yaml").read_text()
    assert "every_n_train_steps: 100" in config
    (folder / "configs").mkdir()
    (folder / "configs" / "gpt_cluster.yaml").write_text(
        config.replace("every_n_train_steps: 100", "every_n_train_steps: 2")
    )
    (folder / "text").mkdir()
    for index in range(20):
        (folder / "text" / f"{index}.py").write_text(f"file {index}\n" * 40)
    return folder


def arguments(max_steps: int) -> list[str]:
    """Command line arguments that make the example tiny; it has one process on each host."""
    values = {
        **{"model.n_layer": 2, "model.n_head": 2, "model.n_embd": 16, "model.block_size": 16},
        **{"data.folder": "text", "data.block_size": 16, "data.batch_size": 4},
        **{"trainer.accelerator": "cpu", "trainer.max_steps": max_steps, "trainer.log_every_n_steps": 1},
        **{"trainer.limit_val_batches": 0, "trainer.enable_progress_bar": "false"},
        "trainer.strategy.init_args.tensor_parallel_size": 1,
    }
    return [f"--{name}={value}" for name, value in values.items()]


def steps_logged(checkout: Path, version: int) -> list[int]:
    with open(checkout / "runs" / "gpt_cluster" / f"version_{version}" / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert all(0 < float(row["train_loss"]) < 10 for row in rows)
    return [int(row["step"]) for row in rows]


def test_example_scripts(hosts: tuple[Host, Host], checkout: Path) -> None:
    """torchrun.sh trains two steps on both hosts (by addresses); the batch script goes on from its checkpoint."""
    command = [checkout / "examples" / "cluster" / "torchrun.sh", *arguments(2)]
    variables = {"HEAD": hosts[0].address, "DEVICES": "1", "PATH": WITH_PYTHON}
    both = [host.start(command, checkout / host.name, ADDRESS=host.address, **variables) for host in hosts]
    codes = finish(both, LIMIT)
    assert codes == [0, 0], "\n".join((checkout / host.name).read_text()[-3000:] for host in hosts)
    assert steps_logged(checkout, 0) == [0, 1]
    before = load_full_state_dict(checkout / "runs" / "gpt_cluster" / "checkpoints" / "last.ckpt")

    script = checkout / "examples" / "cluster" / "slurm.sbatch"
    prefixes = [host.prefix for host in hosts]
    variables = srun_environment(checkout / "bin", prefixes, tasks_per_node=1, job_id=4321, submitted=checkout)
    codes = finish([start(["bash", str(script), *arguments(4)], checkout / "output", **variables)], LIMIT)
    assert codes == [0], (checkout / "output").read_text()[-5000:]
    assert steps_logged(checkout, 1) == [2, 3]
    after = load_full_state_dict(checkout / "runs" / "gpt_cluster" / "checkpoints" / "last.ckpt")
    assert before.keys() == after.keys()
    assert any((before[name] != after[name]).any() for name in before)


@pytest.mark.parametrize("newer", ["last", "hpc"])
def test_batch_script_goes_on_from_the_newer_checkpoint(tmp_path: Path, newer: str) -> None:
    """What was saved when the time was up, or the last regular one."""
    runs = tmp_path / "runs" / "gpt_cluster"
    for age, name in enumerate(["hpc_ckpt_2.ckpt", "checkpoints/last.ckpt"]):
        (runs / name).mkdir(parents=True)
        os.utime(runs / name, (1000, 1000 + (age if newer == "last" else -age)))
    variables = srun_environment(tmp_path / "bin", [(), ()], tasks_per_node=4, job_id=1, submitted=tmp_path)
    (tmp_path / "bin" / "srun").write_text('#!/bin/sh\necho "$@"\n')
    script = ROOT / "examples" / "cluster" / "slurm.sbatch"
    assert finish([start(["bash", str(script)], tmp_path / "output", **variables)], 20) == [0]
    text = (tmp_path / "output").read_text()
    assert f"--ckpt_path {newer}" in text
    assert "--trainer.num_nodes 2 --trainer.devices 4" in text


def test_batch_script_asks_for_one_task_a_device() -> None:
    options = options_of(ROOT / "examples" / "cluster" / "slurm.sbatch")
    config = (ROOT / "configs" / "gpt_cluster.yaml").read_text()
    assert options["ntasks-per-node"] == options["gpus-per-node"] == "4"
    assert "devices: 4\n" in config and f"num_nodes: {options['nodes']}\n" in config
    assert options["signal"] == "SIGUSR1@90"
    assert "requeue" in options
