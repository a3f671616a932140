"""A layer of experts on two ranks, beside DeepSpeed's and fairscale's.

    python -m benchmarks.moe             # some minutes on two cores
    python -m benchmarks.moe --quick     # about two
    python -m benchmarks.moe --profile   # where our own time goes

Forward and backward of one layer, each rank with tokens of its own and half of the experts. Contestants of a table have
the same weights, tokens, number of choices and capacity, and take turns within one run, so that they meet the same
machine; where no gate throws dice their results are compared first. The bytes are what a rank hands to other ranks in
`all_to_all_single`, counted there for everyone. A peer that is not installed is named and left out.

A capacity of `f` lets an expert take `f * top_k * tokens / experts` of each rank's tokens. The peers compute that many
rows for every expert, filled or not; ours computes the rows that came. GShard's gate (ours, not DeepSpeed's or
fairscale's) sends a token to its second expert with the probability `2 * weight`, hence fewer rows: `top_k` is the
table's row without that. `undivided`: transformers' block with all experts on each rank, which sends nothing.
"""

import argparse
import contextlib
import cProfile
import inspect
import io
import math
import os
import pstats
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from lnn_lightning.parallel.expert.axis import ExpertAxis
from lnn_lightning.parallel.expert.install import ExpertSharding, prepare_seams
from lnn_lightning.parallel.expert.layer import MoELayer
from lnn_lightning.parallel.expert.router import Router
from lnn_lightning.parallel.expert.routing import Routing
from lnn_lightning.parallel.expert.settings import Gate
from tests.helpers.ranks import run_ranks

Run = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Tokens [N, width] to results and the loss for balance."""

Layer = tuple[Run, nn.Module]
"""A contestant, and where its parameters are."""

ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    # Memory that is freed is kept, as on an accelerator: tensors above 32 MB would be mapped anew each time.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_ARENA_MAX": "1",
}
"""Of the ranks."""


@dataclass(frozen=True)
class Settings:
    """A layer, and how often it is measured."""

    title: str
    width: int
    top_k: int
    capacity: float | None
    contestants: tuple[str, ...]
    swiglu: bool = False
    experts: int = 8
    tokens: int = 2048
    rounds: int = 15

    @property
    def hidden(self) -> int:
        return 4 * self.width


def tables(width: int, rounds: int) -> list[Settings]:
    """What is measured for a width."""
    return [
        Settings("top-1, capacity 1.25", width, 1, 1.25, ("MoELayer, switch", "DeepSpeed"), rounds=rounds),
        Settings(
            "top-2, GShard's capacity (1)",
            width,
            2,
            1.0,
            ("MoELayer, top_k", "MoELayer, gshard", "DeepSpeed", "fairscale"),
            rounds=rounds,
        ),
        Settings("top-1, nothing dropped", width, 1, None, ("MoELayer, switch", "DeepSpeed"), rounds=rounds),
        Settings("top-2, nothing dropped", width, 2, None, ("MoELayer, top_k", "DeepSpeed"), rounds=rounds),
        Settings("Mixtral's block", width, 2, None, ("adapter", "undivided", "DeepSpeed"), swiglu=True, rounds=rounds),
    ]


# ------------------------------------------------------------------------------------------------ the same weights


class Swiglu(nn.Module):
    """Mixtral's expert, with its fused first weight."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


def one_expert(settings: Settings) -> nn.Module:
    if settings.swiglu:
        return Swiglu(settings.width, settings.hidden)
    return nn.Sequential(
        nn.Linear(settings.width, settings.hidden), nn.GELU(), nn.Linear(settings.hidden, settings.width)
    )


def all_experts(settings: Settings) -> nn.ModuleList:
    """Every contestant's weights, equal on all ranks."""
    torch.manual_seed(0)
    return nn.ModuleList(one_expert(settings) for _ in range(settings.experts))


def router_weight(settings: Settings) -> Tensor:
    random = torch.Generator().manual_seed(1)
    return torch.randn(settings.experts, settings.width, generator=random) * settings.width**-0.5


def own(settings: Settings) -> range:
    """Experts of this rank."""
    each = settings.experts // dist.get_world_size()
    return range(dist.get_rank() * each, (dist.get_rank() + 1) * each)


# ------------------------------------------------------------------------------------------------ peers


def deepspeed_layer(settings: Settings) -> Layer:
    import deepspeed
    from deepspeed.moe.layer import MoE

    deepspeed.init_distributed(dist.get_backend(), verbose=False)
    layer = MoE(
        settings.width,
        one_expert(settings),
        num_experts=settings.experts,
        ep_size=dist.get_world_size(),
        k=settings.top_k,
        capacity_factor=settings.capacity or 1.0,
        drop_tokens=settings.capacity is not None,
        top2_2nd_expert_sampling=settings.capacity is not None,  # as the paper has it; else the second best
    )
    with contextlib.redirect_stdout(None):
        layer.set_deepspeed_parallelism()
    experts = all_experts(settings)
    for mine, index in zip(layer.deepspeed_moe.experts.deepspeed_experts, own(settings), strict=True):
        mine.load_state_dict(experts[index].state_dict())
    layer.deepspeed_moe.gate.wg.weight.data.copy_(router_weight(settings))

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        out, balance, _ = layer(x)
        return out, balance

    return run, layer


