"""Blocks with divided experts that run again in backward: the same exchanges on all ranks, in the same order."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lnn_lightning import ExpertParallel, Upcycle
from lnn_lightning.memory.recompute_blocks import Segment
from lnn_lightning.parallel.expert.axis import ExpertAxis
from lnn_lightning.parallel.expert.dispatch import run_experts
from lnn_lightning.parallel.expert.exchange import Sent, counting
from lnn_lightning.parallel.step.extension import UnitRun
from lnn_lightning.parallel.step.remember import checkpoints_remember, remembered
from lnn_lightning.parallel.step.trace import Call
from lnn_lightning.parallel.tensor.axis import TensorAxis
from tests.helpers.ranks import launch_ranks, run_ranks
from tests.helpers.reference import Run, differences, train_all, train_reference
from tests.zoo import ZOO

EXPERTS, WIDTH = 4, 6


class Experts(nn.Module):
    """A router and this rank's experts; the router chooses between close numbers, and the choice draws from chance."""

    def __init__(self, axis: ExpertAxis, only: int = EXPERTS) -> None:
        super().__init__()
        self.axis, self.only = axis, only
        self.router = nn.Linear(WIDTH, EXPERTS)
        whole = torch.randn(EXPERTS, WIDTH, WIDTH)
        span = axis.span(EXPERTS)
        self.weight = nn.Parameter(whole[span.start : span.stop].clone())

    def compute(self, rows: Tensor, counts: list[int]) -> Tensor:
        parts = [part @ self.weight[index] for index, part in enumerate(rows.split(counts))]
        return nn.functional.dropout(torch.tanh(torch.cat(parts)), 0.25)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        index = remembered(lambda: torch.multinomial(logits[:, : self.only].detach().softmax(-1), 2, self.only == 1))
        weights = logits.gather(1, index).sigmoid()
        rows = run_experts(x, index.flatten(), EXPERTS, self.axis, self.compute)
        return x + (rows.view(*index.shape, WIDTH) * weights.unsqueeze(-1)).sum(1)


def plain(blocks: list[nn.Module], x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def in_segments(blocks: list[nn.Module], x: Tensor, length: int = 1) -> Tensor:
    segment = Segment()
    for index, block in enumerate(blocks):
        if len(segment) == length:
            segment = Segment()
        x = segment.run(UnitRun(0, 0, Call(index, f"{index}", f"{index}"), block), block, (x,), {})
    return x


def in_one_segment(blocks: list[nn.Module], x: Tensor) -> Tensor:
    return in_segments(blocks, x, len(blocks))


def in_checkpoints(blocks: list[nn.Module], x: Tensor) -> Tensor:
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def in_reentrant_checkpoints(blocks: list[nn.Module], x: Tensor) -> Tensor:
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=True)
    return x


def in_nested_checkpoints(blocks: list[nn.Module], x: Tensor) -> Tensor:
    return checkpoint(in_checkpoints, blocks, x, use_reentrant=False)


WAYS = [in_segments, in_one_segment, in_checkpoints, in_reentrant_checkpoints, in_nested_checkpoints]


def _outcome(
    rank: int, way: Callable[..., Tensor], only: int, tokens: list[int], frozen: str, axis: ExpertAxis | None = None
) -> tuple[list[Tensor | None], Sent]:
    """Result and gradients of two micro-batches, both forwards first, and what was sent."""
    torch.manual_seed(0)
    axis = axis or ExpertAxis(dist.get_world_size(), rank, dist.group.WORLD, 0.5)
    blocks: list[nn.Module] = [Experts(axis, only) for _ in range(3)]
    for block in blocks[: 2 if "first" in frozen else 3]:
        block.router.requires_grad_("router" not in frozen)
        block.weight.requires_grad_("experts" not in frozen)
    torch.manual_seed(1 + rank)
    x = torch.randn(2, tokens[rank], WIDTH, requires_grad="input" not in frozen)
    with counting() as sent, checkpoints_remember():
        outs = [way(blocks, each) for each in x]
        for out in outs:
            out.square().sum().backward()
    state = torch.get_rng_state()
    parameters = [parameter.grad for block in blocks for parameter in block.parameters()]
    return [*(out.detach() for out in outs), x.grad, *parameters, state], sent


