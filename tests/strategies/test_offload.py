"""Offloaded optimizers: the same numbers in every layout, whatever goes on beside the steps."""

from typing import Any

import pytest
import torch

import lnn_lightning.memory.offload.optimizer as offloaded
from lnn_lightning import Offload
from tests.helpers.ranks import launch_ranks
from tests.helpers.reference import Run, differences, train_reference, train_with_trainer
from tests.zoo import ZOO


def train(rank: int, world_size: int, name: str, layout: dict[str, Any], run: Run, folder: str) -> Any:
    offloaded.SMALL = 1  # models of tests have nothing but small parameters
    return train_with_trainer(rank, world_size, name, {**layout, "offload": Offload(folder, chunk_size=4096)}, run)


@pytest.mark.parametrize(
    ("name", "world_size", "layout", "run"),
    [
        ("gpt_tied", 1, {}, Run()),
        ("unet", 1, {"microbatches": 2}, Run(accumulate=2, clip=0.1)),
        ("gpt_two_groups", 2, {"data_parallel_size": 2, "microbatches": 2, "zero_stage": 1}, Run(clip=0.1)),
        ("frozen_embedding", 2, {"data_parallel_size": 2, "microbatches": 2, "zero_stage": 3}, Run(accumulate=2)),
        ("gpt_tied", 2, {"pipeline_parallel_size": 2, "microbatches": 2}, Run()),
        ("hf_t5", 2, {"pipeline_parallel_size": 2, "microbatches": 2, "schedule": "zero_bubble"}, Run()),
        ("hf_llama", 2, {"tensor_parallel_size": 2, "microbatches": 1}, Run(clip=0.1)),
    ],
)
def test_same_numbers(tmp_path, name, world_size, layout, run) -> None:
    results = launch_ranks(train, world_size, name, layout, run, str(tmp_path))
    case = ZOO[name]
    expected = train_reference(case, run, 1 if case.per_sample else layout.get("microbatches", 1))
    double = run.dtype == torch.float64
    found = differences(results, expected, case.tolerance if double else 1e-5, case.loss_tolerance if double else 1e-5)
    assert not found, "\n".join(found)
    assert not list(tmp_path.iterdir())
