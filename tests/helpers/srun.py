"""A stand-in for SLURM: `sbatch` that reads the lines of the script, and `srun` that starts the tasks on the hosts.

Only what the tests need: `--nodes` and `--ntasks-per-node` in the script, variables as SLURM sets them, and all tasks
ended when one fails (`--kill-on-bad-exit`). The batch script runs outside of the hosts, the tasks in them.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

_HOSTS = "STAND_IN_HOSTS"


def srun_environment(
    folder: Path, hosts: Sequence[Sequence[str]], tasks_per_node: int, job_id: int, submitted: Path
) -> dict[str, str]:
    """Variables of a batch job on the hosts, given as prefixes of commands; `srun` is on its path, from `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    srun = folder / "srun"
    srun.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).resolve()}" "$@"\n')
    srun.chmod(0o755)
    nodes = len(hosts)
    return {
        "PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        _HOSTS: json.dumps([list(prefix) for prefix in hosts]),
        "SLURM_JOB_ID": str(job_id),
        "SLURM_JOBID": str(job_id),
        "SLURM_JOB_NAME": "tests",
        "SLURM_NNODES": str(nodes),
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_NODELIST": f"node[0-{nodes - 1}]" if nodes > 1 else "node0",
        "SLURM_JOB_NODELIST": f"node[0-{nodes - 1}]" if nodes > 1 else "node0",
        "SLURM_NTASKS": str(nodes * tasks_per_node),
        "SLURM_NPROCS": str(nodes * tasks_per_node),
        "SLURM_NTASKS_PER_NODE": str(tasks_per_node),
        "SLURM_TASKS_PER_NODE": f"{tasks_per_node}(x{nodes})" if nodes > 1 else str(tasks_per_node),
        "SLURM_SUBMIT_DIR": str(submitted),
    }


def options_of(script: Path) -> dict[str, str]:
    """The `#SBATCH --name=value` lines of a batch script."""
    return dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?", script.read_text(), re.MULTILINE))


def main(command: list[str]) -> int:
    """Start the tasks, wait for them; the worst exit code."""
    while command and command[0].startswith("-"):
        command = command[1:]
    hosts, per_node = json.loads(os.environ[_HOSTS]), int(os.environ["SLURM_NTASKS_PER_NODE"])
    tasks = []
    for node, prefix in enumerate(hosts):
        for local in range(per_node):
            rank = {"SLURM_PROCID": node * per_node + local, "SLURM_LOCALID": local, "SLURM_NODEID": node}
            extra = {"SLURM_STEP_ID": 0, "SLURM_STEP_TASKS_PER_NODE": os.environ["SLURM_TASKS_PER_NODE"], **rank}
            environment = {**os.environ, **{name: str(value) for name, value in extra.items()}}
            tasks.append(subprocess.Popen([*prefix, *command], env=environment))

    def forward(number: int, frame: object) -> None:
        for task in tasks:
            with contextlib.suppress(ProcessLookupError):
                task.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, forward)
    while any(task.poll() is None for task in tasks):
        if any(task.poll() for task in tasks):
            time.sleep(5)  # the others may want to say something
            forward(signal.SIGKILL, None)
            break
        time.sleep(0.1)
    return max(abs(task.wait()) for task in tasks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