def _equal_in_all_ways(rank: int, world_size: int) -> None:
    cases = [
        (EXPERTS, [7, 5], "input"),
        (EXPERTS, [7, 5], ""),
        (2, [7, 5], "input"),  # nobody for the experts of the second rank
        (1, [7, 0], "input"),  # and a rank that has no tokens
        (EXPERTS, [7, 5], "input, router, experts, first"),
        (EXPERTS, [7, 5], "experts"),
        (EXPERTS, [7, 5], "router"),
        (EXPERTS, [7, 5], "router, experts"),
    ]
    for case in cases:
        expected, alone = _outcome(rank, plain, *case)
        for way in WAYS:
            if way is in_reentrant_checkpoints and "input" in case[2]:
                continue  # it has no gradients then
            got, sent = _outcome(rank, way, *case)
            where = f"{way.__name__} {case}"
            assert len(got) == len(expected)
            for a, b in zip(expected, got, strict=True):
                assert (a is None) == (b is None) and (a is None or torch.equal(a, b)), where
            assert sent.counts == alone.counts, where  # the numbers of rows are not exchanged again
            assert sent.backward == alone.backward, where
            assert sent.forward >= alone.forward, where


def _equal_on_tensor_ranks(rank: int, world_size: int) -> None:
    """Tensor ranks bring the same tokens; inside the experts each draws its own masks, behind them all are alike."""
    for divides in (False, True):
        group, alone = dist.group.WORLD, dist.new_group([rank], use_local_synchronization=True)
        tensor = TensorAxis(world_size, rank, group)
        place = (1, 0, alone) if divides else (world_size, rank, group)
        axis = ExpertAxis(*place, 2.0, tensor, divides)
        results = [_outcome(0, way, EXPERTS, [7], "input", axis)[0] for way in (plain, *WAYS[:3])]
        for got in results[1:]:
            pairs = zip(results[0], got, strict=True)
            assert all((a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in pairs)
        output, state = results[0][0], results[0][-1]
        assert output is not None and state is not None
        for each in (output, state):  # results and random numbers are the same on both
            others = [torch.empty_like(each) for _ in range(world_size)]
            dist.all_gather(others, each)
            assert torch.equal(others[0], others[1])


def test_random_numbers_on_tensor_ranks() -> None:
    run_ranks(_equal_on_tensor_ranks, 2, timeout=40)


def test_same_numbers_in_all_ways() -> None:
    run_ranks(_equal_in_all_ways, 2, timeout=25)


# ------------------------------------------------------------------------------------------------ in a Trainer


UPCYCLED = ExpertParallel(2, upcycle=Upcycle("*.mlp", 4, gate="gshard", capacity_factor=1.5, every=1))
TRAINED: list[tuple[str, dict[str, Any], list[Any]]] = [
    ("moe_mixtral", {"expert": ExpertParallel(2)}, ["full"]),
    ("moe_skipping", {"expert": ExpertParallel(2)}, ["auto", 2]),
    ("moe_dropout", {"expert": ExpertParallel(2)}, ["full"]),
    ("moe_noisy", {"expert": ExpertParallel(2)}, ["full"]),
    ("moe_litgpt", {"expert": ExpertParallel(2)}, ["selective"]),
    ("gpt_two_groups", {"expert": UPCYCLED, "microbatches": 2}, ["full"]),
]
"""Case, layout, and settings of `recompute` that must change nothing."""


def test_recompute_changes_no_number() -> None:
    """Noise of routers, dropout in experts, chance in gates and auxiliary losses included."""
    jobs = [
        (name, {**layout, "recompute": recompute}, Run(n_steps=2))
        for name, layout, settings in TRAINED
        for recompute in (None, *settings)
    ]
    results = iter(launch_ranks(train_all, 2, jobs, timeout=60)[0])
    for name, _, settings in TRAINED:
        expected = next(results)
        for recompute in settings:
            got = next(results)
            assert got.losses == expected.losses, (name, recompute)
            for key, value in expected.state.items():
                assert torch.equal(got.state[key], value), (name, recompute, key)


@pytest.mark.slow
def test_pipelines() -> None:
    """Two micro-batches under way on each stage; and a backward whose inputs and weights are made apart."""
    layout = {"expert": ExpertParallel(2), "pipeline_parallel_size": 2, "microbatches": 2}
    run = Run(n_steps=2)
    jobs = [
        (name, {**layout, "schedule": schedule, "recompute": recompute}, run)
        for name in ("moe_mixtral", "moe_skipping")
        for schedule, recompute in (("1f1b", "full"), ("zero_bubble", None), ("zbv", None))
    ]
    results = launch_ranks(train_all, 4, jobs, timeout=240)
    for index, (name, settings, _) in enumerate(jobs):
        expected = train_reference(ZOO[name], run)
        found = differences([each[index] for each in results], expected, 1e-8, 1e-6)
        assert not found, f"{name} {settings}: {found}"
