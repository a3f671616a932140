"""Task numbers of a SLURM job: one task per device, or a message with the lines to write.

Lightning looks at these numbers too, but its hints are for one node, and a job with ``--ntasks`` is refused before they
are looked at.
"""

from __future__ import annotations

import os
import re
from typing import Any

from lightning.fabric.plugins.environments import SLURMEnvironment

from lnn_lightning.parallel.errors import LayoutError


def note_tasks_per_node() -> None:
    """Makes ``--ntasks`` as good as ``--ntasks-per-node``: Lightning takes only the variable of the second.

    SLURM says in another one how many tasks it has started on each node; :func:`check_tasks` looks at all of them.
    """
    tasks = tasks_by_node()
    if tasks and "SLURM_NTASKS" in os.environ:
        os.environ.setdefault("SLURM_NTASKS_PER_NODE", str(max(tasks)))


def check_tasks(environment: Any, devices: int, num_nodes: int) -> None:
    """Makes sure that SLURM has started one task per device.

    Args:
        environment: the cluster environment in use; others than SLURM's are left alone.
        devices: devices a node in the Trainer.
        num_nodes: nodes in the Trainer.

    Raises:
        LayoutError: it has not; with the lines for the batch script.
    """
    started_by_srun = "SLURM_NTASKS" in os.environ and SLURMEnvironment.job_name() not in ("bash", "interactive")
    if not isinstance(environment, SLURMEnvironment) or not started_by_srun:
        return
    tasks, total = tasks_by_node(), int(os.environ["SLURM_NTASKS"])
    nodes = _number("SLURM_NNODES") or _number("SLURM_JOB_NUM_NODES") or len(tasks) or num_nodes
    per_node = _number("SLURM_NTASKS_PER_NODE") or devices
    if sum(tasks) != total:
        tasks = []  # of the whole job, not of this step
    even = set(tasks) <= {devices} and per_node == devices
    if even and nodes == num_nodes and total == devices * num_nodes:
        return
    spread = f" ({', '.join(map(str, tasks))})" if len(set(tasks)) > 1 else ""
    lines = [
        f"SLURM has started {_several(total, 'task')} on {_several(nodes, 'node')}{spread}, but "
        f"`Trainer(devices={devices}, num_nodes={num_nodes})` needs one task per device, {devices} on each of "
        f"{_several(num_nodes, 'node')}. Write in the batch script",
        "",
        f"    #SBATCH --nodes={num_nodes}",
        f"    #SBATCH --ntasks-per-node={devices}",
        "",
        "without `--ntasks`, and `srun` before the command",
    ]
    if total % nodes == 0 and len(set(tasks)) <= 1:
        lines[-1] += f"; or set `Trainer(devices={total // nodes}, num_nodes={nodes})` for the tasks there are"
    lines[-1] += "."
    if "SLURM_GPUS_PER_TASK" in os.environ:
        lines.append(
            "With `--gpus-per-task` each task sees its own GPU only, and `devices='auto'` counts that one: ask for "
            "`--gpus-per-node` instead."
        )
    raise LayoutError("\n".join(lines))


def tasks_by_node() -> list[int]:
    """Tasks on each node, from SLURM's short form: ``2(x3),1`` is 2, 2, 2, 1. Empty if SLURM does not say."""
    text = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or os.environ.get("SLURM_TASKS_PER_NODE") or ""
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _several(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count != 1 else ''}"


def _number(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else None
