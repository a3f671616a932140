"""Equal numbers with layers divided over tensor ranks: losses and parameters as on one process."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.helpers.reference import DEFAULT_RUN, Run, differences
from tests.test_equality import reference, train
from tests.zoo import EXPERTS, ZOO

COMPARABLE = [name for name, case in ZOO.items() if case.deterministic and not case.refused and name not in EXPERTS]
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
    tolerance = case.tolerance if run.dtype == torch.float64 else 1e-5
    if single_loss:
        tolerance = max(1e-5, 3 * tolerance)
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


_ONE_LAYER_BLOCKS = """tuple_blocks dict_blocks keyword_blocks detached_skip deep_supervision temperature buffer
parametrized nested_batch sum_loss sum_over_size_loss contrastive unused_glue_parameter checkpoint_per_block
checkpoint_around_several blocks_that_append hooked_activations function_cache weight_average detector
gradient_penalty""".split()
_CONVOLUTIONS = "resnet unet reentrant_checkpoint".split()
LEAST_SHARE: dict[str, float] = {
    **dict.fromkeys(_CONVOLUTIONS, 0.0),
    **dict.fromkeys(_ONE_LAYER_BLOCKS, 0.1),
    **dict.fromkeys(("sequential", "no_trunk", "in_place", "auto_encoder", "lstm"), 0.1),
    **{
        "temperature": 0.0,
        "diffusion_unet": 0.0,
        "hf_mixtral": 0.15,
        "moe": 0.02,
        "token_experts": 0.02,
        "ways_by_length": 0.02,
    },
    **{"module_dict_trunk": 0.04, "nested_lists": 0.06, "wrapped": 0.09, "learnt_loss_weight": 0.2},
    **{"masked_logits": 0.2, "conformer": 0.5, "einsum_attention": 0.6, "t5_bias": 0.6, "shared_bias": 0.6},
    **{"gradient_hooks": 0.015, "hf_falcon": 0.79},
}
"""Share of the parameters that two tensor ranks must divide at least, where 0.8 is too much to ask for: experts,
recurrent and convolutional layers stay whole, and a block of one layer has no second one that could take its divided
output."""

QUICK = "gpt_tied hf_llama hf_bert litgpt_groups titan_llama neox_parallel three_heads odd_vocabulary_tied".split()
QUICK += "torch_transformer mlp_mixer bare_parameters ignored_targets".split()
QUICK_SEQUENCE = "gpt_tied hf_llama titan_llama litgpt_interleaved torch_encoder timm_block mlp_mixer olmo".split()
REPRESENTATIVE = "gpt_tied hf_llama hf_t5 litgpt_groups titan_llama mlp_mixer three_heads torch_transformer".split()
FOUR = {
    "tp4": {"tensor_parallel_size": 4},
    "tp2 dp2": {"tensor_parallel_size": 2, "data_parallel_size": 2},
    "pp2 tp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "pp2 tp2 sequence": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, **SEQUENCE},
    "tp2 dp2 sequence": {"tensor_parallel_size": 2, "data_parallel_size": 2, **SEQUENCE},
    "interleaved": {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "schedule": "interleaved",
        "stages_per_rank": 2,
    },
    "zero_bubble": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "schedule": "zero_bubble"},
}


def expect_divided(name: str, share: float) -> None:
    """Equality proves nothing where nothing is divided."""
    assert share >= LEAST_SHARE.get(name, 0.8), f"{name}: only {share:.0%} of the parameters are divided"


def quick_first(names: list[str], quick: list[str]) -> list[Any]:
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", quick_first(COMPARABLE, QUICK))
def test_two_ranks(name: str) -> None:
    expect_divided(name, check(name, {"tensor_parallel_size": 2}))


@pytest.mark.parametrize("name", quick_first(COMPARABLE, QUICK_SEQUENCE))
def test_sequence_parallel(name: str) -> None:
    expect_divided(name, check(name, {"tensor_parallel_size": 2, **SEQUENCE}))


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", ["gpt_tied", "titan_llama", "litgpt_groups"])
def test_float32(name: str, sequence: bool) -> None:
    check(name, {"tensor_parallel_size": 2, "sequence_parallel": sequence}, Run(dtype=torch.float32))


@pytest.mark.parametrize("name", ["gpt_tied", "gpt_two_groups", "frozen_embedding", "hf_llama_recomputed"])
def test_accumulation_and_clipping(name: str) -> None:
    """The norm counts parts and wholes right."""
    check(name, {"tensor_parallel_size": 2}, Run(accumulate=2, clip=0.1))


def four_processes() -> Iterator[tuple[str, str]]:
    """Two models under every layout; the others on four tensor ranks and under two layouts more, in turn."""
    for index, name in enumerate(REPRESENTATIVE):
        for number, layout in enumerate(FOUR):
            rest = (number - 1 - index) % (len(FOUR) - 1)
            if name in ("gpt_tied", "litgpt_groups") or layout == "tp4" or rest in (0, 2):
                yield name, layout


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), four_processes())
def test_four_processes(name: str, layout: str) -> None:
    run = Run(accumulate=2, clip=0.1) if "data_parallel_size" in FOUR[layout] else DEFAULT_RUN
    share = check(name, {"schedule": "1f1b", **FOUR[layout]}, run)
    assert share >= (0.4 if layout == "tp4" else 0.8), f"only {share:.0%} of the parameters are divided"


def test_pipeline_and_tensor() -> None:
    expect_divided("gpt_tied", check("gpt_tied", {**FOUR["pp2 tp2 sequence"], "schedule": "1f1b"}))


@pytest.mark.slow
def test_all_three_axes() -> None:
    layout = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel_size": 2, "schedule": "1f1b"}
    expect_divided("gpt_tied", check("gpt_tied", layout, Run(n_steps=3, clip=0.1)))


def zero() -> Iterator[tuple[str, int, bool]]:
    """Every pair of model and stage, of model and sequence, of stage and sequence."""
    for index, name in enumerate(("gpt_tied", "titan_llama", "torch_transformer")):
        for stage in (1, 2, 3):
            yield name, stage, (index + stage) % 2 == 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stage", "sequence"), zero())
def test_zero(name: str, stage: int, sequence: bool) -> None:
    """Parts of layers whose state, gradients and parameters data ranks share out."""
    layout = {**FOUR["tp2 dp2"], "zero_stage": stage, "sequence_parallel": sequence}
    expect_divided(name, check(name, layout, Run(accumulate=2, clip=0.1)))


@pytest.mark.slow
def test_everything_together() -> None:
    layout = {**FOUR["pp2 tp2 sequence"], "data_parallel_size": 2, "zero_stage": 3, "schedule": "1f1b"}
    expect_divided("gpt_tied", check("gpt_tied", layout, Run(n_steps=3, accumulate=2, clip=0.1)))
