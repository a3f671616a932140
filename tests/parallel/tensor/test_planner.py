"""Plans, found in one process: which layer does what, for the blocks of well-known models."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.pipeline.plans import PlanBook
from lnn_lightning.parallel.step.observer import StepObserver
from lnn_lightning.parallel.step.trace import Trace
from lnn_lightning.parallel.step.units import find_units
from lnn_lightning.parallel.tensor.plan import TensorPlan, plan_module
from tests.helpers.reference import Run, build, global_batches
from tests.zoo import ZOO


def traced(module: nn.Module, step: Any, batch: Any) -> Trace:
    book = PlanBook(module, find_units(module, 1, None), 1, StepObserver())
    with torch.set_grad_enabled(True):
        return book.trace(step, batch)


def plan_of(name: str, size: int = 2, sequence: bool = False, given: dict[str, str] | None = None) -> TensorPlan:
    module: Any = build(ZOO[name]).train()
    module.log = module.log_dict = lambda *args, **kwargs: None
    batch = global_batches(ZOO[name], Run(n_steps=1, dtype=torch.float32))[0]
    trace = traced(module, lambda part: module.training_step(part, 0), batch)
    return plan_module(module, trace, size, sequence, {}, given)


def roles_of(plan: TensorPlan, unit: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Parameter -> (kind, sections), without what is replicated."""
    roles = plan.units[unit].roles
    return {name.removesuffix(".weight"): (r.kind, r.sections) for name, r in roles.items() if r.kind != "replicate"}


def column(*sections: int) -> tuple[str, tuple[int, ...]]:
    return "column", sections


def row(features: int) -> tuple[str, tuple[int, ...]]:
    return "row", (features,)


_FUSED = {"mlp.fc_in": column(128), "mlp.fc_out": row(128)}
_LLAMA = {f"self_attn.{name}_proj": column(size) for name, size in (("q", 16), ("k", 8), ("v", 8))}
_LLAMA |= {
    "self_attn.o_proj": row(16),
    "mlp.gate_proj": column(32),
    "mlp.up_proj": column(32),
    "mlp.down_proj": row(32),
}
_T5 = {f"layer.0.SelfAttention.{name}": column(16) for name in "qkv"} | {"layer.0.SelfAttention.o": row(16)}

