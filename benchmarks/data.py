"""What ZeRO on the data axis costs, against those who do only that.

    python -m benchmarks.data            # some minutes on two cores
    python -m benchmarks.data --quick    # about one

A GPT on two data ranks. Ours is the whole Trainer with `PTDPStrategy(zero_stage=...)`; Lightning's DDPStrategy runs in
the Trainer too, all others are loops written by hand around the same model (which have no Trainer to pay for): plain
`fully_shard`, DistributedDataParallel with torch's ZeroRedundancyOptimizer or fairscale's OSS, DeepSpeed ZeRO-3 if it
is installed (`DS_ACCELERATOR=cpu`). All take turns within one run, so that they meet the same machine; each turn is a
fresh model whose first steps are not counted. Ratios are medians over the rounds, to the same round's other.
"""

import argparse
import contextlib
import importlib.util
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from benchmarks.pipeline import GPT, Compute, LitGPT, adamw, batches, loss_of, ratio, run_quietly

WARM_UP = 3
Batch = tuple[Tensor, Tensor]


class Clock(pl.Callback):
    """Seconds a step, without the first ones."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        self.losses.append(float(outputs["loss"]))
        if index == WARM_UP - 1:
            dist.barrier()
            self.start = time.perf_counter()

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        dist.barrier()
        self.seconds = (time.perf_counter() - self.start) / (len(self.losses) - WARM_UP)


def in_trainer(settings: Compute, strategy: Any, data: list[Batch]) -> tuple[float, list[float]]:
    torch.manual_seed(0)
    module, clock = LitGPT(settings), Clock()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"]),
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[clock],
    )
    trainer.fit(module, DataLoader(data, batch_size=None, collate_fn=lambda batch: batch))  # type: ignore[arg-type]
    return clock.seconds, clock.losses


def by_hand(
    make: Callable[[GPT], tuple[nn.Module, Any]], settings: Compute, data: list[Batch]
) -> tuple[float, list[float]]:
    torch.manual_seed(0)
    model, optimizer = make(GPT(settings))
    losses: list[float] = []
    for index, (x, y) in enumerate(data):
        if index == WARM_UP:
            dist.barrier()
            start = time.perf_counter()
        loss = loss_of(model(x), y)
        if optimizer is None:  # DeepSpeed's engine
            model.backward(loss)  # type: ignore[operator]
            model.step()  # type: ignore[operator]
        else:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    dist.barrier()
    return (time.perf_counter() - start) / (len(data) - WARM_UP), losses


def ddp(model: GPT) -> tuple[nn.Module, Any]:
    return DistributedDataParallel(model), adamw(model)


def plain_fully_shard(model: GPT) -> tuple[nn.Module, Any]:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, adamw(model)


def zero_redundancy(model: GPT) -> tuple[nn.Module, Any]:
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    return DistributedDataParallel(model), optimizer


def oss(model: GPT) -> tuple[nn.Module, Any]:
    from fairscale.optim import OSS

    return DistributedDataParallel(model), OSS(params=model.parameters(), optim=torch.optim.AdamW, lr=1e-3)


def deepspeed_zero3(model: GPT) -> tuple[nn.Module, Any]:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config)
    return engine, None


def contestants(settings: Compute) -> dict[str, Callable[[list[Batch]], tuple[float, list[float]]]]:
    from lnn_lightning import PTDPStrategy

    def ours(stage: int) -> Callable[[list[Batch]], tuple[float, list[float]]]:
        layout = {"data_parallel_size": 2, "microbatches": 1, "zero_stage": stage}
        return lambda data: in_trainer(settings, PTDPStrategy(**layout), data)

    def hand(make: Callable[[GPT], tuple[nn.Module, Any]]) -> Callable[[list[Batch]], tuple[float, list[float]]]:
        return lambda data: by_hand(make, settings, data)

    found = {
        "zero 0": ours(0),
        "Lightning's DDPStrategy": lambda data: in_trainer(settings, DDPStrategy(), data),
        "DDP by hand": hand(ddp),
        "zero 1": ours(1),
        "DDP + ZeroRedundancyOptimizer": hand(zero_redundancy),
        "DDP + fairscale OSS": hand(oss),
        "zero 2": ours(2),
        "zero 3": ours(3),
        "fully_shard by hand": hand(plain_fully_shard),
    }
    if importlib.util.find_spec("deepspeed") is not None:
        found["DeepSpeed ZeRO-3"] = hand(deepspeed_zero3)
    return found


def race(rank: int, world_size: int, settings: Compute) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    data = [
        (x.chunk(world_size)[rank], y.chunk(world_size)[rank]) for x, y in batches(settings, settings.steps + WARM_UP)
    ]
    times: dict[str, list[float]] = {}
    losses: dict[str, list[float]] = {}
    for _ in range(settings.rounds):
        for name, run in contestants(settings).items():
            with contextlib.suppress(Exception) if name.startswith("DeepSpeed") else contextlib.nullcontext():
                seconds, losses[name] = run(data)
                times.setdefault(name, []).append(seconds)
    return times, losses


PAIRS = [
    ("zero 0", "Lightning's DDPStrategy"),
    ("zero 0", "DDP by hand"),
    ("zero 1", "DDP + ZeroRedundancyOptimizer"),
    ("zero 1", "DDP + fairscale OSS"),
    ("zero 3", "fully_shard by hand"),
    ("zero 3", "DeepSpeed ZeRO-3"),
]


def table(settings: Compute) -> str:
    times, losses = run_quietly(race, 2, settings)[0]
    reference = losses["DDP by hand"]
    for name, own in losses.items():
        if any(abs(a - b) > 1e-3 * b for a, b in zip(own, reference, strict=True)):
            raise RuntimeError(f"{name} does not do the same work: losses {own}, DDP's {reference}")
    lines = [
        f"GPT, {settings.layers} layers of width {settings.width}, {settings.length} tokens, global batch of "
        f"{settings.batch_size} on 2 data ranks; {settings.rounds} rounds of {settings.steps} steps",
        "",
        "| | step (s), median | lowest | highest |",
        "|---|---|---|---|",
    ]
    for name, values in times.items():
        lines.append(f"| {name} | {statistics.median(values):.3f} | {min(values):.3f} | {max(values):.3f} |")
    lines += ["", "| ours | against | ratio of step times |", "|---|---|---|"]
    for ours, other in PAIRS:
        if other in times and len(times[other]) == len(times[ours]):
            lines.append(f"| {ours} | {other} | {ratio(times[ours], times[other]):.3f} |")
        else:
            lines.append(f"| {ours} | {other} | (does not run here) |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller model, fewer rounds")
    parser.add_argument("--rounds", type=int, default=None)
    arguments = parser.parse_args()
    settings = Compute(layers=4, width=384, rounds=5, steps=4, batch_size=8)
    if arguments.quick:
        settings = Compute(layers=2, width=256, rounds=3, steps=4, batch_size=8)
    if arguments.rounds is not None:
        settings = Compute(**{**settings.__dict__, "rounds": arguments.rounds})
    print(table(settings))


if __name__ == "__main__":
    main()
