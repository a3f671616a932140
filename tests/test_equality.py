"""Equal numbers in every layout: losses and parameters as on one process with the same global batches."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from tests.helpers.ranks import RanksFailed, launch_ranks
from tests.helpers.reference import DEFAULT_RUN, Result, Run, differences, train_reference, train_with_trainer
from tests.zoo import EXPERTS, ZOO

COMPARABLE = [name for name, case in ZOO.items() if case.deterministic and not case.refused and name not in EXPERTS]
REPRESENTATIVE = ["gpt_tied", "unet", "hf_t5", "hf_llama"]
SCHEDULES: dict[str, dict[str, Any]] = {
    "naive": {"schedule": "naive", "microbatches": 4},
    "gpipe": {"schedule": "gpipe", "microbatches": 4},
    "1f1b": {"schedule": "1f1b", "microbatches": 4},
    "interleaved": {"schedule": "interleaved", "stages_per_rank": 2, "microbatches": 4},
    "zero_bubble": {"schedule": "zero_bubble", "stages_per_rank": 2, "microbatches": 4},
    "zbv": {"schedule": "zbv", "stages_per_rank": 2, "microbatches": 4},
}


@cache
def reference(name: str, run: Run, micro: int) -> Result:
    return train_reference(ZOO[name], run, micro)


def train(
    name: str, world_size: int, layout: dict[str, Any], run: Run = DEFAULT_RUN, timeout: float = 120.0
) -> list[Result]:
    return launch_ranks(train_with_trainer, world_size, name, layout, run, timeout=timeout)


def check(name: str, world_size: int, layout: dict[str, Any], run: Run = DEFAULT_RUN) -> None:
    """Train under the layout, compare with one process, and the ranks with each other."""
    case = ZOO[name]
    results = train(name, world_size, layout, run)
    expected = reference(name, run, 1 if case.per_sample else layout["microbatches"])
    double = run.dtype == torch.float64
    found = differences(results, expected, case.tolerance if double else 1e-5, case.loss_tolerance if double else 1e-5)
    replicas = world_size // layout.get("pipeline_parallel_size", 1)
    for rank, result in enumerate(results):
        if result.losses != results[rank % replicas].losses:
            found.append(f"rank {rank} was told other losses than the other stages of its pipeline")
        logged, last = result.metrics["train_loss"], result.losses[-1]
        if abs(logged - last) > 1e-6 * abs(last):
            found.append(f"rank {rank} logged {logged}, but its last loss was {last}")
    assert not found, f"{name} under {layout}:\n" + "\n".join(found)


@pytest.mark.parametrize("name", COMPARABLE)
def test_two_stages(name: str) -> None:
    check(name, 2, {"pipeline_parallel_size": 2, "schedule": "1f1b", "microbatches": 4})


@pytest.mark.parametrize("name", REPRESENTATIVE)
@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "1f1b"])
def test_schedules(schedule: str, name: str) -> None:
    check(name, 2, {"pipeline_parallel_size": 2, **SCHEDULES[schedule]})


@pytest.mark.parametrize("microbatches", [1, 2, 3, 8, "auto"])
def test_numbers_of_microbatches(microbatches: int | str) -> None:
    """1: fewer than stages; 3: does not divide the batch."""
    check("gpt_tied", 2, {"pipeline_parallel_size": 2, "schedule": "1f1b", "microbatches": microbatches})


@pytest.mark.parametrize("name", ["gpt_tied", "unet"])
def test_float32(name: str) -> None:
    check(name, 2, {"pipeline_parallel_size": 2, "microbatches": 4}, Run(dtype=torch.float32))


@pytest.mark.parametrize("name", ["gpt_tied", "ignored_targets", "weighted_classes", "sum_loss", "shared_bias"])
def test_one_stage(name: str) -> None:
    """Data parallelism alone is the same path."""
    check(name, 2, {"pipeline_parallel_size": 1, "data_parallel_size": 2, "microbatches": 2})


@pytest.mark.parametrize("name", ["gpt_tied", "gpt_two_groups", "shared_bias", "frozen_embedding"])
def test_accumulation_and_clipping(name: str) -> None:
    run = Run(accumulate=2, clip=0.1)
    check(name, 2, {"pipeline_parallel_size": 2, "schedule": "1f1b", "microbatches": 2}, run)


@pytest.mark.parametrize("name", [name for name, case in ZOO.items() if case.refused])
def test_refused(name: str) -> None:
    """On all ranks, with the reason."""
    with pytest.raises(RanksFailed) as caught:
        train(name, 2, {"pipeline_parallel_size": 2, "microbatches": 4})
    for rank in range(2):
        assert ZOO[name].refused in caught.value.tracebacks[rank]


def test_split_points() -> None:
    check("gpt_untied", 2, {"pipeline_parallel_size": 2, "microbatches": 4, "split_points": ["model.transformer.h.1"]})


def test_dropout_is_reproducible() -> None:
    layout = {"pipeline_parallel_size": 2, "microbatches": 4}
    first, second = train("gpt_dropout", 2, layout), train("gpt_dropout", 2, layout)
    assert not differences(first, second[0], 1e-12)
    without = reference("gpt_tied", Run(), 1)
    assert differences(first, without, 1e-3), "dropout has no effect"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["gpt_tied", "hf_llama_ignored", "ignored_targets", "hf_t5", "unet", "shared_bias", "encoder_decoder"]
)
def test_pipeline_and_data(name: str) -> None:
    layout = {"pipeline_parallel_size": 2, "data_parallel_size": 2, "schedule": "1f1b", "microbatches": 2}
    check(name, 4, layout, Run(accumulate=2, clip=0.1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("gpt_tied", "1f1b"),
        ("gpt_deep", "interleaved"),
        ("gpt_deep", "zero_bubble"),
        ("gpt_deep", "zbv"),
        ("unet", "1f1b"),
        ("hf_t5", "1f1b"),
        ("swin", "1f1b"),
        ("encoder_decoder", "gpipe"),
        ("dict_blocks", "1f1b"),
        ("shared_bias", "1f1b"),
    ],
)
def test_four_stages(name: str, schedule: str) -> None:
    check(name, 4, {"pipeline_parallel_size": 4, **SCHEDULES[schedule]})


def many_stages() -> Iterator[tuple[str, str]]:
    """Each model under one of the two schedules that split its backward, every fourth under the one that does not.

    `test_schedules` has all schedules of some models, `test_two_stages` the whole backward of every model.
    """
    for index, name in enumerate(name for name in COMPARABLE if ZOO[name].blocks >= 4):
        yield name, ("zero_bubble", "zbv")[index % 2]
        if index % 4 == 0:
            yield name, "interleaved"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "schedule"), many_stages())
def test_many_stages_of_everything(name: str, schedule: str) -> None:
    """Cuts in three places, on two ranks."""
    check(name, 2, {"pipeline_parallel_size": 2, **SCHEDULES[schedule]})
