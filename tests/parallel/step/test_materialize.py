"""Modules built without memory, made real part by part."""

import random
from typing import Any

import pytest
import torch
from torch import nn

from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.step.materialize import defer_meta_tensors, materialize
from lnn_lightning.parallel.step.standin import is_stand_in, named_tensors
from tests.zoo.language import GPT


class Plain(nn.Module):
    """torch's own layers, which initialise themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm, self.batch = nn.LayerNorm(4), nn.BatchNorm1d(4)
        self.recurrent = nn.LSTM(4, 4)


def on_meta(kind: Any, **options: Any) -> nn.Module:
    with torch.device("meta"):
        return kind(**options)


def real_values(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named_tensors(module) if not is_stand_in(tensor)}


def made(kind: Any, prefixes: tuple[str, ...], seed: int = 3, **options: Any) -> nn.Module:
    module = on_meta(kind, **options)
    assert defer_meta_tensors(module)
    materialize(module, lambda name: name.startswith(prefixes), seed)
    return module


def test_deferred_tensors_cost_nothing_and_can_be_traced() -> None:
    module = on_meta(Plain)
    assert defer_meta_tensors(module)
    for _, tensor in named_tensors(module):
        assert tensor.device.type == "cpu"
        assert is_stand_in(tensor)
        assert tensor.untyped_storage().nbytes() == tensor.element_size()
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_a_real_module_is_left_alone() -> None:
    module = Plain()
    before = {name: id(tensor) for name, tensor in named_tensors(module)}
    assert not defer_meta_tensors(module)
    assert {name: id(tensor) for name, tensor in named_tensors(module)} == before


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        (Plain, [("embed", "first"), ("second",), ("norm", "batch", "recurrent")]),
        (GPT, [("transformer.wte", "transformer.h.0"), ("transformer.wpe", "transformer.h.1", "transformer.ln_f")]),
    ],
)
def test_values_do_not_depend_on_what_lives_here(kind: Any, parts: list[tuple[str, ...]]) -> None:
    whole = real_values(made(kind, ("",)))
    assert set(whole) == {name for name, _ in named_tensors(kind())}
    assert not any(value.isnan().any() for value in whole.values())
    seen: set[str] = set()
    for prefixes in parts:
        torch.manual_seed(random.randrange(1000))
        part = real_values(made(kind, prefixes))
        assert set(part) == {name for name in whole if name.startswith(prefixes)}
        for name, value in part.items():
            assert torch.equal(value, whole[name]), name
        seen |= set(part)
    assert seen


def test_values_follow_from_seed_and_name() -> None:
    one, again, other = (real_values(made(Plain, ("",), seed)) for seed in (3, 3, 4))
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["embed.weight"], other["embed.weight"])
    assert not torch.equal(one["first.weight"], one["second.weight"]), "modules of a kind differ"


def test_initialised_as_the_modules_do() -> None:
    module = made(Plain, ("",))
    assert torch.equal(module.norm.weight, torch.ones(4))
    assert torch.equal(module.batch.running_var, torch.ones(4))
    assert module.batch.num_batches_tracked == 0
    assert all(type(buffer) is torch.Tensor for buffer in module.buffers()), "no parameter among the buffers"
    assert 0 < module.first.weight.abs().max() <= 0.5, "uniform within 1 / sqrt(4)"
    assert 0 < module.recurrent.bias_hh_l0.abs().max() <= 0.5
    assert all(parameter.is_leaf and parameter.requires_grad for parameter in module.parameters())


def test_torchs_attention() -> None:
    """Initialises itself by `_reset_parameters`."""
    module = made(lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2), ("",))
    assert torch.equal(module.layers[0].self_attn.in_proj_bias, torch.zeros(12))
    assert 0 < module.layers[0].self_attn.in_proj_weight.abs().max() <= (6 / 16) ** 0.5, "Xavier"


def test_init_weights_of_a_module_around_has_the_last_word() -> None:
    module = made(GPT, ("",), layers=6)
    weights = torch.cat([block.mlp.c_fc.weight.flatten() for block in module.transformer.h])
    assert float(weights.detach().std()) == pytest.approx(0.1, rel=0.05), (
        "GPT._init_weights, not Linear.reset_parameters"
    )
    assert torch.equal(module.transformer.ln_f.weight, torch.ones(16))
    assert module.transformer.wte.weight is module.lm_head.weight, "tied parameters stay tied"


def test_random_states_stay() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    made(Plain, ("",))
    assert torch.equal(torch.get_rng_state(), state)


class Bare(nn.Module):
    """Has a parameter and says nowhere how it starts."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(3))


class BareBuffer(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.register_buffer("positions", torch.arange(4).to(dtype), persistent=False)


@pytest.mark.parametrize(("kind", "name"), [(Bare, "scale"), (BareBuffer, "positions")])
def test_what_nothing_initialises_is_refused_by_name(kind: Any, name: str) -> None:
    with pytest.raises(StepError) as caught:
        made(kind, ("",))
    text = str(caught.value)
    assert repr(name) in text
    assert "reset_parameters" in text
    assert "_init_weights" in text
    made(kind, ("fc",))  # on another stage it is no concern


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_a_buffer_of_another_dtype_that_nothing_initialises_is_refused(dtype: torch.dtype) -> None:
    """Positions that are all zero, a mask that lets nothing through: silently wrong."""
    with pytest.raises(StepError, match="positions"):
        made(BareBuffer, ("",), dtype=dtype)


class HalfBuilt(nn.Module):
    """Only the heavy part is on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        with torch.device("meta"):
            self.fc = nn.Linear(4, 4)


def test_real_parts_keep_their_values() -> None:
    module = HalfBuilt()
    before = module.embed.weight.detach().clone()
    assert defer_meta_tensors(module)
    materialize(module, lambda name: True, 3)
    assert torch.equal(module.embed.weight, before)
    assert not module.fc.weight.isnan().any()


def test_frozen_and_other_dtypes_stay() -> None:
    module = on_meta(Plain)
    module.bfloat16()
    module.first.requires_grad_(False)
    defer_meta_tensors(module)
    materialize(module, lambda name: True, 3)
    assert module.second.weight.dtype == torch.bfloat16
    assert not module.first.weight.requires_grad
    assert module.second.weight.requires_grad
