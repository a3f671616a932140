"""ZeRO over the data axis: the same numbers as one process, in every layout."""

from functools import cache
from typing import Any

import pytest
import torch

from tests.helpers.ranks import launch_ranks
from tests.helpers.reference import DEFAULT_RUN, Result, Run, differences, train_reference, train_with_trainer
from tests.zoo import ZOO

NAMES = ["gpt_tied", "unet", "hf_llama", "hf_t5", "gpt_two_groups", "frozen_embedding", "shared_bias"]
DATA: dict[str, Any] = {"data_parallel_size": 2, "microbatches": 2}
BOTH: dict[str, Any] = {"pipeline_parallel_size": 2, "data_parallel_size": 2, "schedule": "1f1b", "microbatches": 2}
HYBRID: dict[str, Any] = {"data_parallel_size": (2, 2), "microbatches": 2}


@cache
def reference(name: str, run: Run, micro: int) -> Result:
    return train_reference(ZOO[name], run, micro)


def check(name: str, world_size: int, layout: dict[str, Any], run: Run = DEFAULT_RUN) -> None:
    """Train under the layout and compare with one process."""
    case = ZOO[name]
    results = launch_ranks(train_with_trainer, world_size, name, layout, run)
    expected = reference(name, run, 1 if case.per_sample else layout["microbatches"])
    double = run.dtype == torch.float64
    found = differences(results, expected, case.tolerance if double else 1e-5, case.loss_tolerance if double else 1e-5)
    assert not found, f"{name} under {layout}:\n" + "\n".join(found)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_data(name: str, stage: int) -> None:
    check(name, 2, {**DATA, "zero_stage": stage})


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", ["gpt_tied", "gpt_two_groups", "frozen_embedding", "hf_t5"])
def test_accumulation_and_clipping(name: str, stage: int) -> None:
    check(name, 2, {**DATA, "zero_stage": stage}, Run(accumulate=3, clip=0.1))


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("reshard", [False, True])
def test_reshard_between_microbatches(reshard: bool, microbatches: int) -> None:
    layout = {"data_parallel_size": 2, "microbatches": microbatches, "zero_stage": 3}
    check("gpt_tied", 2, {**layout, "reshard_between_microbatches": reshard}, Run(accumulate=2, clip=0.1))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", ["gpt_tied", "unet", "hf_t5", "shared_bias"])
def test_pipeline_and_data(name: str, stage: int) -> None:
    check(name, 4, {**BOTH, "zero_stage": stage}, Run(accumulate=2, clip=0.1))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble", "zbv"])
def test_schedules(schedule: str) -> None:
    layout = {**BOTH, "schedule": schedule, "stages_per_rank": 2, "zero_stage": 3}
    check("gpt_deep", 4, layout, Run(accumulate=2, clip=0.1))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", ["gpt_tied", "unet"])
def test_hybrid(name: str, stage: int) -> None:
    check(name, 4, {**HYBRID, "zero_stage": stage}, Run(accumulate=2, clip=0.1))
