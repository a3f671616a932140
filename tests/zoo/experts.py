"""Mixtures of experts: those of transformers, litgpt's, and loops over a ModuleList in the styles people write.

All route without dropping unless the notes say so; capacity is counted per sequence, so it does not depend on the
layout. `per_sample=False`: the model's own balancing loss is no mean over samples, so under data ranks (and
micro-batches) the loss is the mean of what each has by itself: compare with as many `micro` parts.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.base import Case, Lit, tokens
from tests.zoo.huggingface import _case, _causal, _text
from tests.zoo.language import HEADS, LENGTH, MLP, VOCABULARY, WIDTH, CausalSelfAttention

HIDDEN, LAYERS = 24, 2

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "experts_implementation": "eager",  # the grouped one does not know float64
}


def mixtral(experts: int = 4) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**_SIZES, intermediate_size=HIDDEN, num_local_experts=experts))


def qwen3_moe() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **_SIZES,
        head_dim=8,
        intermediate_size=32,
        moe_intermediate_size=HIDDEN,
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
    )
    return Qwen3MoeForCausalLM(config)


def deepseek_v3() -> nn.Module:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    sizes = {**_SIZES, "num_hidden_layers": 3, "num_key_value_heads": HEADS}
    config = DeepseekV3Config(
        **sizes,
        intermediate_size=32,
        moe_intermediate_size=HIDDEN,
        n_shared_experts=1,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=4,
        num_mtp_layers=0,
    )
    return DeepseekV3ForCausalLM(config)


def switch() -> nn.Module:
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    config = SwitchTransformersConfig(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=4,
        d_ff=HIDDEN,
        num_layers=2,
        num_sparse_encoder_layers=1,
        num_decoder_layers=2,
        num_sparse_decoder_layers=1,
        num_heads=HEADS,
        num_experts=4,
        expert_capacity=4,
        router_jitter_noise=0.0,
        dropout_rate=0.0,
        initializer_factor=2.0,
        decoder_start_token_id=0,
    )
    model = SwitchTransformersForConditionalGeneration(config)
    for module in model.modules():
        if hasattr(module, "expert_capacity"):
            module.dtype = torch.float64  # it casts its weights to this, float32 by the settings, in its forward
    return model


def gpt_oss() -> nn.Module:
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        **_SIZES, head_dim=8, intermediate_size=HIDDEN, num_local_experts=4, num_experts_per_tok=2, sliding_window=8
    )
    return GptOssForCausalLM(config)


class FeedForward(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH), *([nn.Dropout(dropout)] if dropout else [])
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.w3 = nn.Linear(WIDTH, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class LLaMAMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc_1 = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.fc_2 = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.proj = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.silu(self.fc_1(x)) * self.fc_2(x))


class LLaMAMoE(nn.Module):
    """In litgpt's manner: an expert without tokens is called all the same, so it has a gradient of zeros."""

    def __init__(self, experts: int = 4, top_k: int = 2) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList(LLaMAMLP() for _ in range(experts))
        self.n_expert, self.n_expert_per_token = experts, top_k

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        x = x.view(-1, C)
        router = self.gate(x)
        probs, indices = torch.topk(router, self.n_expert_per_token)
        probs = probs.softmax(dim=1)
        masks = indices.unsqueeze(-1) == torch.arange(self.n_expert, device=x.device)
        masks = masks.permute(2, 0, 1)
        y = torch.zeros_like(x)
        for mask, expert in zip(masks, self.experts):  # noqa: B905
            token_idx, expert_idx = torch.where(mask)
            y[token_idx] += probs[token_idx, expert_idx, None] * expert(x[token_idx])
        return y.view(B, T, C)


class Routed(nn.Module):
    """What the blocks below have in common."""

    def __init__(
        self, experts: int = 4, top_k: int = 2, expert: Callable[[], nn.Module] = FeedForward, named: bool = False
    ) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(WIDTH, experts)
        made = [expert() for _ in range(experts)]
        self.experts: Any = nn.ModuleDict({f"expert_{i}": e for i, e in enumerate(made)}) if named else None
        if not named:
            self.experts = nn.ModuleList(made)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = self.router(x).softmax(dim=-1).topk(self.top_k, dim=-1)
        return weights / weights.sum(dim=-1, keepdim=True), chosen


class SkippingMoE(Routed):
    """Experts without tokens are not called, so they have no gradient at all."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.route(flat)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            token, choice = torch.where(chosen == index)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, expert(flat[token]) * weights[token, choice, None])
        return out.view_as(x)


class EveryTokenMoE(Routed):
    """Every expert computes every token; the router's zeros drop what was not asked for."""

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.route(x)
        gates = torch.zeros_like(self.router(x)).scatter(-1, chosen, weights)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=-2)
        return torch.einsum("bte,bted->btd", gates, outputs)


