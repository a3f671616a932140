"""Equal numbers with layers divided over tensor ranks: losses and parameters as on one process."""

from typing import Any

import pytest
import torch

from tests.helpers.reference import DEFAULT_RUN, Run, differences
from tests.test_equality import reference, train
from tests.zoo import ZOO

COMPARABLE = [name for name, case in ZOO.items() if case.deterministic]
SEQUENCE = {"sequence_parallel": True}


def check(name: str, layout: dict[str, Any], run: Run = DEFAULT_RUN) -> float:
    """Train under the layout, compare with one process, and the ranks with each other; the share that is divided."""
    case = ZOO[name]
    tensor, pipeline = layout["tensor_parallel_size"], layout.get("pipeline_parallel_size", 1)
    layout = {"microbatches": 2, **layout}
    world_size = tensor * pipeline * layout.get("data_parallel_size", 1)
    results = train(name, world_size, layout, run)
    expected = reference(name, run, 1 if case.per_sample else layout["microbatches"])
    single_loss = case.loss_tolerance > 1e-9  # transformers computes it in float32
    tolerance = 1e-5 if single_loss or run.dtype != torch.float64 else case.tolerance
    found = differences(results, expected, tolerance)
    for rank, result in enumerate(results):
        twin = rank % (world_size // pipeline) // tensor * tensor
        if result.losses != results[twin].losses:
            found.append(f"rank {rank} was told other losses than rank {twin}")
        logged, last = result.metrics["train_loss"], result.losses[-1]
        if abs(logged - last) > 1e-6 * abs(last):
            found.append(f"rank {rank} logged {logged}, but its last loss was {last}")
    assert not found, f"{name} under {layout}:\n" + "\n".join(found)
    return results[0].divided
