"""Recomputation in every layout: losses and parameters bit for bit those of the same layout without it."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from lnn_lightning.memory.recompute_replay import Replay
from tests.helpers.ranks import launch_ranks
from tests.helpers.reference import Run, train_with_trainer
from tests.zoo import language

SCHEDULES: list[dict[str, Any]] = [
    {"pipeline_parallel_size": 2, "schedule": "1f1b", "microbatches": 4},
    {"pipeline_parallel_size": 2, "schedule": "zero_bubble", "stages_per_rank": 2, "microbatches": 4},
    {"pipeline_parallel_size": 2, "schedule": "interleaved", "stages_per_rank": 2, "microbatches": 4},
]
TENSOR: list[dict[str, Any]] = [
    {"tensor_parallel_size": 2},
    {"tensor_parallel_size": 2, "sequence_parallel": True},
]
DATA: list[dict[str, Any]] = [
    {"microbatches": 2},
    {"zero_stage": 1, "microbatches": 2},
    {"zero_stage": 2, "microbatches": 2},
    {"zero_stage": 3, "microbatches": 2},
    {"zero_stage": 3, "microbatches": 2, "reshard_between_microbatches": True},
]
MIXED: list[dict[str, Any]] = [
    {"pipeline_parallel_size": 2, "data_parallel_size": 2, "microbatches": 2},
    {"pipeline_parallel_size": 2, "data_parallel_size": 2, "microbatches": 2, "zero_stage": 3},
    {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "microbatches": 2},
]


def compare(
    rank: int,
    world_size: int,
    case: str,
    layouts: list[dict[str, Any]],
    settings: list[Any],
    run: Run,
    options: dict[str, Any],
) -> list[str]:
    """What differs, in words; runs in `launch_ranks`."""
    ran = 0
    forward, replay = language.MLP.forward, Replay._run

    def counted(self: Any, x: torch.Tensor) -> torch.Tensor:
        nonlocal ran
        ran += torch.is_grad_enabled() and not isinstance(x, FakeTensor)
        return forward(self, x)

    def counted_replay(self: Any) -> None:
        nonlocal ran
        ran += 1
        replay(self)

    language.MLP.forward, Replay._run = counted, counted_replay  # type: ignore[method-assign]
    found = []
    for layout in layouts:
        results, runs = {}, {}
        for setting in (None, *settings):
            ran = 0
            given = {**layout, "recompute": setting}
            results[setting] = train_with_trainer(rank, world_size, case, given, run, None, options)
            runs[setting] = ran
        expected = results[None]
        for setting in settings:
            if results[setting].losses != expected.losses:
                found.append(f"{layout} {setting}: losses {results[setting].losses}, not {expected.losses}")
            state = results[setting].state
            found += [f"{layout} {setting}: {n}" for n, v in expected.state.items() if not torch.equal(state[n], v)]
            if case == "gpt_dropout" and runs[setting] <= runs[None]:
                found.append(f"{layout} {setting}: nothing ran again")
    return found


def check(case: str, world_size: int, layouts: Any, settings: Any, run: Run, **options: Any) -> None:
    found = launch_ranks(compare, world_size, case, layouts, settings, run, options)
    assert not [text for one in found for text in one]


def test_pipeline_schedules() -> None:
    """The backward of zero bubble is not split where blocks are recomputed."""
    check("gpt_dropout", 2, SCHEDULES, ["full", "selective"], Run(3, dtype=torch.float32))


def test_tensor_and_sequence_parallel() -> None:
    """The collectives of a block run again on all tensor ranks, with the dropout of the first time."""
    check("gpt_dropout", 2, TENSOR, ["full", "selective"], Run(3))


def test_torchgpipe16_pl19267_torchtune2684_olmo828_sharded() -> None:
    """Gradients are reduced once, and equal those without recomputation; with accumulation and clipping."""
    check("gpt_dropout", 2, DATA, ["full", "selective"], Run(2, accumulate=2, clip=0.1))


@pytest.mark.slow
def test_several_axes() -> None:
    check("gpt_dropout", 4, MIXED, ["full", "selective"], Run(2, accumulate=2))


@pytest.mark.parametrize(("precision", "settings"), [("bf16-mixed", ["full", 2, "auto"]), ("16-mixed", ["selective"])])
def test_autocast(precision: str, settings: list[Any]) -> None:
    check("gpt_dropout", 2, SCHEDULES[:1], settings, Run(3, dtype=torch.float32), precision=precision)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["hf_t5", "hf_llama"])
def test_transformers(case: str) -> None:
    """T5's blocks return tuples, and are given a cache that they write to."""
    check(case, 2, SCHEDULES[:1], ["full", "selective"], Run(3))


@pytest.mark.slow
def test_batch_normalization_and_a_checkpoint_of_the_users() -> None:
    for case in ("resnet", "gpt_checkpointed", "moe"):
        check(case, 2, SCHEDULES[:1], ["full"], Run(2))
