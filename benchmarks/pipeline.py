"""What the pipeline costs, and what its schedules leave idle.

    python -m benchmarks.pipeline            # both tables, some minutes on two cores
    python -m benchmarks.pipeline --quick    # the same in about one

First table: a GPT on two ranks. `PTDPStrategy` runs the user's own `training_step` in the Trainer; against it stand
stage modules written by hand for `torch.distributed.pipelining`, and one process that does the same work. All take
turns within one run, so that they meet the same machine.

Second table: blocks that sleep, in forward, in the backward of their input and in that of their weight alike. Sleeping
takes no processor, so eight ranks fit on two cores and only the schedules differ. `schedule` is the bubble that torch's
list of actions has by itself (simulated without communication), `paper` the formula of the paper it comes from.
"""

import argparse
import contextlib
import io
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.utils.data import DataLoader

from tests.helpers.ranks import launch_ranks

# ------------------------------------------------------------------------------------------------ the GPT


@dataclass(frozen=True)
class Compute:
    """The first table's settings."""

    layers: int = 8
    width: int = 512
    heads: int = 8
    length: int = 128
    vocabulary: int = 256
    batch_size: int = 16
    microbatches: int = 8
    schedule: str = "1f1b"
    rounds: int = 5
    steps: int = 3


class Block(nn.Module):
    """Nanogpt's, without dropout. `ranks`: a rank's part of the heads, for those who divide it by hand."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.ranks = heads, 1
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        C, heads = C // self.ranks, self.heads // self.ranks
        q, k, v = (t.view(B, T, heads, -1).transpose(1, 2) for t in self.c_attn(self.ln_1(x)).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.proj(F.gelu(self.fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, settings: Compute) -> None:
        super().__init__()
        width = settings.width
        self.tokens = nn.Embedding(settings.vocabulary, width)
        self.positions = nn.Embedding(settings.length, width)
        self.blocks = nn.ModuleList([Block(width, settings.heads) for _ in range(settings.layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, settings.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x) + self.positions(torch.arange(x.size(1), device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Stage(nn.Module):
    """One of two stages as one writes them by hand: half of the blocks, and what is before or behind them."""

    def __init__(self, model: GPT, rank: int) -> None:
        super().__init__()
        half = len(model.blocks) // 2
        self.tokens = model.tokens if rank == 0 else None
        self.positions = model.positions if rank == 0 else None
        self.blocks = model.blocks[:half] if rank == 0 else model.blocks[half:]
        self.norm = model.norm if rank == 1 else None
        self.head = model.head if rank == 1 else None

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None and self.positions is not None:
            x = self.tokens(x) + self.positions(torch.arange(x.size(1), device=x.device))
        for block in self.blocks:
            x = block(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-3)


class LitGPT(pl.LightningModule):
    def __init__(self, settings: Compute) -> None:
        super().__init__()
        self.model = GPT(settings)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = loss_of(self.model(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self)


def batches(settings: Compute, count: int) -> list[tuple[Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(0)
    shape = (settings.batch_size, settings.length)
    inputs = [torch.randint(0, settings.vocabulary, shape, generator=rng) for _ in range(count)]
    return [(x, (3 * x + 1) % settings.vocabulary) for x in inputs]


def by_hand(settings: Compute, rank: int) -> Callable[[tuple[Tensor, Tensor]], float | None]:
    """A training step written with torch.distributed.pipelining; gives the loss on the last rank."""
    torch.manual_seed(0)
    stage = Stage(GPT(settings), rank)
    optimizer = adamw(stage)
    rows = settings.batch_size // settings.microbatches
    tokens = torch.zeros(rows, settings.length, dtype=torch.long)
    hidden = torch.zeros(rows, settings.length, settings.width, requires_grad=True)
    logits = torch.zeros(rows, settings.length, settings.vocabulary, requires_grad=True)
    arguments, results = (tokens, hidden) if rank == 0 else (hidden, logits)
    pipeline_stage = PipelineStage(stage, rank, 2, torch.device("cpu"), input_args=arguments, output_args=results)
    kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[settings.schedule]
    schedule = kind(pipeline_stage, settings.microbatches, loss_fn=loss_of)

    def step(batch: tuple[Tensor, Tensor]) -> float | None:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(batch[0])
        else:
            schedule.step(target=batch[1], losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        return float(torch.stack(losses).detach().mean()) if losses else None

    return step


def alone(settings: Compute, rank: int) -> Callable[[tuple[Tensor, Tensor]], float | None]:
    """The same work in one process, rank 0, while the other waits."""
    torch.manual_seed(0)
    model = GPT(settings)
    optimizer = adamw(model)

    def step(batch: tuple[Tensor, Tensor]) -> float | None:
        if rank != 0:
            return None
        total = 0.0
        for x, y in zip(*(part.chunk(settings.microbatches) for part in batch), strict=True):
            loss = loss_of(model(x), y) / settings.microbatches
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


class Turns(pl.Callback):
    """After every few steps of the Trainer, the other contestants do as many."""

    def __init__(self, settings: Compute, rank: int) -> None:
        self.settings, self.rank = settings, rank
        self.data = batches(settings, settings.steps)
        self.times: dict[str, list[float]] = {"ours": [], "by hand": [], "one process": []}
        self.first_losses: dict[str, float] = {}
        self.started = 0.0

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.others = {"by hand": by_hand(self.settings, self.rank), "one process": alone(self.settings, self.rank)}

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        if index % self.settings.steps == 0:
            dist.barrier()
            self.started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        if index == 0:
            self.first_losses["ours"] = float(outputs["loss"])
        if (index + 1) % self.settings.steps:
            return
        dist.barrier()
        self.times["ours"].append((time.perf_counter() - self.started) / self.settings.steps)
        for name, step in self.others.items():
            dist.barrier()
            start = time.perf_counter()
            losses = [step(data) for data in self.data]
            dist.barrier()
            self.times[name].append((time.perf_counter() - start) / self.settings.steps)
            if losses[0] is not None:
                self.first_losses.setdefault(name, losses[0])


def train(
    module: pl.LightningModule, data: list[Any], world_size: int, layout: dict[str, Any], *callbacks: Any
) -> None:
    from lnn_lightning import PTDPStrategy

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=PTDPStrategy(**layout),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=list(callbacks),
    )
    trainer.fit(module, DataLoader(data, batch_size=None, collate_fn=lambda batch: batch))  # type: ignore[arg-type]


def compute_rank(rank: int, world_size: int, settings: Compute) -> tuple[dict[str, list[float]], dict[str, float]]:
    torch.manual_seed(0)
    module = LitGPT(settings)
    turns = Turns(settings, rank)
    data = turns.data * (settings.rounds + 1)
    layout = {
        "pipeline_parallel_size": world_size,
        "schedule": settings.schedule,
        "microbatches": settings.microbatches,
        "split_points": [f"model.blocks.{settings.layers // 2}"],
    }
    train(module, data, world_size, layout, turns)
    return {name: times[1:] for name, times in turns.times.items()}, turns.first_losses  # the first round is warm-up


def run_quietly(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Run ranks without showing what Lightning says on them."""
    with contextlib.redirect_stdout(io.StringIO()):
        return launch_ranks(fn, world_size, *args, timeout=3600)