class SortedMoE(Routed):
    """DeepSeek-V2's: tokens sorted by expert, slices, concatenation; a shared expert beside them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.shared_experts = MLP()

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        flat = x.view(-1, x.shape[-1])
        weights, chosen = self.route(flat)
        counts = chosen.new_zeros((chosen.shape[0], len(self.experts))).scatter_(1, chosen, 1).sum(dim=0)
        order = chosen.view(-1).argsort()
        sorted_tokens = flat[order // chosen.shape[1]]
        outputs, start = [], 0
        for i, count in enumerate(counts.cpu().numpy()):
            end = start + count
            if count == 0:
                continue
            outputs.append(self.experts[i](sorted_tokens[start:end]))
            start = end
        together = torch.cat(outputs, dim=0) if outputs else sorted_tokens.new_empty(0)
        unsorted = torch.empty_like(together)
        unsorted[order] = together
        y = (unsorted.view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)
        return y.view_as(x) + self.shared_experts(identity)


class BalancedMoE(Routed):
    """Returns its logits, keeps its loss and counts for others to read, and is noisy in training."""

    def __init__(self, noise: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self.noise, self.calls = noise, 0
        self.aux_loss: Tensor | None = None
        self.register_buffer("load", torch.zeros(len(self.experts)), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.flatten(0, -2)
        logits = self.router(flat)
        if self.training and self.noise > 0:
            logits = logits + self.noise * torch.randn_like(logits)
        probabilities = logits.softmax(dim=-1)
        weights, chosen = probabilities.topk(self.top_k, dim=-1)
        hits = F.one_hot(chosen, len(self.experts)).sum(dim=1)
        self.aux_loss = len(self.experts) * (hits.to(x.dtype).mean(dim=0) * probabilities.mean(dim=0)).sum()
        self.calls += 1
        with torch.no_grad():
            self.load += hits.sum(dim=0)
        out = torch.zeros_like(flat)
        for i in range(len(self.experts)):
            token, choice = (chosen == i).nonzero(as_tuple=True)
            out = out.index_add(0, token, weights[token, choice].unsqueeze(-1) * self.experts[i](flat[token]))
        return out.view_as(x), logits


class NamedMoE(Routed):
    """Experts in a ModuleDict."""

    def __init__(self, **options: Any) -> None:
        super().__init__(named=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.route(flat)
        out = torch.zeros_like(flat)
        for i, (name, expert) in enumerate(self.experts.items()):
            assert name == f"expert_{i}"
            hit = chosen == i
            rows = hit.any(dim=-1)
            if rows.any():
                out[rows] = out[rows] + (weights * hit).sum(dim=-1, keepdim=True)[rows] * expert(flat[rows])
        return out.view_as(x)


class ExpertsBlock(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = CausalSelfAttention()
        self.moe = experts

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        out = self.moe(self.norm_2(x))
        return x + (out[0] if isinstance(out, tuple) else out)


class ExpertsLM(Lit):
    """A language model of such blocks."""

    def __init__(self, moe: Callable[[], nn.Module], layers: int = LAYERS) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(0.1 * torch.randn(1, LENGTH, WIDTH))
        self.blocks = nn.ModuleList(ExpertsBlock(moe()) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, idx: Tensor) -> Tensor:
        x = self.embed(idx) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x).flatten(0, 1), y.flatten())
        self.log("train_loss", loss)
        return loss


class BalancedLM(ExpertsLM):
    """Adds what its blocks have left in an attribute to the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x).flatten(0, 1), y.flatten())
        loss = loss + 0.01 * sum(block.moe.aux_loss for block in self.blocks)
        self.log("train_loss", loss)
        return loss


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "moe_litgpt": LLaMAMoE,
    "moe_skipping": SkippingMoE,
    "moe_skipping_uneven": partial(SkippingMoE, experts=3),
    "moe_every_token": EveryTokenMoE,
    "moe_sorted": SortedMoE,
    "moe_balanced": BalancedMoE,
    "moe_noisy": partial(BalancedMoE, noise=0.5),
    "moe_named": NamedMoE,
    "moe_dropout": partial(SkippingMoE, expert=partial(FeedForward, dropout=0.2)),
    "moe_swiglu": partial(SkippingMoE, expert=SwiGLU, experts=6),
}
"""Hand-written blocks of experts by the name of the case: modules that take `[batch, length, WIDTH]`."""


def _model(name: str, notes: str, model: Callable[..., Lit] = ExpertsLM, **options: Any) -> Case:
    return Case(name, lambda: model(BLOCKS[name]), tokens(VOCABULARY, LENGTH), LAYERS, notes, **options)


_router_in_float32 = {"loss_tolerance": 1e-6, "tolerance": 1e-6}

CASES = [
    _case("moe_mixtral", mixtral, _text(), "stacked experts", **_causal),
    _case("moe_mixtral_six", partial(mixtral, 6), _text(mask=True), "six experts, padding", **_causal),
    _case("moe_qwen3", qwen3_moe, _text(), "six experts, normed top 2", **_causal),
    _case("moe_deepseek_v3", deepseek_v3, _text(), "groups, shared expert, first layer dense", **_router_in_float32),
    _case("moe_switch", switch, _text(), "encoder and decoder; top 1 in a ModuleDict, capacity per sequence"),
    _case("moe_gpt_oss", gpt_oss, _text(), "stacked experts with biases", **_causal),
    _model("moe_litgpt", "masks, every expert called"),
    _model("moe_skipping", "index_add_, experts without tokens skipped"),
    _model("moe_skipping_uneven", "three experts"),
    _model("moe_every_token", "all experts on all tokens, stack and einsum"),
    _model("moe_sorted", "argsort, slices and cat; a shared expert"),
    _model("moe_balanced", "own balancing loss left in an attribute, buffer, tuple", BalancedLM, per_sample=False),
    _model("moe_noisy", "noisy routing in training", BalancedLM, per_sample=False, deterministic=False),
    _model("moe_named", "ModuleDict, boolean masks"),
    _model("moe_dropout", "dropout inside of the experts", deterministic=False),
    _model("moe_swiglu", "experts of modules; six of them"),
]
