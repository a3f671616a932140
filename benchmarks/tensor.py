"""What tensor parallelism costs over layers written by hand for it.

    python -m benchmarks.tensor            # some minutes on two cores
    python -m benchmarks.tensor --quick    # less than one
    python -m benchmarks.tensor --profile  # where our own time goes

A GPT on two ranks, forward, backward and optimizer step. The engine divides the ordinary model; against it stand
Megatron's layers written by hand (Shoeybi et al. 2019, section 3: plain `torch.distributed`, same products, same
collectives, vocabulary-parallel embedding and cross entropy) and torch's `parallelize_module` (DTensor parameters,
`loss_parallel`), both with the rows of the fused projection permuted so that a rank has whole heads. All take turns
within one run, so that they meet the same machine, and start from the same weights: their first losses must agree.
"""

import argparse
import cProfile
import io
import pstats
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

from benchmarks.pipeline import GPT, batches, loss_of
from lnn_lightning.parallel.layout import Mesh, resolve_layout
from lnn_lightning.parallel.pipeline.engine import PipelineEngine, PipelineSettings
from lnn_lightning.parallel.pipeline.schedules import place
from lnn_lightning.parallel.step.observer import StepObserver
from tests.helpers.ranks import run_ranks

Batch = tuple[Tensor, Tensor]
Contestant = Callable[[Batch], float]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Settings:
    """Size of the model and of the measurement."""

    width: int
    layers: int = 4
    heads: int = 8
    length: int = 128
    vocabulary: int = 1024
    batch_size: int = 8
    rounds: int = 15
    steps: int = 3


# ------------------------------------------------------------------------------------------------ the ordinary model


def built(settings: Settings) -> GPT:
    torch.manual_seed(0)
    return GPT(settings)


# ------------------------------------------------------------------------------------------------ ours


def ours(settings: Settings, sequence: bool = False) -> Contestant:
    model = built(settings)
    mesh = Mesh.create(resolve_layout(dist.get_world_size(), tensor_parallel_size=dist.get_world_size()), "cpu")
    cut = PipelineSettings(place("1f1b", 1, 1), microbatches=1, sequence_parallel=sequence)
    engine = PipelineEngine(model, cut, mesh, StepObserver())

    def step(batch: Batch) -> Tensor:
        return loss_of(model(batch[0]), batch[1])

    batch = batches(settings, settings.steps)[0]
    engine.prepare("step", step, batch, training=True)
    engine.find_loss_form(step, batch)
    engine.setup_training()
    optimizer = torch.optim.AdamW(engine.residence.parameters(), lr=1e-3)

    def run(batch: Batch) -> float:
        result = engine.train_step("step", step, batch, CPU, 1.0, sync=True)
        optimizer.step()
        optimizer.zero_grad()
        assert result.loss is not None
        return result.loss.item()

    return run