def ratio(times: list[float], others: list[float]) -> float:
    """Median over the rounds of what a contestant took to what another took in the same round."""
    return statistics.median(one / other for one, other in zip(times, others, strict=True))


def compute_table(settings: Compute) -> str:
    results = run_quietly(compute_rank, 2, settings)
    times, losses = results[0][0], results[0][1] | results[1][1]
    reference = losses["one process"]
    if any(abs(loss - reference) > 1e-4 * reference for loss in losses.values()):
        raise RuntimeError(f"the contestants do not do the same work; first losses: {losses}")
    medians = {name: statistics.median(values) for name, values in times.items()}
    stages, m = 2, settings.microbatches
    lines = [
        f"GPT, {settings.layers} layers of width {settings.width}, {settings.length} tokens, batch of "
        f"{settings.batch_size} in {m} micro-batches, {settings.schedule} on {stages} ranks; "
        f"{settings.rounds} rounds of {settings.steps} steps; the bubble by the formula (p-1)/(m+p-1): "
        f"{(stages - 1) / (m + stages - 1):.3f}",
        "",
        "| | step (s), median | lowest | highest | to hand-written | to one process | bubble |",
        "|---|---|---|---|---|---|---|",
    ]
    labels = {"ours": "PTDPStrategy in the Trainer", "by hand": "hand-written stages", "one process": "one process"}
    for name, label in labels.items():
        median, values = medians[name], times[name]
        to_hand, to_single = ratio(values, times["by hand"]), ratio(values, times["one process"])
        bubble = "" if name == "one process" else f"{1 - 1 / (stages * to_single):.3f}"
        lines.append(
            f"| {label} | {median:.3f} | {min(values):.3f} | {max(values):.3f} | {to_hand:.3f} "
            f"| {to_single:.3f} | {bubble} |"
        )
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------ sleeping blocks


