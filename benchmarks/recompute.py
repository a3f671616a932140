"""What recomputation saves and what it costs.

    python -m benchmarks.recompute            # some minutes on one core
    python -m benchmarks.recompute --quick    # less than one

A GPT on one process, attention and dropout written by hand, run by the engine. Bytes are those that autograd keeps of a
block between forward and backward (saved-tensor hooks, each memory once, parameters and buffers left out), beside the
formulas of Korthikanti et al. 2022 (arXiv 2205.05198): ``sbh(34 + 5as/h)`` without recomputation, ``34sbh`` without
the core of attention, ``2sbh`` with the block's input alone. They count two bytes a value and one a dropout mask's;
here both are as large as they are on the device (in float32 on the CPU: four, four). Times are the processor's, of
forward and backward of a step; all settings take turns within one run, the best of its rounds counts.
"""

import argparse
import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from lnn_lightning.memory.counting import saved_bytes
from lnn_lightning.memory.recompute import Recompute, recompute_extension
from lnn_lightning.parallel.layout import Mesh, resolve_layout
from lnn_lightning.parallel.pipeline.engine import PipelineEngine, PipelineSettings
from lnn_lightning.parallel.pipeline.schedules import place
from lnn_lightning.parallel.step.extension import Body, StepExtension, UnitRun
from lnn_lightning.parallel.step.observer import StepObserver
from tests.helpers.ranks import run_ranks

CPU = torch.device("cpu")
RECOMPUTE: tuple[Recompute, ...] = (None, "selective", "full", 2, "auto")


@dataclass(frozen=True)
class Shape:
    """Size of the model: Korthikanti's letters."""

    layers: int = 2
    s: int = 512
    b: int = 1
    h: int = 2048
    a: int = 16
    dropout: float = 0.1
    vocabulary: int = 64


class Block(nn.Module):
    """GPT's, with the attention written out."""

    mask: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        h = shape.h
        self.heads = shape.a
        self.ln_1, self.ln_2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.out = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.fc, self.proj = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)
        self.drop_core, self.drop_1, self.drop_2 = (nn.Dropout(shape.dropout) for _ in range(3))
        self.register_buffer("mask", torch.ones(shape.s, shape.s, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (
            t.view(B, T, self.heads, C // self.heads).transpose(1, 2) for t in self.qkv(self.ln_1(x)).split(C, 2)
        )
        scores = (q @ k.transpose(-2, -1)) * (1 / math.sqrt(C // self.heads))
        scores = scores.masked_fill(self.mask[:T, :T], float("-inf"))
        y = self.drop_core(F.softmax(scores, dim=-1)) @ v
        x = x + self.drop_1(self.out(y.transpose(1, 2).contiguous().view(B, T, C)))
        return x + self.drop_2(self.proj(F.gelu(self.fc(self.ln_2(x)))))


class GPT(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.h)
        self.blocks = nn.ModuleList([Block(shape) for _ in range(shape.layers)])
        self.head = nn.Linear(shape.h, shape.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def formula(shape: Shape, value: int, mask: int, recompute: Recompute) -> float:
    """Bytes a block keeps on the average, after Korthikanti, for values and masks of so many bytes.

    ``34sbh`` are 16 values and two masks a token and feature, ``5as^2b`` two values and a mask a score.
    """
    sbh = shape.s * shape.b * shape.h
    scores = shape.a * shape.s**2 * shape.b
    selective = sbh * (16 * value + 2 * mask)
    none, full = selective + scores * (2 * value + mask), sbh * value
    if recompute is None:
        return none
    if recompute == "selective":
        return selective
    every = recompute if isinstance(recompute, int) else 1
    chosen = math.ceil(shape.layers / every)
    return (chosen * full + (shape.layers - chosen) * none) / shape.layers


@dataclass
class Counting(StepExtension):
    """Counts what is kept of each block."""

    ignored: list[Tensor]
    on: bool = False
    bytes: list[int] = field(default_factory=list)

    @override
    def call(self, run: UnitRun, body: Body, args: Any, kwargs: Any) -> Any:
        if not self.on or not isinstance(run.unit, Block):
            return body(*args, **kwargs)
        with saved_bytes(self.ignored) as counted:
            out = body(*args, **kwargs)
        self.bytes.append(counted.total)
        return out


class Contestant:
    """The GPT under one setting."""

    def __init__(self, shape: Shape, recompute: Recompute, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.model, self.dtype = GPT(shape), dtype
        mesh = Mesh.create(resolve_layout(1), "cpu")
        settings = PipelineSettings(place("1f1b", 1, 1), microbatches=1)
        self.engine = PipelineEngine(self.model, settings, mesh, StepObserver(), seed=1)
        self.batch = torch.randint(0, shape.vocabulary, (shape.b, shape.s + 1))
        self.engine.prepare("training_step", self.step, self.batch, training=True)
        self.engine.setup_training()
        self.counting = Counting([*self.model.parameters(), *self.model.buffers()])
        units = self.engine.book.units
        made = recompute_extension(recompute, self.model, units, {0: units.names}, sharded=False)
        self.engine.extensions.extend([self.counting, *([made] if made is not None else [])])

    def step(self, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            logits = self.model(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

    def run(self) -> tuple[float, float]:
        """One step: its loss and seconds."""
        self.model.zero_grad(set_to_none=True)
        begin = time.process_time()
        result = self.engine.train_step("training_step", self.step, self.batch, CPU, 1.0, sync=True)
        assert result.loss is not None
        return float(result.loss), time.process_time() - begin

    def count(self) -> float:
        """Bytes kept of a block, on the average."""
        self.counting.on, self.counting.bytes = True, []
        self.run()
        self.counting.on = False
        return sum(self.counting.bytes) / len(self.counting.bytes)


@dataclass(frozen=True)
class Row:
    """What was measured of a setting."""

    recompute: Recompute
    bytes: float
    formula: float
    seconds: float
    loss: float


def measure(rank: int, world_size: int, shape: Shape, rounds: int) -> list[Row]:
    """All settings in turn; runs in `run_ranks`."""
    contestants = {value: Contestant(shape, value, torch.float32) for value in RECOMPUTE}
    kept = {value: one.count() for value, one in contestants.items()}
    best = dict.fromkeys(RECOMPUTE, math.inf)
    losses: dict[Recompute, float] = {}
    for _ in range(rounds):
        for value, one in contestants.items():
            losses[value], seconds = one.run()
            best[value] = min(best[value], seconds)
    return [Row(value, kept[value], formula(shape, 4, 4, value), best[value], losses[value]) for value in RECOMPUTE]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    small = Shape(layers=4, s=256, h=512, a=8, b=4)
    shapes = [small] if quick else [small, Shape(), Shape(a=64)]
    for shape in shapes:
        rows = run_ranks(measure, 1, shape, 3 if quick else 4, timeout=1800)[0]
        none = rows[0]
        print(f"\n{shape}: 5as/h = {5 * shape.a * shape.s / shape.h:.0f}")
        print(f"{'recompute':<12}{'MiB a block':>12}{'formula':>10}{'of it':>8}{'kept':>8}{'s a step':>10}{'ratio':>8}")
        for row in rows:
            print(
                f"{row.recompute!s:<12}{row.bytes / 2**20:>12.2f}{row.formula / 2**20:>10.2f}"
                f"{row.bytes / row.formula:>8.3f}{row.bytes / none.bytes:>8.3f}{row.seconds:>10.3f}"
                f"{row.seconds / none.seconds:>8.3f}"
            )
            assert row.loss == none.loss


if __name__ == "__main__":
    main()