def fairscale_layer(settings: Settings) -> Layer:
    from fairscale.nn import MOELayer, Top2Gate

    experts = all_experts(settings)
    gate = Top2Gate(settings.width, settings.experts)
    gate.wg.weight.data.copy_(router_weight(settings))
    layer = MOELayer(gate, nn.ModuleList(experts[index] for index in own(settings)))

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        return layer(x.view(settings.experts, -1, settings.width)).flatten(0, 1), layer.l_aux

    return run, layer


# ------------------------------------------------------------------------------------------------ ours


def expert_axis() -> ExpertAxis:
    world = dist.get_world_size()
    return ExpertAxis(world, dist.get_rank(), dist.group.WORLD, scale=1 / world)


def our_layer(settings: Settings, gate: Gate) -> Layer:
    router = Router(settings.width, settings.experts, gate, settings.top_k, settings.capacity)
    router.weight.data.copy_(router_weight(settings))
    layer = MoELayer(router, all_experts(settings))
    layer.axis = expert_axis()
    routings: list[Routing] = []
    router.register_forward_hook(lambda _, __, routing: routings.append(routing))

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        return layer(x), routings.pop().losses["balance"]

    return run, layer


def mixtral_block(settings: Settings, divided: bool) -> Layer:
    """transformers' block, as a model has it: with the experts of this rank, or with all."""
    from transformers import MixtralConfig, MixtralModel

    config = MixtralConfig(
        vocab_size=8,
        hidden_size=settings.width,
        intermediate_size=settings.hidden,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=settings.experts,
        num_experts_per_tok=settings.top_k,
    )
    block: Any = MixtralModel(config).layers[0].mlp
    experts: Any = all_experts(settings)
    block.gate.weight.data.copy_(router_weight(settings))
    block.experts.gate_up_proj.data.copy_(torch.stack([expert.gate_up.weight for expert in experts]))
    block.experts.down_proj.data.copy_(torch.stack([expert.down.weight for expert in experts]))
    if divided:
        ExpertSharding(block, prepare_seams(block), expert_axis()).install()

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        return block(x[None])[0], x.new_zeros(())

    return run, block


CONTESTANTS: dict[str, Callable[[Settings], Layer]] = {
    "MoELayer, switch": lambda settings: our_layer(settings, "switch"),
    "MoELayer, top_k": lambda settings: our_layer(settings, "top_k"),
    "MoELayer, gshard": lambda settings: our_layer(settings, "gshard"),
    "adapter": lambda settings: mixtral_block(settings, divided=True),
    "undivided": lambda settings: mixtral_block(settings, divided=False),
    "DeepSpeed": deepspeed_layer,
    "fairscale": fairscale_layer,
}
PEERS = ("DeepSpeed", "fairscale", "undivided")


# ------------------------------------------------------------------------------------------------ measuring