BLOCKS: dict[str, tuple[str, dict[str, tuple[str, tuple[int, ...]]]]] = {
    "gpt_untied": (
        "model.transformer.h.0",
        {"attn.c_attn": column(16, 16, 16), "attn.c_proj": row(16), "mlp.c_fc": column(64), "mlp.c_proj": row(64)},
    ),
    "hf_gpt2": (
        "model.transformer.h.0",
        {"attn.c_attn": column(16, 16, 16), "attn.c_proj": row(16), "mlp.c_fc": column(64), "mlp.c_proj": row(64)},
    ),
    "hf_bert": (
        "model.bert.encoder.layer.0",
        {f"attention.self.{name}": column(16) for name in ("query", "key", "value")}
        | {"attention.output.dense": row(16), "intermediate.dense": column(32), "output.dense": row(32)},
    ),
    "timm_vit": (
        "blocks.0",
        {"attn.qkv": column(16, 16, 16), "attn.proj": row(16), "mlp.0": column(32), "mlp.2": row(32)},
    ),
    "timm_block": (
        "blocks.0",
        {"attn.qkv": column(32, 32, 32), "attn.proj": row(32), "mlp.w12": column(40, 40), "mlp.w3": row(40)},
    ),
    "hf_llama": ("model.model.layers.0", _LLAMA),
    "hf_llama_tied": ("model.model.layers.0", _LLAMA),
    "titan_llama": (
        "layers.0",
        {f"attention.{name}": column(size) for name, size in (("wq", 32), ("wk", 16), ("wv", 16))}
        | {"attention.wo": row(32), "feed_forward.w1": column(40), "feed_forward.w3": column(40)}
        | {"feed_forward.w2": row(40)},
    ),
    "litgpt_groups": ("layers.0", {"attn.qkv": column(32, 16, 16), "attn.proj": row(32), **_FUSED}),
    "litgpt_interleaved": ("layers.0", {"attn.attn": column(64), "attn.proj": row(32), **_FUSED}),
    "neox_parallel": ("layers.0", {"query_key_value": column(96), "dense": row(32), **_FUSED}),
    "hf_gpt_neox": (
        "model.gpt_neox.layers.0",
        {"attention.query_key_value": column(96), "attention.dense": row(32)}
        | {"mlp.dense_h_to_4h": column(48), "mlp.dense_4h_to_h": row(48)},
    ),
    "hf_t5": (
        "model.decoder.block.0",
        _T5
        | {key.replace("0.Self", "1.EncDec"): role for key, role in _T5.items()}
        | {"layer.2.DenseReluDense.wi": column(32), "layer.2.DenseReluDense.wo": row(32)},
    ),
    "torch_encoder": (
        "encoder.layers.0",
        {"self_attn.in_proj_weight": column(16, 16, 16), "self_attn.out_proj": row(16)}
        | {"linear1": column(32), "linear2": row(32)},
    ),
    "torch_seq2seq": (
        "transformer.decoder.layers.0",
        {f"{name}.in_proj_weight": column(32, 32, 32) for name in ("self_attn", "multihead_attn")}
        | {f"{name}.out_proj": row(32) for name in ("self_attn", "multihead_attn")}
        | {"linear1": column(64), "linear2": row(64)},
    ),
    "mlp_mixer": (
        "blocks.0",
        {"mlp_tokens.fc_in": column(24), "mlp_tokens.fc_out": row(24)}
        | {"mlp_channels.fc_in": column(64), "mlp_channels.fc_out": row(64)},
    ),
    "fused_swiglu": (
        "layers.0",
        {"attn.qkv": column(32, 32, 32), "attn.proj": row(32), "mlp.w12": column(40, 40), "mlp.w3": row(40)},
    ),
    "olmo": (
        "layers.0",
        {f"self_attn.{name}_proj": column(size) for name, size in (("q", 32), ("k", 16), ("v", 16))}
        | {"self_attn.o_proj": row(32), "mlp.gate_proj": column(48), "mlp.up_proj": column(48)}
        | {"mlp.down_proj": row(48)},
    ),
    "conformer": ("layers.0", {"attention.mlp.fc_in": column(128), "attention.mlp.fc_out": row(128)}),
    "bare_parameters": (
        "layers.0",
        {"w_qkv": column(32, 32, 32), "w_o": row(32), "w_up": column(64), "w_down": row(64)},
    ),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_plan_of_a_block(name: str) -> None:
    unit, roles = BLOCKS[name]
    found = roles_of(plan_of(name), unit)
    # of a conformer, convolutions cut the attention's values: its MLP alone is certain
    assert {key: found.get(key) for key in roles} == roles
    assert name == "conformer" or found.keys() == roles.keys()


@pytest.mark.parametrize(("size", "hidden"), [(2, 16), (4, 16)])
def test_bytes_of_a_block(size: int, hidden: int) -> None:
    """4bsh(t-1)/t elements each way: two all-reduces in a ring (PTD-P, section 3.2); by tokens, the same."""
    for sequence in (False, True):
        plan = plan_of("gpt_untied", size, sequence).units["model.transformer.h.0"]
        expected = 4 * 4 * 8 * 12 * hidden * (size - 1) // size
        assert plan.bytes == (expected, expected)
        assert plan.sequence == (1 if sequence else None)


PARTIAL = {
    "olmo": {"self_attn.k_norm.weight", "self_attn.q_norm.weight"},
    "timm_block": {f"attn.{part}_norm.{kind}" for part in "qk" for kind in ("weight", "bias")},
    "gpt_untied": set(),
}


@pytest.mark.parametrize("name", PARTIAL)
def test_parameters_used_on_parts(name: str) -> None:
    """Whole parameters on divided values have partial gradients; along tokens, norms and biases of row layers, too."""
    unit = BLOCKS[name][0]
    assert plan_of(name).units[unit].partial == PARTIAL[name]
    module = build(ZOO[name]).get_submodule(unit)
    along = plan_of(name, sequence=True).units[unit]
    norms = {key for key, _ in module.named_parameters() if "norm" in key or "ln_" in key}
    rows = {key for key in dict(module.named_parameters()) if _bias_of_row(key, along.roles)}
    assert along.sequence == 1
    assert along.partial >= norms | rows


def _bias_of_row(name: str, roles: Any) -> bool:
    role = roles.get(name.removesuffix("bias") + "weight")
    return name.endswith(".bias") and role is not None and role.kind == "row"


def test_heads_that_do_not_divide() -> None:
    """Three heads on two ranks: attention is computed whole, its weights and the MLP are divided all the same."""
    roles = roles_of(plan_of("three_heads"), "layers.0")
    assert roles["mlp.fc_in"] == column(144) and roles["mlp.fc_out"] == row(144)
    assert roles_of(plan_of("three_heads", 3), "layers.0")["attn.proj"] == row(36)


def test_fewer_key_heads_than_ranks() -> None:
    """Queries are divided; one head of keys and values is not."""
    roles = roles_of(plan_of("hf_llama", 4), "model.model.layers.0")
    assert roles["self_attn.q_proj"] == column(16) and roles["self_attn.o_proj"] == row(16)


def test_experts_are_left_whole() -> None:
    plan = plan_of("moe")
    assert {name for name in plan.undivided if name.startswith("layers.")} == {f"layers.{i}" for i in range(4)}
    assert all("nonzero" in plan.undivided[f"layers.{i}"] for i in range(4))


def test_vocabulary() -> None:
    """Padded where it does not divide; the head leaves its logits divided for the cross entropy."""
    plan = plan_of("odd_vocabulary")
    assert roles_of(plan, "output") == {"weight": column(33)}
    assert plan.units["output"].open_outputs == {0}
    tied = plan_of("odd_vocabulary_tied")
    assert tied.specs["embed.weight"] == tied.specs.get("output.weight", tied.specs["embed.weight"])
    assert tied.specs["embed.weight"].padded(2)


def test_given_roles() -> None:
    plan = plan_of(
        "hf_llama", given={"*.mlp.gate_proj": "replicate", "*.mlp.up_proj": "replicate", "*.q_proj": "colwise"}
    )
    roles = roles_of(plan, "model.model.layers.0")
    assert "mlp.gate_proj" not in roles and "mlp.up_proj" not in roles and roles["self_attn.q_proj"] == column(16)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"*.qproj": "colwise"}, ["'*.qproj'", "fits no layer", "named_modules"]),
        ({"*.q_proj": "column"}, ["'column'", "'colwise'", "'rowwise'", "'replicate'"]),
        ({"*.norm": "colwise"}, ["'*.norm'", "has no weight matrix to divide"]),
        ({"*.q_proj": "rowwise", "*.embed_tokens": "rowwise"}, ["not possible", "embed_tokens"]),
    ],
)
def test_refused_plans(given: dict[str, str], words: list[str]) -> None:
    with pytest.raises(StepError) as caught:
        plan_of("hf_llama", given=given)
    for word in words:
        assert word in str(caught.value)


