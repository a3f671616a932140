"""What saving and loading costs, against Lightning's own strategies on the same bytes.

    python -m benchmarks.checkpoints            # about two minutes on two cores

Two ranks, an MLP trained with Adam. DDPStrategy against `PTDPStrategy()`: both hold all of it on each rank.
ModelParallelStrategy with torch's `fully_shard` against `PTDPStrategy(zero_stage=3)`: both hold half on each rank. The
two of a pair take turns within one run on the same disk; each round saves a checkpoint and loads it again into
the running Trainer. Memory is the most a rank took above what it had (VmHWM). Ratios are medians over the rounds,
to the same round's other. What both ratios include on our side: checksums, bringing files and names to the disk
(DDPStrategy does not), and reading all files once more to compare their checksums.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from lnn_lightning import PTDPStrategy

MIB = 2**20


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(pl.LightningModule):
    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Mlp(width) for _ in range(blocks)])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-4)


class Sharded(Model):
    """What ModelParallelStrategy wants the user to write."""

    def configure_model(self) -> None:
        for block in self.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self, mesh=self.device_mesh["data_parallel"])


def status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


def measured(act: Callable[[], Any]) -> tuple[float, float]:
    """Seconds until all ranks are done, and MiB that a rank took at most above what it had."""
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    dist.barrier()
    start = time.perf_counter()
    act()
    dist.barrier()
    seconds, peak = torch.tensor(time.perf_counter() - start), torch.tensor(status("VmHWM") - before)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return float(seconds), float(peak)


def trained(strategy: Any, model: pl.LightningModule, width: int) -> pl.Trainer:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(16, width)), batch_size=4))
    return trainer


def turn(rank: int, port: int, folder: str, width: int, blocks: int, rounds: int) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="benchmark",
    )  # fmt: skip
    torch.set_num_threads(1)
    pairs = {
        "DDPStrategy": (DDPStrategy(), Model, PTDPStrategy(), "PTDPStrategy()"),
        "ModelParallelStrategy": (
            ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
            Sharded,
            PTDPStrategy(zero_stage=3),
            "PTDPStrategy(zero_stage=3)",
        ),
    }
    for name, (other, kind, ours, ours_name) in pairs.items():
        trainers = {
            name: trained(other, kind(width, blocks), width),
            ours_name: trained(ours, Model(width, blocks), width),
        }
        results: dict[str, list[tuple[float, ...]]] = {each: [] for each in trainers}
        for index in range(rounds + 1):
            for each, trainer in trainers.items():
                path = f"{folder}/{each}{index}"
                save = measured(lambda: trainer.save_checkpoint(path))  # noqa: B023
                load = measured(lambda: trainer._checkpoint_connector.restore(path))  # noqa: B023
                dist.barrier()
                if rank == 0:
                    shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)
                if index > 0:
                    results[each].append((*save, *load))
        if rank == 0:
            report(name, ours_name, results)
        if rank == 0:
            shutil.rmtree(folder)
            os.mkdir(folder)
        dist.barrier()


def report(other: str, ours: str, results: dict[str, list[tuple[float, ...]]]) -> None:
    columns = ("save s", "save MiB", "load s", "load MiB")
    print(f"{'':30}" + "".join(f"{column:>12}" for column in columns))
    for name, rows in results.items():
        print(f"{name:30}" + "".join(f"{statistics.median(row[i] for row in rows):12.2f}" for i in range(4)))
    pairs = zip(results[ours], results[other], strict=True)
    ratios = [[max(mine[i], 1e-3) / max(theirs[i], 1e-3) for i in range(4)] for mine, theirs in pairs]
    print(f"{'ratio':30}" + "".join(f"{statistics.median(row[i] for row in ratios):12.2f}" for i in range(4)) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None, help="where to write; the disk to measure")
    options = parser.parse_args()
    size = 3 * 4 * 8 * options.width**2 * options.blocks / MIB
    print(f"{size:.0f} MiB in a checkpoint (parameters and Adam's moments), 2 ranks\n")
    folder = tempfile.mkdtemp(dir=options.folder)
    mp.spawn(turn, (29517, folder, options.width, options.blocks, options.rounds), nprocs=2)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