@dataclass(frozen=True)
class Sleep:
    """The second table's settings; `seconds` a micro-batch and rank, for each of forward and the two backwards."""

    ranks: int = 8
    microbatches: int = 16
    seconds: float = 0.06
    steps: int = 3
    schedules: tuple[str, ...] = ("naive", "gpipe", "1f1b", "interleaved", "zero_bubble", "zbv")


STAGES_PER_RANK = {"interleaved": 2, "zbv": 2}


class SleepInBackward(torch.autograd.Function):
    """The identity; its backward sleeps."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class SleepingBlock(nn.Module):
    def __init__(self, seconds_a_row: float) -> None:
        super().__init__()
        self.seconds_a_row = seconds_a_row
        self.weight = nn.Parameter(torch.zeros(1024))

    def forward(self, x: Tensor) -> Tensor:
        seconds = self.seconds_a_row * x.size(0)
        time.sleep(seconds)
        return SleepInBackward.apply(x, seconds) + SleepInBackward.apply(self.weight, seconds)[:1]


class Sleeper(pl.LightningModule):
    def __init__(self, settings: Sleep) -> None:
        super().__init__()
        self.inputs = nn.Linear(4, 4)
        blocks = 2 * settings.ranks
        self.blocks = nn.ModuleList([SleepingBlock(settings.seconds / 2) for _ in range(blocks)])
        self.output = nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.inputs(batch)
        for block in self.blocks:
            x = block(x)
        return self.output(x).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class StepTimes(pl.Callback):
    """From the agreed start of a batch to the time when all ranks are done."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.started = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        dist.barrier()
        self.started = time.perf_counter()

    def on_train_batch_end(self, *args: Any) -> None:
        dist.barrier()
        self.times.append(time.perf_counter() - self.started)


def sleep_rank(rank: int, world_size: int, settings: Sleep, schedule: str) -> list[float]:
    per_rank = STAGES_PER_RANK.get(schedule, 1)
    per_stage = 2 // per_rank
    layout = {
        "pipeline_parallel_size": world_size,
        "schedule": schedule,
        "microbatches": settings.microbatches,
        "stages_per_rank": per_rank,
        "split_points": [f"blocks.{per_stage * stage}" for stage in range(1, per_rank * world_size)],
    }
    times = StepTimes()
    data = [torch.randn(settings.microbatches, 4) for _ in range(settings.steps + 1)]
    train(Sleeper(settings), data, world_size, layout, times)
    return times.times[1:]


class _NoStage(_PipelineStageBase):
    """As much of a stage as a schedule needs to make its list of actions."""

    def __init__(self, index: int, num_stages: int, ranks: int) -> None:
        self.stage_index, self.num_stages, self.group_size, self.group_rank = index, num_stages, ranks, 0
        self.submod, self.has_backward, self.group = nn.Identity(), True, None

    def _create_grad_recv_info(self, *args: Any) -> Any:
        return ()

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        return ()

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        return ()


def ideal_step(schedule: str, settings: Sleep) -> float:
    """Seconds that a schedule's list of actions takes if communication takes none."""
    per_rank, p = STAGES_PER_RANK.get(schedule, 1), settings.ranks
    work = 3 * settings.seconds
    if schedule == "naive":
        return work * settings.microbatches * p
    if schedule in ("gpipe", "1f1b"):
        return work * (settings.microbatches + p - 1)
    classes = {
        "interleaved": torch_schedules.ScheduleInterleaved1F1B,
        "zero_bubble": torch_schedules.ScheduleInterleavedZeroBubble,
        "zbv": torch_schedules.ScheduleZBVZeroBubble,
    }
    places = (0, 2 * p - 1) if schedule == "zbv" else tuple(p * i for i in range(per_rank))
    stages: Any = [_NoStage(place, per_rank * p, p) for place in places]
    order = classes[schedule](stages, settings.microbatches, loss_fn=lambda output, target: output).pipeline_order
    return makespan(order, per_rank * p, settings.seconds / per_rank)