def test_uneven_role_is_refused() -> None:
    """Three ranks cannot have equal parts of 16 inputs."""
    with pytest.raises(StepError, match="multiple"):
        plan_of("gpt_untied", 3, given={"*.attn.c_proj": "rowwise"})


def summary(plan: TensorPlan) -> Any:
    units = {
        name: (
            {key: (str(role), role.sections) for key, role in each.roles.items()},
            *(sorted(each.partial), sorted(each.transposed), each.sequence, each.argument, each.output, each.bytes),
        )
        for name, each in plan.units.items()
    }
    return units, plan.specs, plan.shapes, plan.partial, plan.undivided


@pytest.mark.parametrize("name", ["gpt_tied", "hf_t5", "olmo", "torch_seq2seq"])
def test_plans_are_always_the_same(name: str) -> None:
    """Ranks plan for themselves."""
    for sequence in (False, True):
        assert summary(plan_of(name, sequence=sequence)) == summary(plan_of(name, sequence=sequence))


def contents(module: nn.Module) -> dict[str, Any]:
    """Everything that a module's parts hold, by identity, and a copy of the values."""
    found: dict[str, Any] = {}
    for prefix, part in module.named_modules():
        found[f"{prefix}:class"] = type(part)
        for key, value in vars(part).items():
            if key in ("_parameters", "_buffers", "_modules"):
                for name, tensor in value.items():
                    found[f"{prefix}.{name}"] = id(tensor)
                    if isinstance(tensor, Tensor):
                        found[f"{prefix}.{name}:value"] = tensor.detach().clone()
            elif isinstance(value, (dict, list, set)):
                found[f"{prefix}:{key}"] = (id(value), len(value))
            else:
                found[f"{prefix}:{key}"] = id(value)
    return found


@pytest.mark.parametrize(
    "name", ["gpt_tied", "hf_gpt2", "hf_t5", "titan_llama", "torch_seq2seq", "function_cache", "bare_parameters"]
)
@pytest.mark.parametrize("sequence", [False, True])
def test_nothing_is_left_behind(name: str, sequence: bool) -> None:
    """Parameters, buffers, attributes and classes are the same objects with the same values; the random state, too."""
    module: Any = build(ZOO[name]).train()
    module.log = module.log_dict = lambda *args, **kwargs: None
    batch = global_batches(ZOO[name], Run(n_steps=1, dtype=torch.float32))[0]
    trace = traced(module, lambda part: module.training_step(part, 0), batch)
    before, random = contents(module), torch.get_rng_state()
    plan_module(module, trace, 2, sequence, {})
    after = contents(module)
    assert before.keys() == after.keys()
    for key, value in before.items():
        same = torch.equal(value, after[key]) if isinstance(value, Tensor) else value == after[key]
        assert same, key
    assert torch.equal(random, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in module.parameters())
