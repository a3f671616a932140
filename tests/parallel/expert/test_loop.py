"""Loops over experts, shared out and whole: the same results, gradients, attributes, buffers and random states."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.expert.axis import ExpertAxis
from lnn_lightning.parallel.expert.loop import run_loop
from lnn_lightning.parallel.expert.recording import Unsuited
from lnn_lightning.parallel.step.remember import checkpoints_remember
from lnn_lightning.parallel.step.standin import is_stand_in, replace_tensors, stand_in_for
from lnn_lightning.parallel.step.tree import tree_tensors
from tests.helpers.ranks import RanksFailed, run_ranks
from tests.zoo.experts import BLOCKS, BalancedMoE, FeedForward, LLaMAMoE, Routed, SkippingMoE
from tests.zoo.language import WIDTH

EXACT = [name for name in BLOCKS if name != "moe_dropout"]


def axis_of(rank: int, size: int) -> ExpertAxis:
    return ExpertAxis(size, rank, dist.group.WORLD, 1 / size)


def divide(block: nn.Module, axis: ExpertAxis, **options: Any) -> nn.Module:
    """A copy with stand-ins for the experts of other ranks."""
    block = copy.deepcopy(block)
    experts = list(block.experts.children())
    for place, expert in enumerate(experts):
        if place not in axis.span(len(experts)):
            replace_tensors(expert, lambda _, tensor: stand_in_for(tensor))
    forward = block.forward
    block.__dict__["forward"] = lambda *args, **kwargs: run_loop(
        block, forward, experts, axis, args, kwargs, name="the block", **options
    )
    return block


def build(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    return make().to(dtype)


def tokens_of(rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Each rank has another number of them."""
    return torch.randn(1 + rank, 5, WIDTH, dtype=dtype, generator=torch.Generator().manual_seed(rank))


def run(block: nn.Module, x: Tensor, weights: Callable[[Tensor], Tensor] | None = None) -> dict[str, Any]:
    """What a block gives and leaves behind, after forward and backward."""
    torch.manual_seed(11)
    x = x.clone().requires_grad_()
    outputs = [each for each in tree_tensors(block(x * 1))]
    random = torch.get_rng_state()
    loss = sum((each * torch.linspace(-1, 1, each.numel(), dtype=each.dtype).view_as(each)).sum() for each in outputs)
    if (auxiliary := getattr(block, "aux_loss", None)) is not None:
        loss = loss + 0.1 * auxiliary
    loss.backward()
    return {
        "outputs": [each.detach() for each in outputs],
        "input": x.grad,
        "gradients": {name: each.grad for name, each in block.named_parameters()},
        "buffers": dict(block.named_buffers()),
        "random": random,
        "calls": getattr(block, "calls", None),
        "auxiliary": None if auxiliary is None else auxiliary.detach(),
    }


def differences(block: nn.Module, axis: ExpertAxis, x: Tensor, tolerance: float = 1e-12) -> list[str]:
    whole, divided = copy.deepcopy(block), divide(block, axis)
    want, got = run(whole, x), run(divided, x)
    found = []

    def compare(what: str, a: Tensor | None, b: Tensor | None) -> None:
        if (a is None) != (b is None):
            found.append(f"{what}: {'no' if b is None else 'a'} value")
        elif a is not None and (a.shape != b.shape or a.dtype != b.dtype):
            found.append(f"{what}: {b.shape}, {b.dtype}")
        elif a is not None and not (a - b).abs().max() <= tolerance * a.abs().max().clamp(min=1e-3):
            found.append(f"{what}: {(a - b).abs().max():.1e}")

    for index, (a, b) in enumerate(zip(want["outputs"], got["outputs"], strict=True)):
        compare(f"output {index}", a, b)
    compare("input", want["input"], got["input"])
    compare("auxiliary", want["auxiliary"], got["auxiliary"])
    experts = sorted({name.rsplit("experts.")[1].split(".")[0] for name in want["gradients"] if "experts." in name
                      and "shared" not in name})
    here = [experts[place] for place in axis.span(len(experts))]
    for name, gradient in want["gradients"].items():
        if not name.startswith("experts."):
            compare(name, gradient, got["gradients"][name])
            continue
        everyones: list[Any] = [None] * axis.size
        dist.all_gather_object(everyones, gradient)
        known = [each for each in everyones if each is not None]
        if name.split(".")[1] in here:
            compare(name, sum(known) * axis.scale if known else None, got["gradients"][name])
        elif got["gradients"][name] is not None or not is_stand_in(dict(divided.named_parameters())[name]):
            found.append(f"{name} is elsewhere")
    for name, buffer in want["buffers"].items():
        compare(name, buffer, got["buffers"][name])
    if not torch.equal(want["random"], got["random"]):
        found.append("random state")
    if want["calls"] != got["calls"]:
        found.append(f"calls: {got['calls']}")
    return found


def compare_blocks(rank: int, world_size: int, names: list[str]) -> dict[str, list[str]]:
    axis = axis_of(rank, world_size)
    blocks = {name: build(BLOCKS[name]) for name in names}
    return {name: differences(block, axis, tokens_of(rank)) for name, block in blocks.items()}


def test_equal_to_the_whole_block() -> None:
    for found in run_ranks(compare_blocks, 2, EXACT):
        assert found == {name: [] for name in EXACT}


def test_four_ranks() -> None:
    names = ["moe_litgpt", "moe_sorted", "moe_swiglu", "moe_noisy"]
    for found in run_ranks(compare_blocks, 4, names):
        assert found == {name: [] for name in names}