def makespan(order: dict[int, list[Any]], num_stages: int, unit: float) -> float:
    """When the last action ends: each waits for its rank's one before and for its neighbour stage's."""
    durations = {"F": unit, "I": unit, "W": unit, "B": 2 * unit}
    queues = {rank: [action for action in actions if action is not None] for rank, actions in order.items()}
    for rank, queue in queues.items():
        queues[rank] = [action for action in queue if action.computation_type.value in durations]
    clock = dict.fromkeys(queues, 0.0)
    done: dict[tuple[str, int, int], float] = {}
    while any(queues.values()):
        progress = False
        for rank, queue in queues.items():
            while queue:
                kind, stage, chunk = queue[0].computation_type.value, queue[0].stage_index, queue[0].microbatch_index
                if kind == "F":
                    needs = [("F", stage - 1, chunk)] if stage > 0 else []
                elif kind == "W":
                    needs = [("back", stage, chunk)]
                else:
                    needs = [("back", stage + 1, chunk)] if stage < num_stages - 1 else [("F", stage, chunk)]
                if any(need not in done for need in needs):
                    break
                begin = max([clock[rank], *(done[need] for need in needs)])
                clock[rank] = begin + durations[kind]
                done[("back" if kind in "IB" else kind, stage, chunk)] = clock[rank]
                queue.pop(0)
                progress = True
        if not progress:
            raise RuntimeError("the schedule's actions wait for each other")
    return max(clock.values())


def paper_bubble(schedule: str, p: int, m: int) -> str:
    """Idle share of a step, forward and both backwards taking equally long."""
    v = STAGES_PER_RANK.get(schedule, 1)
    formulas = {
        "naive": (p - 1) / p,
        "gpipe": (p - 1) / (m + p - 1),
        "1f1b": (p - 1) / (m + p - 1),
        "interleaved": (p - 1) / (v * m + p - 1),
        "zero_bubble": (p - 1) / (3 * m + p - 1),  # ZB-H1
    }
    return f"{formulas[schedule]:.3f}" if schedule in formulas else "about 0"


def sleep_table(settings: Sleep) -> str:
    p, m = settings.ranks, settings.microbatches
    work = 3 * settings.seconds * m
    lines = [
        f"Sleeping blocks, {p} ranks, {m} micro-batches, {1000 * settings.seconds:.0f} ms a rank and micro-batch for "
        f"each of forward, input backward and weight backward; {work:.2f} s of work a rank; {settings.steps} steps",
        "",
        "| schedule | stages a rank | step (s), median | bubble | schedule | paper |",
        "|---|---|---|---|---|---|",
    ]
    for schedule in settings.schedules:
        times = run_quietly(sleep_rank, p, settings, schedule)[0]
        median = statistics.median(times)
        ideal = 1 - work / ideal_step(schedule, settings)
        lines.append(
            f"| {schedule} | {STAGES_PER_RANK.get(schedule, 1)} | {median:.2f} | {1 - work / median:.3f} "
            f"| {ideal:.3f} | {paper_bubble(schedule, p, m)} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller and fewer")
    parser.add_argument("--only", choices=["compute", "sleep"], help="one table")
    parser.add_argument("--schedules", nargs="+", default=list(Sleep.schedules), help="rows of the second table")
    parser.add_argument("--rounds", type=int, help="rounds of the first table")
    options = parser.parse_args()
    compute = Compute(layers=6, rounds=3, steps=2) if options.quick else Compute()
    if options.rounds:
        compute = Compute(layers=compute.layers, rounds=options.rounds, steps=compute.steps)
    sleep = Sleep(seconds=0.03, steps=2) if options.quick else Sleep()
    sleep = Sleep(seconds=sleep.seconds, steps=sleep.steps, schedules=tuple(options.schedules))
    if options.only != "sleep":
        print(compute_table(compute), flush=True, end="\n\n")
    if options.only != "compute":
        print(sleep_table(sleep), flush=True)


if __name__ == "__main__":
    main()