@dataclass
class Found:
    """Of one rank, by contestant.

    Attributes:
        forward: seconds of each round.
        both: with backward.
        busy: of the processor, with backward: other jobs on the machine disturb them less.
        sent: bytes forward and backward.
        results: what came out.
        missing: who is left out, and why.
    """

    forward: dict[str, list[float]] = field(default_factory=dict)
    both: dict[str, list[float]] = field(default_factory=dict)
    busy: dict[str, list[float]] = field(default_factory=dict)
    sent: dict[str, tuple[int, int]] = field(default_factory=dict)
    results: dict[str, Tensor] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """Bytes that this rank hands to others by `all_to_all_single`: one number, in a list."""
    count, original = [0], dist.all_to_all_single
    signature = inspect.signature(original)

    def counting(output: Tensor, input: Tensor, *arguments: Any, **named: Any) -> Any:
        given = signature.bind(output, input, *arguments, **named).arguments
        size, rank = dist.get_world_size(given.get("group")), dist.get_rank(given.get("group"))
        split = given.get("input_split_sizes") or [len(input) // size] * size
        count[0] += (len(input) - split[rank]) * math.prod(input.shape[1:]) * input.element_size()
        return original(output, input, *arguments, **named)

    dist.all_to_all_single = counting
    try:
        yield count
    finally:
        dist.all_to_all_single = original


def tokens_of(rank: int, settings: Settings) -> Tensor:
    x = torch.randn(settings.tokens, settings.width, generator=torch.Generator().manual_seed(10 + rank))
    return x.requires_grad_()


def step(run: Run, x: Tensor) -> tuple[Tensor, float]:
    """Forward and backward; the result, and when the forward was over."""
    out, balance = run(x)
    middle = time.perf_counter()
    (out.square().mean() + 0.01 * balance).backward()
    return out.detach(), middle


def measure(rank: int, world_size: int, settings: Settings) -> Found:
    """Runs on each rank."""
    found = Found()
    layers: dict[str, Layer] = {}
    for name in settings.contestants:
        try:
            layers[name] = CONTESTANTS[name](settings)
        except ImportError as error:
            found.missing[name] = str(error)
    x = tokens_of(rank, settings)
    for name, (run, _) in layers.items():
        with counted() as bytes_forward:
            out, _ = run(x)
        found.results[name] = out.detach()
        with counted() as bytes_both:
            step(run, x)
        found.sent[name] = bytes_forward[0], bytes_both[0] - bytes_forward[0]
        found.forward[name], found.both[name], found.busy[name] = [], [], []
    for index in range(settings.rounds + 1):
        for name, (run, module) in layers.items():
            x.grad = None
            module.zero_grad()
            dist.barrier()
            start, busy_before = time.perf_counter(), time.process_time()
            _, middle = step(run, x)
            dist.barrier()
            if index > 0:  # the first round warms up
                found.forward[name].append(middle - start)
                found.both[name].append(time.perf_counter() - start)
                found.busy[name].append(time.process_time() - busy_before)
    return found


def profile(rank: int, world_size: int, settings: Settings) -> str:
    """Runs on each rank: the functions of our own steps, most expensive first."""
    name = settings.contestants[0]
    run, _ = CONTESTANTS[name](settings)
    x = tokens_of(rank, settings)
    step(run, x)
    profiler = cProfile.Profile()
    with profiler if rank == 0 else contextlib.nullcontext():
        for _ in range(10):
            step(run, x)
    text = io.StringIO()
    if rank == 0:
        pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(25)
    return f"{name}, {settings.title}, 10 steps\n{text.getvalue()}"


def check(settings: Settings, found: Found) -> None:
    """Where nothing is dropped all results are the same.

    Raises:
        RuntimeError: they are not.
    """
    if settings.capacity is not None or not found.results:
        return
    names = list(found.results)
    for name in names[1:]:
        off = (found.results[name] - found.results[names[0]]).abs().max() / found.results[names[0]].abs().max()
        if off > 1e-4:
            raise RuntimeError(f"{settings.title}: {name} does not do what {names[0]} does, {off:.1e} apart")


def table(settings: Settings) -> str:
    """Measures and formats one layer."""
    found: Found = run_ranks(measure, 2, settings, timeout=3600)[0]
    check(settings, found)
    peers = [name for name in PEERS if name in found.both]
    to = [f"to {peer}" for peer in peers]
    lines = [
        f"{settings.title}: width {settings.width}, {settings.experts} experts of {settings.hidden}, {settings.tokens} "
        f"tokens a rank, 2 ranks, {settings.rounds} rounds",
        *(f"left out: {name} ({reason})" for name, reason in found.missing.items()),
        "",
        _row("", "forward (ms)", "and backward", "lowest", *to, "processor (ms)", *to, "MB sent forward", "backward"),
        "|---" * (7 + 2 * len(peers)) + "|",
    ]
    for name, times in found.both.items():
        cells = [1000 * statistics.median(found.forward[name]), 1000 * statistics.median(times), 1000 * min(times)]
        busy = 1000 * statistics.median(found.busy[name])
        cells = [*cells, *_ratios(found.both, name, peers), busy, *_ratios(found.busy, name, peers)]
        numbers = [f"{cell:.1f}" if cell > 10 else f"{cell:.3f}" for cell in cells]
        lines.append(_row(name, *numbers, *(f"{sent / 1e6:.2f}" for sent in found.sent[name])))
    return "\n".join(lines)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _ratios(times: dict[str, list[float]], name: str, peers: list[str]) -> list[float]:
    """Medians over the rounds of what one took to what each peer took in the same round."""
    return [
        statistics.median(one / other for one, other in zip(times[name], times[peer], strict=True)) for peer in peers
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--width", type=int, nargs="+", default=[256, 512], help="tables for each")
    parser.add_argument("--only", type=int, nargs="+", help="the first, second, ... table alone")
    parser.add_argument("--profile", action="store_true", help="where our own time goes")
    options = parser.parse_args()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for width in options.width:
        chosen = tables(width, rounds=5 if options.quick else 15)
        for index in options.only or range(1, len(chosen) + 1):
            settings = chosen[index - 1]
            print(run_ranks(profile, 2, settings)[0] if options.profile else table(settings), flush=True, end="\n\n")


if __name__ == "__main__":
    main()
