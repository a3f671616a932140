"""Switch's claim in small: experts learn faster than a dense model of the same work a token.

    python -m benchmarks.switch                      # some minutes on two cores
    python -m benchmarks.switch --steps 50 --every 10

Two GPTs of `examples/gpt.py` on the text of the demo, from scratch: one dense, one with eight experts in place of every
second feed-forward module, of which each byte goes to one (Fedus et al. 2021, arXiv 2101.03961: switch gate, capacity
1.25, balance loss 0.01). A token costs both the same products, the router aside. Weights outside the experts begin the
same, each expert begins with values of its own; batches, their order and the learning rate are the same. Each trains in
a process of its own, at the same time; both are validated on the same windows, without noise and with the same
capacity.
"""

import argparse
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from examples.gpt import ByteGPT, warmup_cosine
from examples.text import TextFolder, Windows
from lnn_lightning.parallel.expert.layer import MoELayer
from lnn_lightning.parallel.expert.settings import Upcycle
from lnn_lightning.parallel.expert.upcycle import upcycle
from tests.helpers.ranks import run_ranks

KINDS = ("dense", "switch", "switch, nothing dropped")


@dataclass(frozen=True)
class Settings:
    """The model, and how it is trained."""

    kinds: tuple[str, ...]
    steps: int
    every: int
    experts: int
    seed: int
    layers: int = 4
    heads: int = 4
    width: int = 128
    length: int = 128
    batch_size: int = 32
    lr: float = 0.004
    warmup: int = 50
    validation_batches: int = 16


@dataclass
class Found:
    """Validation losses by step, parameters, and seconds a step (median) of the clock and of the processor."""

    losses: dict[int, float]
    parameters: int
    wall: float
    busy: float
    dropped: float


def build(kind: str, settings: Settings) -> ByteGPT:
    torch.manual_seed(settings.seed)
    model = ByteGPT(settings.layers, settings.heads, settings.width, settings.length)
    if kind != "dense":
        factor = 1.25 if kind == "switch" else None
        experts = Upcycle("blocks.*.mlp", settings.experts, top_k=1, every=2, gate="switch", capacity_factor=factor)
        for name in upcycle(model, experts, settings.seed):
            layer = model.get_submodule(name)
            assert isinstance(layer, MoELayer)
            start_differently(layer)
    return model


def start_differently(layer: MoELayer) -> None:
    """Values for each expert, drawn as those of the dense module were: from scratch, nothing is to be copied."""
    with torch.no_grad():
        for parameter in layer.experts.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=parameter.std().item())


def train(rank: int, world_size: int, settings: Settings) -> Found:
    """Runs on each rank, which has a model of its own."""
    model = build(settings.kinds[rank], settings)
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    routings: list[Any] = []
    for layer in layers:
        layer.router.register_forward_hook(lambda _, __, routing: routings.append(routing))
    data = TextFolder(block_size=settings.length, batch_size=settings.batch_size, seed=settings.seed)
    data.setup("fit")
    assert data.train is not None and data.val is not None
    validation = batches(data.val, settings, torch.arange(settings.validation_batches * settings.batch_size))
    draw = torch.Generator().manual_seed(settings.seed)
    order = torch.randperm(len(data.train), generator=draw)[: settings.steps * settings.batch_size]
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95))
    found = Found({}, sum(parameter.numel() for parameter in model.parameters()), 0.0, 0.0, 0.0)
    wall, busy, dropped = [], [], []
    for index, batch in enumerate(batches(data.train, settings, order)):
        routings.clear()
        start, busy_before = time.perf_counter(), time.process_time()
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * warmup_cosine(index, settings.warmup, settings.steps, 0.1)
        loss = model.loss(batch)
        (
            loss + sum(layer.aux_loss * each.losses["balance"] for layer, each in zip(layers, routings, strict=True))
        ).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        wall.append(time.perf_counter() - start)
        busy.append(time.process_time() - busy_before)
        dropped += [each.dropped.item() / each.load.sum().item() for each in routings]
        if (index + 1) % settings.every == 0:
            found.losses[index + 1] = evaluate(model, validation)
            if rank == world_size - 1:
                print(settings.kinds[rank], index + 1, found.losses[index + 1], flush=True)
    found.wall, found.busy = statistics.median(wall), statistics.median(busy)
    found.dropped = statistics.mean(dropped) if dropped else 0.0
    return found


def batches(windows: Windows, settings: Settings, order: Tensor) -> list[tuple[Tensor, Tensor]]:
    groups = order.split(settings.batch_size)
    return [tuple(default_collate([windows[int(index)] for index in group])) for group in groups]


@torch.no_grad()
def evaluate(model: ByteGPT, validation: list[tuple[Tensor, Tensor]]) -> float:
    model.eval()
    loss = statistics.mean(model.loss(batch).item() for batch in validation)
    model.train()
    return loss


def table(settings: Settings, results: list[Found]) -> str:
    steps = list(results[0].losses)
    lines = [
        f"GPT, {settings.layers} layers of width {settings.width}, {settings.length} bytes, batch of "
        f"{settings.batch_size}, {settings.experts} experts, seed {settings.seed}; validation loss in nats a byte",
        "",
        f"| | parameters | {' | '.join(str(step) for step in steps)} | step (ms) | processor (ms) | dropped |",
        "|---" * (len(steps) + 5) + "|",
    ]
    for kind, found in zip(settings.kinds, results, strict=True):
        losses = " | ".join(f"{loss:.4f}" for loss in found.losses.values())
        times = f"{1000 * found.wall:.0f} | {1000 * found.busy:.0f} | {found.dropped:.2%}"
        lines.append(f"| {kind} | {found.parameters:,} | {losses} | {times} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--every", type=int, default=100, help="steps between validations")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["dense", "switch"])
    options = parser.parse_args()
    settings = Settings(tuple(options.kinds), options.steps, options.every, options.experts, options.seed)
    print(table(settings, run_ranks(train, len(settings.kinds), settings, timeout=7200)))


if __name__ == "__main__":
    main()
