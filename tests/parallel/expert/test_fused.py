"""Stacked experts shared out over ranks: the numbers of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lnn_lightning.parallel.expert.axis import ExpertAxis
from lnn_lightning.parallel.expert.install import ExpertSharding, prepare_seams
from tests.helpers.ranks import run_ranks
from tests.parallel.expert.families import family


def tokens(rank: int, step: int = 0, width: int = 16) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(2, 5 + 2 * rank, width, generator=generator, dtype=torch.float64)


def out_of(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


def everyones(block: nn.Module, ranks: int, steps: int = 1) -> tuple[list[list[Tensor]], dict[str, Tensor | None]]:
    """Outputs by rank and step, and gradients of the mean over the ranks of their losses, on one process."""
    outputs: list[list[Tensor]] = []
    for rank in range(ranks):
        outputs.append([])
        for step in range(steps):
            value = tokens(rank, step).requires_grad_()
            out = out_of(block(value))
            (out.square().mean() / ranks).backward()
            outputs[-1] += [out.detach(), value.grad * ranks]
    return outputs, {name: each.grad for name, each in block.named_parameters()}


def compare(block: nn.Module, reference: nn.Module, axis: ExpertAxis, sharding: ExpertSharding) -> float:
    """The largest difference of outputs and gradients."""
    ranks = dist.get_world_size()
    wanted, gradients = everyones(reference, ranks, steps=2)
    worst, got = 0.0, []
    for step in range(2):
        value = tokens(dist.get_rank(), step).requires_grad_()
        out = out_of(block(value))
        out.square().mean().backward()
        got += [out.detach(), value.grad]
    for a, b in zip(got, wanted[dist.get_rank()], strict=True):
        worst = max(worst, float((a - b).abs().max()))
    for name, parameter in block.named_parameters():
        wanted_gradient, gradient = gradients[name], parameter.grad
        if not sharding.lives_here(name):
            continue
        assert (gradient is None) == (wanted_gradient is None), name
        if gradient is None or wanted_gradient is None:
            continue
        if name in sharding.names:
            assert gradient.shape == sharding.local_shape(name)
            wanted_gradient = sharding.local(name, wanted_gradient)
        else:
            dist.all_reduce(gradient)
            gradient /= ranks
        worst = max(worst, float((gradient - wanted_gradient).abs().max()))
    return worst


def block_of(name: str, experts: int, implementation: str) -> nn.Module:
    model = family(name, experts, implementation)
    layer = model.model.layers[0]  # type: ignore[union-attr,index]
    return next(each for each in layer.children() if hasattr(each, "experts")).double()


def _equal(rank: int, size: int, cases: list[tuple[str, int, str]]) -> dict[str, float]:
    found = {}
    for name, experts, implementation in cases:
        reference = block_of(name, experts, implementation)
        block = copy.deepcopy(reference)
        axis = ExpertAxis(size, rank, dist.group.WORLD, 1 / size)
        sharding = ExpertSharding(block, prepare_seams(block), axis)
        sharding.install()
        assert not sharding.left, sharding.left
        rows = [parameter.shape[0] for each, parameter in block.named_parameters() if each in sharding.names]
        assert set(rows) == {len(axis.span(experts))}
        found[f"{name} {experts} {implementation}"] = compare(block, reference, axis, sharding)
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_blocks_equal_one_process(size: int) -> None:
    cases = [("mixtral", 4, "eager"), ("mixtral", 6, "batched_mm"), ("qwen3_moe", 4, "eager"), ("gpt_oss", 6, "eager")]
    cases += [("deepseek_v3", 4, "eager"), ("qwen2_moe", 6, "eager")]
    for found in run_ranks(_equal, size, cases):
        assert max(found.values()) < 1e-12, found
