"""Small mixtures of experts of transformers' families."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
_GROUPED = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}
_LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
FAMILIES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    # model, config, name of the number of experts, the rest
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", "num_local_experts", {}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", "num_experts", {"shared_expert_intermediate_size": 16}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", "num_experts", {}),
    "qwen3_next": ("Qwen3NextForCausalLM", "Qwen3NextConfig", "num_experts", _LINEAR),
    "deepseek_v2": ("DeepseekV2ForCausalLM", "DeepseekV2Config", "n_routed_experts", {**_LATENT, **_GROUPED}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", "n_routed_experts", {**_LATENT, **_GROUPED}),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        "num_local_experts",
        {"rope_parameters": {"rope_type": "default"}},
    ),
    "olmoe": ("OlmoeForCausalLM", "OlmoeConfig", "num_experts", {}),
    "phimoe": ("PhimoeForCausalLM", "PhimoeConfig", "num_local_experts", {}),
    "granitemoe": ("GraniteMoeForCausalLM", "GraniteMoeConfig", "num_local_experts", {}),
    "glm4_moe": ("Glm4MoeForCausalLM", "Glm4MoeConfig", "n_routed_experts", _GROUPED),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", "Ernie4_5_MoeConfig", "moe_num_experts", {"moe_layer_start_index": 0}),
    "dots1": ("Dots1ForCausalLM", "Dots1Config", "n_routed_experts", {**_GROUPED, "n_shared_experts": 1}),
    "flex_olmo": ("FlexOlmoForCausalLM", "FlexOlmoConfig", "num_experts", {}),
    "hunyuan": ("HunYuanMoEV1ForCausalLM", "HunYuanMoEV1Config", "num_experts", {"moe_topk": 2}),
    "minimax": ("MiniMaxForCausalLM", "MiniMaxConfig", "num_local_experts", {}),
}
_COMMON = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}


def family(name: str, experts: int = 4, implementation: str = "eager", **changes: Any) -> nn.Module:
    """A model with two layers of experts."""
    import transformers

    model, config, number, rest = FAMILIES[name]
    values = {**_COMMON, **rest, number: experts, "experts_implementation": implementation, **changes}
    torch.manual_seed(0)
    made: Callable[..., nn.Module] = getattr(transformers, model)
    built = made(getattr(transformers, config)(**values))
    for parameter in built.parameters():  # some start as zeros
        nn.init.normal_(parameter, std=0.2)
    return built


def switch(experts: int = 4) -> nn.Module:
    """Switch transformer: a dictionary of experts with a ``forward`` of its own."""
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    torch.manual_seed(0)
    model = SwitchTransformersForConditionalGeneration(
        SwitchTransformersConfig(
            vocab_size=64,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_heads=2,
            num_experts=experts,
            num_sparse_encoder_layers=1,
            num_sparse_decoder_layers=1,
            expert_capacity=64,
            dropout_rate=0.0,
            router_jitter_noise=0.0,
        )
    )
    for module in model.modules():
        if hasattr(module, "expert_capacity"):
            module.dtype = torch.float64  # it casts its weights to this
    return model


class LLaMAMoE(nn.Module):
    """As litgpt writes it."""

    def __init__(self, width: int = 16, experts: int = 4, choices: int = 2) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(_LLaMAMLP(width, 2 * width) for _ in range(experts))
        self.choices = choices

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.size()
        x = x.view(-1, width)
        probs, indices = torch.topk(self.gate(x), self.choices)
        probs = probs.softmax(dim=1, dtype=torch.float).to(dtype=x.dtype)
        masks = indices.unsqueeze(-1) == torch.arange(len(self.experts), device=x.device)
        y = torch.zeros_like(x)
        for mask, expert in zip(masks.permute(2, 0, 1), self.experts, strict=True):
            token_idx, expert_idx = torch.where(mask)
            y[token_idx] += probs[token_idx, expert_idx, None] * expert(x[token_idx])
        return y.view(batch, length, width)


class _LLaMAMLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc_1 = nn.Linear(width, inner, bias=False)
        self.fc_2 = nn.Linear(width, inner, bias=False)
        self.proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(nn.functional.silu(self.fc_1(x)) * self.fc_2(x))
