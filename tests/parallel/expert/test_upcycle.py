"""Dense modules that become experts, and those that cannot."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

from lnn_lightning.parallel.errors import LayoutError
from lnn_lightning.parallel.expert.layer import MoELayer, moe_layers
from lnn_lightning.parallel.expert.settings import Upcycle
from lnn_lightning.parallel.expert.upcycle import dense_names, token_size, upcycle
from tests.parallel.expert.upcycled import WIDTH, FeedForward, batches, build


def gpt2() -> GPT2LMHeadModel:
    sizes = {"n_layer": 4, "n_embd": 16, "n_head": 2, "vocab_size": 32, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=1))


@pytest.mark.parametrize(("gate", "top_k"), [("top_k", 2), ("gshard", 2), ("bias", 3), ("noisy_top_k", 2)])
def test_first_output_is_the_dense_one(gate: Any, top_k: int) -> None:
    dense = build()
    model = copy.deepcopy(dense)
    names = upcycle(model, Upcycle("*.mlp", experts=4, top_k=top_k, gate=gate, router_std=1.0), seed=3)
    assert names == ["blocks.0.mlp", "blocks.1.mlp", "blocks.2.mlp"]
    model.eval()
    words = batches(1)[0]
    torch.testing.assert_close(model(words), dense(words), rtol=0, atol=1e-12)
    with torch.no_grad():
        model.blocks[0].mlp.experts[1].down.bias += 1.0
    assert (model(words) - dense(words)).abs().max() > 1e-3


def test_transformers_block_every_second_and_a_second_fit() -> None:
    dense = gpt2().double().eval()
    dense.transformer.h[3].mlp.requires_grad_(False)
    model = copy.deepcopy(dense)
    settings = Upcycle("*.mlp", experts=3, every=2, z_loss=0.001)
    assert upcycle(model, settings) == ["transformer.h.1.mlp", "transformer.h.3.mlp"]
    words = torch.arange(20).view(2, 10)
    torch.testing.assert_close(model(words).logits, dense(words).logits, rtol=0, atol=1e-12)
    first, frozen = moe_layers(model).values()
    assert not model.training and not any(module.training for module in first.modules())
    assert first.router.weight.dtype == torch.float64 and first.z_loss == 0.001
    assert all(parameter.requires_grad for parameter in first.parameters())
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    experts = [id(parameter) for expert in first.experts for parameter in expert.parameters()]
    assert len(experts) == len(set(experts))
    before = {name: id(module) for name, module in model.named_modules()}
    assert upcycle(model, settings) == ["transformer.h.1.mlp", "transformer.h.3.mlp"]
    assert before == {name: id(module) for name, module in model.named_modules()}
    with pytest.raises(LayoutError, match=r"'transformer.h.1.mlp' .*upcycled already, with other settings .*experts=3"):
        upcycle(model, Upcycle("*.mlp", experts=4))


def test_routers_follow_from_the_seed_and_the_name_alone() -> None:
    def routers(seed: int, around: int) -> list[Tensor]:
        model = build()
        torch.manual_seed(around)
        upcycle(model, Upcycle("*.mlp", experts=4), seed)
        assert torch.equal(torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(around)))
        return [layer.router.weight for layer in moe_layers(model).values()]

    one, two, other = routers(1, 5), routers(1, 6), routers(2, 5)
    assert all(map(torch.equal, one, two))
    assert not any(map(torch.equal, one, other)) and not torch.equal(one[0], one[1])


def test_meta_device() -> None:
    with torch.device("meta"):
        model = gpt2()
    names = upcycle(model, Upcycle("*.mlp", experts=2))
    assert len(names) == 4 and all(parameter.is_meta for parameter in model.parameters())
    assert model.transformer.h[0].mlp.router.weight.shape == (2, 16)


def test_size_of_tokens_is_found_whatever_stands_first() -> None:
    class Backwards(nn.Module):
        """The second layer is registered first, and it wants a batch and a length."""

        def __init__(self) -> None:
            super().__init__()
            self.out, self.gate, self.up = nn.Linear(24, 6), nn.Linear(6, 24), nn.Linear(6, 24)

        def forward(self, x: Tensor) -> Tensor:
            batch, length, width = x.shape
            return self.out(self.up(x.view(-1, width)) * self.gate(x.view(-1, width)).sigmoid()).view(x.shape)

    assert token_size(Backwards()) == 6
    assert token_size(FeedForward()) == WIDTH
    assert token_size(nn.Linear(3, 4)) is None and token_size(nn.LSTM(4, 4)) is None
    model = nn.Sequential(nn.Linear(5, 6), Backwards()).double()
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    wanted = model(x)
    upcycle(model, Upcycle("1", experts=2))
    torch.testing.assert_close(model(x), wanted)


class Mixing(FeedForward):
    """A token gets the mean of all others too."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x) + x.mean(-2, keepdim=True) * scale


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = FeedForward()
        self.first = nn.ModuleDict({"mlp": shared, "act": nn.GELU()})
        self.second = nn.ModuleDict({"mlp": shared})
        self.tied, self.tie = FeedForward(), FeedForward()
        self.tie.up.weight = self.tied.up.weight
        self.nest = nn.Sequential(FeedForward(), FeedForward())
        self.attention = nn.MultiheadAttention(4, 2)
        self.mixing = Mixing()
        self.batches = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"blocks": "*.ffn"},
            r"'\*.ffn'` matches no module of Odd. .* such as 'first.mlp', 'tied', 'tie', 'nest', 'nest.0'",
        ),
        ({"blocks": "*.mlp"}, r"'first.mlp' \(FeedForward\), which stands in several places"),
        ({"blocks": "tied"}, r"'tied' \(FeedForward\), which shares a parameter with 'tie.up.weight'"),
        ({"blocks": "nest*"}, r"'nest' \(Sequential\), which contains another match, 'nest.0'"),
        ({"blocks": "*.act"}, r"'first.act' \(GELU\), which has no parameters"),
        ({"blocks": "first"}, r"'first' \(ModuleDict\), which is a container"),
        ({"blocks": "attention"}, r"'attention' \(MultiheadAttention\), which is no feed-forward module"),
        ({"blocks": "mixing"}, r"'mixing' \(Mixing\), which makes something else of a token when it has others"),
        ({"blocks": "batches"}, r"'batches' \(Sequential\), which makes something else of a token"),
        ({"blocks": "nest.?", "every": 3}, r"every=3` takes none of the 2 modules .* \(nest.0, nest.1\)"),
    ],
)
def test_refused(settings: dict[str, Any], message: str) -> None:
    model = Odd()
    with pytest.raises(LayoutError, match=message):
        upcycle(model, Upcycle(**settings, experts=2))
    assert not moe_layers(model)


@pytest.mark.parametrize("blocks", ["*.mlp", "*.experts", "*layers.1"])
def test_blocks_of_experts_are_refused(blocks: str) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = MixtralForCausalLM(MixtralConfig(**sizes, num_hidden_layers=2, num_local_experts=4, vocab_size=20))
    with pytest.raises(LayoutError, match=r"is or belongs to a block of 4 experts already"):
        upcycle(model, Upcycle(blocks, experts=2))


def test_names_in_a_file_of_the_dense_model() -> None:
    model = build()
    dense = list(model.state_dict())
    layers = upcycle(model, Upcycle("*.mlp", experts=2, every=2))
    names = dense_names(layers, model.state_dict(), [f"model.{name}" for name in dense])
    assert names["blocks.1.mlp.experts.1.up.weight"] == "blocks.1.mlp.up.weight"
    assert names["blocks.1.mlp.router.weight"] == ""
    assert set(names) == {name for name in model.state_dict() if name.startswith("blocks.1.mlp.")}
    assert dense_names(layers, model.state_dict(), [f"model.{name}" for name in model.state_dict()]) == {}
    assert isinstance(model.blocks[1].mlp, MoELayer)
