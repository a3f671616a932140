"""`configs/restart.yaml` under torchrun: a lost rank costs the steps since the last checkpoint, and no hand."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_torchrun_restarts_the_job(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for index in range(20):
        (text / f"{index}.py").write_text(f"file {index:02d}\n" * 40)
    small = "--model.n_layer 2 --model.n_head 2 --model.n_embd 16 --model.block_size 16 --data.block_size 16"
    short = "--trainer.max_steps 9 --trainer.limit_val_batches 0 --trainer.enable_progress_bar false"
    layout = "--trainer.devices 2 --trainer.strategy.init_args.data_parallel_size 1 --trainer.logger false"
    layout += f" --trainer.default_root_dir {tmp_path}/root"
    saves = f"--trainer.callbacks.dirpath {tmp_path}/saved --trainer.callbacks.every_n_train_steps 2"
    kill = f"--trainer.callbacks+=tests.examples.kill_once.KillOnce --trainer.callbacks.folder {tmp_path}"
    command = (
        f"-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 2 -m lnn_lightning.cli fit --config "
        f"configs/gpt_pipeline.yaml --config configs/restart.yaml {small} {short} {layout} {saves} {kill} "
        f"--trainer.callbacks.step 5 --data.folder {text} --data.num_workers 1"
    )
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MASTER_", "SLURM_"))}
    environment = {**inherited, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    job = subprocess.run(
        [sys.executable, *command.split()], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150
    )
    assert job.returncode == 0, job.stderr
    assert "rank 1 (pipeline stage 1, data rank 0, tensor rank 0; host " in job.stderr
    assert "is gone: its process ended without a word" in job.stderr
    notes = {path.name: path.read_text() for path in tmp_path.glob("*-?-?")}
    assert notes == {
        **{f"start-0-{rank}": "0" for rank in range(2)},
        **{f"start-1-{rank}": "4" for rank in range(2)},
        **{f"end-1-{rank}": "9" for rank in range(2)},
    }
    pids = [int(pid) for path in tmp_path.glob("pids-*") for pid in path.read_text().split()]
    assert len(pids) == 4  # two ranks, each with a worker that loads data
    deadline = time.monotonic() + 10  # an orphaned worker looks for its rank every five seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not [pid for pid in pids if alive(pid)]