# ------------------------------------------------------------------------------------------------ Megatron's, by hand


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.mark_dirty(value)
        dist.all_reduce(value)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _VocabularyLoss(torch.autograd.Function):
    """Mean cross entropy of logits of which each rank has some columns."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        highest = logits.amax(-1, keepdim=True)
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        shifted = logits - highest
        index = targets - dist.get_rank() * logits.size(-1)
        here = (index >= 0) & (index < logits.size(-1))
        index = index.masked_fill(~here, 0)
        picked = shifted.gather(-1, index[:, None])[:, 0].masked_fill(~here, 0.0)
        exp = shifted.exp_()
        both = torch.stack([picked, exp.sum(-1)])
        dist.all_reduce(both)
        ctx.save_for_backward(exp.div_(both[1][:, None]), index, here)
        return (both[1].log() - both[0]).mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        softmax, index, here = ctx.saved_tensors
        softmax.scatter_add_(-1, index[:, None], -here.to(softmax.dtype)[:, None])
        return softmax * (gradient / len(index)), None


class ColumnLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(_Enter.apply(x), self.weight, self.bias)


class RowLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        out = _Sum.apply(F.linear(x, self.weight))
        return out if self.bias is None else out + self.bias


class VocabularyEmbedding(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        index = ids - dist.get_rank() * len(self.weight)
        here = (index >= 0) & (index < len(self.weight))
        rows = F.embedding(index.masked_fill(~here, 0), self.weight)
        return _Sum.apply(rows.masked_fill(~here[..., None], 0.0))


def permuted_heads(model: GPT) -> GPT:
    """The rows of the fused projections in the order (rank, q or k or v): a plain part holds whole heads."""
    size = dist.get_world_size()
    for block in model.blocks:
        for parameter in (block.c_attn.weight, block.c_attn.bias):
            parts = parameter.data.view(3, size, -1, *parameter.shape[1:])
            parameter.data = parts.transpose(0, 1).reshape(parameter.shape)
        block.ranks = size
    return model


def _take(module: nn.Module, kind: type[nn.Module], dims: dict[str, int]) -> None:
    module.__class__ = kind
    for name, dim in dims.items():
        parameter = getattr(module, name)
        part = parameter.data.chunk(dist.get_world_size(), dim)[dist.get_rank()]
        parameter.data = part.clone(memory_format=torch.contiguous_format)


def by_hand(settings: Settings) -> Contestant:
    model = permuted_heads(built(settings))
    for block in model.blocks:
        for layer in (block.c_attn, block.fc):
            _take(layer, ColumnLinear, {"weight": 0, "bias": 0})
        for layer in (block.c_proj, block.proj):
            _take(layer, RowLinear, {"weight": 1})
    _take(model.tokens, VocabularyEmbedding, {"weight": 0})
    _take(model.head, ColumnLinear, {"weight": 0})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def run(batch: Batch) -> float:
        loss = _VocabularyLoss.apply(model(batch[0]).flatten(0, 1), batch[1].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return run


# ------------------------------------------------------------------------------------------------ torch's DTensor


def by_torch(settings: Settings) -> Contestant:
    model = permuted_heads(built(settings))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan: dict[str, Any] = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    for index in range(settings.layers):
        plan |= {f"blocks.{index}.{name}": ColwiseParallel() for name in ("c_attn", "fc")}
        plan |= {f"blocks.{index}.{name}": RowwiseParallel() for name in ("c_proj", "proj")}
    parallelize_module(model, mesh, plan)
    parameters = list(model.parameters())
    kinds = [[p for p in parameters if isinstance(p, DTensor) == divided] for divided in (True, False)]
    optimizer = torch.optim.AdamW([{"params": kind} for kind in kinds], lr=1e-3)

    def run(batch: Batch) -> float:
        with loss_parallel():
            loss = loss_of(model(batch[0]), batch[1])
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        return float(loss.full_tensor() if isinstance(loss, DTensor) else loss)

    return run


# ------------------------------------------------------------------------------------------------ measuring

CONTESTANTS: dict[str, Callable[[Settings], Contestant]] = {
    "engine": ours,
    "engine, sequence parallel": lambda settings: ours(settings, sequence=True),
    "Megatron's layers by hand": by_hand,
    "parallelize_module": by_torch,
}


Times = dict[str, list[float]]


def measure(rank: int, world_size: int, settings: Settings) -> tuple[Times, Times, dict[str, float]]:
    """Runs on each rank: seconds a step in each round, seconds of processor time, and the first losses."""
    data = batches(settings, settings.steps)
    contestants = {name: make(settings) for name, make in CONTESTANTS.items()}
    losses = {name: run(data[0]) for name, run in contestants.items()}
    times: Times = {name: [] for name in contestants}
    busy: Times = {name: [] for name in contestants}
    for index in range(settings.rounds + 1):
        for name, run in contestants.items():
            dist.barrier()
            start, busy_before = time.perf_counter(), time.process_time()
            for batch in data:
                run(batch)
            dist.barrier()
            if index > 0:  # the first round warms up
                times[name].append((time.perf_counter() - start) / settings.steps)
                busy[name].append((time.process_time() - busy_before) / settings.steps)
    return times, busy, losses


def profile(rank: int, world_size: int, settings: Settings) -> str:
    """Runs on each rank: the functions of our own steps, most expensive first, without and with what they call."""
    data, run = batches(settings, settings.steps), ours(settings)
    for batch in data:
        run(batch)
    profiler = cProfile.Profile()
    with profiler if rank == 0 else nullcontext():
        for _ in range(10):
            for batch in data:
                run(batch)
    text = io.StringIO()
    if rank == 0:
        statistic = pstats.Stats(profiler, stream=text)
        statistic.sort_stats("tottime").print_stats(35)
        statistic.sort_stats("cumtime").print_stats(60)
    return text.getvalue()


def table(settings: Settings) -> str:
    """Measures and formats one model size."""
    times, busy, losses = run_ranks(measure, 2, settings, timeout=3600)[0]
    reference = losses["Megatron's layers by hand"]
    if any(abs(loss - reference) > 1e-4 * reference for loss in losses.values()):
        raise RuntimeError(f"the contestants do not do the same work; first losses: {losses}")
    lines = [
        f"GPT, {settings.layers} layers of width {settings.width}, {settings.heads} heads, {settings.length} tokens, "
        f"batch of {settings.batch_size}, vocabulary {settings.vocabulary}, on 2 ranks; {settings.rounds} rounds of "
        f"{settings.steps} steps; processor time of rank 0, which other jobs on the machine disturb less",
        "",
        "| | step (ms), median | lowest | to by hand | to parallelize_module | processor (ms) | to by hand | to p.m. |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, values in times.items():
        cells = [1000 * statistics.median(values), 1000 * min(values), *_ratios(times, name)]
        cells += [1000 * statistics.median(busy[name]), *_ratios(busy, name)]
        formats = ("{:.1f}", "{:.1f}", "{:.3f}", "{:.3f}", "{:.1f}", "{:.3f}", "{:.3f}")
        lines.append(
            " | ".join([f"| {name}", *(f.format(cell) for f, cell in zip(formats, cells, strict=True))]) + " |"
        )
    return "\n".join(lines)


def _ratios(times: Times, name: str) -> list[float]:
    """Medians over the rounds of what one took to what the two others took in the same round."""
    return [
        statistics.median(one / other for one, other in zip(times[name], times[reference], strict=True))
        for reference in ("Megatron's layers by hand", "parallelize_module")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--width", type=int, nargs="+", default=[512, 64], help="a table for each")
    parser.add_argument("--profile", action="store_true", help="where our own time goes")
    options = parser.parse_args()
    for width in options.width:
        settings = Settings(width)
        if width < 256:
            settings = replace(settings, steps=10)
        if options.quick:
            settings = replace(settings, rounds=5)
        print(run_ranks(profile, 2, settings)[0] if options.profile else table(settings), flush=True, end="\n\n")


if __name__ == "__main__":
    main()
