"""What went wrong with other systems' jobs, tried on this one. The names carry the reports (CASES.md)."""

import os

import lightning.pytorch as pl
import pytest

from lnn_lightning import PTDPStrategy
from lnn_lightning.parallel.errors import LayoutError

# ----------------------------------------------------------------------------------------------- SLURM task numbers


def _slurm(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    """The environment of the first task of a job; without `SLURM_NTASKS_PER_NODE` unless it is given."""
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "")
    monkeypatch.delenv("SLURM_NTASKS_PER_NODE")  # put back behind the test, also if the strategy has set it
    first = {"SLURM_JOB_NAME": "job", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    for name, value in {**first, **variables}.items():
        monkeypatch.setenv(name, value)


def _trainer(devices: int, num_nodes: int) -> pl.Trainer:
    return pl.Trainer(accelerator="cpu", devices=devices, num_nodes=num_nodes, strategy=PTDPStrategy(), logger=False)


def _lines(nodes: int, tasks: int) -> str:
    return f"\n    #SBATCH --nodes={nodes}\n    #SBATCH --ntasks-per-node={tasks}\n"


@pytest.mark.parametrize(
    ("variables", "trainer", "started", "instead"),
    [
        pytest.param(
            {"SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_TASKS_PER_NODE": "2(x2)"},
            (4, 2),
            "4 tasks on 2 nodes",
            "Trainer(devices=2, num_nodes=2)",
            id="tasks a node",
        ),
        pytest.param(
            {"SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_TASKS_PER_NODE": "2(x2)"},
            (4, 1),
            "4 tasks on 2 nodes",
            "Trainer(devices=2, num_nodes=2)",
            id="only --ntasks",
        ),
        pytest.param(
            {"SLURM_NTASKS": "3", "SLURM_NNODES": "2", "SLURM_TASKS_PER_NODE": "2,1"},
            (2, 2),
            "3 tasks on 2 nodes (2, 1)",
            None,
            id="uneven",
        ),
        pytest.param(
            {"SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_TASKS_PER_NODE": "3,1"},
            (2, 2),
            "4 tasks on 2 nodes (3, 1)",
            None,
            id="uneven, right in all",
        ),
        pytest.param(
            {"SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "4", "SLURM_TASKS_PER_NODE": "4(x2)"},
            (4, 1),
            "8 tasks on 2 nodes",
            "Trainer(devices=4, num_nodes=2)",
            id="nodes",
        ),
        pytest.param(
            {"SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_TASKS_PER_NODE": "1"},
            (4, 1),
            "1 task on 1 node",
            "Trainer(devices=1, num_nodes=1)",
            id="one task",
        ),
    ],
)
def test_pl20391_slurm_task_numbers_that_do_not_fit(
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    trainer: tuple[int, int],
    started: str,
    instead: str | None,
) -> None:
    """The error has the lines to write, for all nodes, and the Trainer that would fit the job."""
    _slurm(monkeypatch, **variables)
    devices, nodes = trainer
    with pytest.raises(LayoutError) as caught:
        _trainer(devices, nodes)
    text = str(caught.value)
    assert text.startswith(f"SLURM has started {started}, but ")
    assert f"`Trainer(devices={devices}, num_nodes={nodes})` needs one task per device" in text
    assert _lines(nodes, devices) in text
    assert "srun" in text
    assert (instead or "or set") in text if instead else "or set" not in text


def test_pl20391_gpus_per_task(monkeypatch: pytest.MonkeyPatch) -> None:
    _slurm(monkeypatch, SLURM_NTASKS="2", SLURM_NNODES="1", SLURM_NTASKS_PER_NODE="2", SLURM_GPUS_PER_TASK="1")
    with pytest.raises(LayoutError, match="--gpus-per-node"):
        _trainer(1, 1)


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param({"SLURM_NTASKS_PER_NODE": "2"}, id="--ntasks-per-node"),
        pytest.param({"SLURM_TASKS_PER_NODE": "2(x2)"}, id="--ntasks alone"),
        pytest.param({"SLURM_TASKS_PER_NODE": "8(x2)", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, id="a step of a job"),
        pytest.param({"SLURM_NTASKS_PER_NODE": "9", "SLURM_JOB_NAME": "interactive"}, id="interactive"),
    ],
)
def test_pl20391_slurm_task_numbers_that_fit(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    """Lightning alone refuses the second one, `--ntasks` without `--ntasks-per-node`."""
    _slurm(monkeypatch, **{"SLURM_NTASKS": "4", "SLURM_NNODES": "2", **variables})
    trainer = _trainer(2, 2)
    assert trainer.world_size == 4
