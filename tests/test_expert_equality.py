"""Experts spread over ranks: losses and parameters as on one process, in every layout. Several trainings a spawn."""

from functools import cache
from typing import Any

import pytest
import torch

from lnn_lightning import ExpertParallel
from tests.helpers.ranks import launch_ranks
from tests.helpers.reference import Result, Run, differences, train_all, train_reference
from tests.zoo import ZOO

SHORT = Run(n_steps=2, accumulate=2, clip=0.1)
"""Two optimizer steps, each of two batches, clipped by the norm of all gradients."""
FUSED = ["moe_mixtral_six", "moe_qwen3", "moe_deepseek_v3", "moe_gpt_oss"]
LOOPS = ["moe_switch", "moe_litgpt", "moe_skipping_uneven", "moe_sorted", "moe_named", "moe_balanced"]
FEW = ["moe_mixtral", "moe_skipping_uneven", "moe_switch"]
EP2: dict[str, Any] = {"expert": ExpertParallel(2)}
EP4: dict[str, Any] = {"expert": ExpertParallel(4)}
Job = tuple[str, dict[str, Any], Run]


@cache
def reference(name: str, run: Run, micro: int) -> Result:
    return train_reference(ZOO[name], run, micro)


def check(world_size: int, jobs: list[Job]) -> None:
    """Runs the trainings on so many ranks and compares each with one process."""
    found = []
    results = launch_ranks(train_all, world_size, jobs, timeout=60 + 20 * len(jobs))
    for index, (name, layout, run) in enumerate(jobs):
        case = ZOO[name]
        tensor = layout.get("tensor_parallel_size", 1)
        ranks = world_size // layout.get("pipeline_parallel_size", 1) // tensor
        expected = reference(name, run, 1 if case.per_sample else ranks * layout.get("microbatches", 1))
        tolerance = 1e-5 if run.dtype == torch.float32 else max(case.tolerance, case.loss_tolerance)
        if tensor > 1 and name in (*FUSED, *FEW):  # parts of these models compute in fp32 whatever they are given
            tolerance = max(tolerance, 1e-6)
        problems = differences([each[index] for each in results], expected, tolerance)
        expert = layout["expert"]
        parts = expert.size * layout.get("pipeline_parallel_size", 1) * (tensor if expert.divide_experts else 1)
        parts *= max(1, ranks * tensor // parts) if layout.get("zero_stage", 0) > 1 else 1
        share = sum(each[index].spread for each in results) / world_size
        if not 0 < share <= 1.05 / parts:
            problems.append(f"ranks hold {share:.3f} of the experts, not 1/{parts}")
        found += [f"{name} under {layout}: {problem}" for problem in problems[:4]]
    assert not found, "\n".join(found)


def test_two_expert_ranks() -> None:
    """Accumulation, clipping and micro-batches; in fp32 too."""
    layout = {**EP2, "microbatches": 2}
    jobs = [(name, layout, SHORT) for name in FEW]
    check(2, [*jobs, ("moe_mixtral", EP2, Run(n_steps=2, dtype=torch.float32))])


@pytest.mark.slow
@pytest.mark.parametrize("names", [FUSED, LOOPS], ids=["fused", "loops"])
def test_everything_on_two_expert_ranks(names: list[str]) -> None:
    check(2, [(name, EP2, SHORT) for name in names])


@pytest.mark.slow
@pytest.mark.parametrize("names", [["moe_mixtral", "moe_deepseek_v3"], ["moe_litgpt", "moe_switch"]])
def test_experts_and_data(names: list[str]) -> None:
    """Four expert ranks, two of them with two copies of each expert, and every stage of ZeRO."""
    layouts: list[dict[str, Any]] = [
        EP4,
        EP2,
        *({**EP2, "zero_stage": stage, "microbatches": 2} for stage in (1, 2, 3)),
    ]
    check(4, [(name, layout, SHORT) for name in names for layout in layouts])


@pytest.mark.slow
def test_experts_and_hybrid_sharding() -> None:
    layouts = [{**EP2, "data_parallel_size": (2, 2), "zero_stage": stage} for stage in (1, 3)]
    check(4, [("moe_mixtral", layout, SHORT) for layout in layouts])


@pytest.mark.slow
def test_zero_where_no_other_rank_has_the_same_experts() -> None:
    check(2, [(name, {**EP2, "zero_stage": stage}, SHORT) for name in FEW[:2] for stage in (1, 2, 3)])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero_bubble"])
def test_experts_and_pipeline(schedule: str) -> None:
    layout = {**EP2, "pipeline_parallel_size": 2, "schedule": schedule, "microbatches": 2}
    check(4, [(name, layout, SHORT) for name in FEW])


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("names", [["moe_mixtral", "moe_qwen3"], ["moe_skipping", "moe_sorted", "moe_switch"]])
def test_tensor_ranks_with_whole_experts(names: list[str], world_size: int) -> None:
    """Each sends its share of the tokens; two expert ranks: the tensor ranks. Sequence parallelism, too."""
    layout = {**EP2, "tensor_parallel_size": 2}
    check(
        world_size, [(name, each, SHORT) for name in names for each in (layout, {**layout, "sequence_parallel": True})]
    )


@pytest.mark.slow
def test_fewer_expert_ranks_than_tensor_ranks() -> None:
    """A group of expert ranks has a part of the tokens alone; only the average over groups is the whole gradient."""
    check(
        4,
        [
            (name, {**EP2, "tensor_parallel_size": 4, "zero_stage": 1}, SHORT)
            for name in ("moe_mixtral", "moe_skipping")
        ],
    )


@pytest.mark.slow
@pytest.mark.parametrize("names", [["moe_mixtral", "moe_qwen3"], ["moe_skipping", "moe_litgpt"]])
def test_tensor_ranks_that_divide_experts(names: list[str]) -> None:
    layout = {"expert": ExpertParallel(2, divide_experts=True), "tensor_parallel_size": 2}
    check(4, [(name, layout, SHORT) for name in names])
