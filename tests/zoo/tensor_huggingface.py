"""More models of transformers, for the ways in which they split their heads."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.base import Batches, Case, generator
from tests.zoo.huggingface import LENGTH, VOCABULARY, _case, _causal, _text, _unmasked

WIDTH, HIDDEN, HEADS, LAYERS = 32, 48, 4, 3

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def gpt_neox() -> nn.Module:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    return GPTNeoXForCausalLM(GPTNeoXConfig(**_SIZES, intermediate_size=HIDDEN))


def opt() -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(**_SIZES, ffn_dim=HIDDEN, word_embed_proj_dim=WIDTH, dropout=0.0, init_std=0.1)
    return OPTForCausalLM(config)


def qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**_SIZES, intermediate_size=HIDDEN, num_key_value_heads=2, head_dim=16))


def phi() -> nn.Module:
    from transformers import PhiConfig, PhiForCausalLM

    return PhiForCausalLM(PhiConfig(**_SIZES, intermediate_size=HIDDEN))


def falcon() -> nn.Module:
    from transformers import FalconConfig, FalconForCausalLM

    return FalconForCausalLM(FalconConfig(**_SIZES, ffn_hidden_size=HIDDEN, new_decoder_architecture=False, bias=True))


def gemma2() -> nn.Module:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        **_SIZES,
        intermediate_size=HIDDEN,
        num_key_value_heads=2,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=8,
        attn_implementation="eager",  # the only one with the soft cap
    )
    return Gemma2ForCausalLM(config)


def distilbert() -> nn.Module:
    from transformers import DistilBertConfig, DistilBertForMaskedLM

    config = DistilBertConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=16,
        dim=WIDTH,
        hidden_dim=HIDDEN,
        n_layers=LAYERS,
        n_heads=HEADS,
        dropout=0.0,
        attention_dropout=0.0,
        pad_token_id=0,
    )
    return DistilBertForMaskedLM(config)


def whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=8,
        d_model=WIDTH,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=HIDDEN,
        decoder_ffn_dim=HIDDEN,
        max_source_positions=8,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        init_std=0.1,
    )
    return WhisperForConditionalGeneration(config)


def _speech(n: int, batch_size: int, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """Features that hold the first token, and the tokens that follow from it."""
    rng, result = generator(), []
    table = torch.randn(VOCABULARY, 8, 1, generator=rng, dtype=torch.float64)
    for _ in range(n):
        start = torch.randint(3, VOCABULARY, (batch_size, 1), generator=rng)
        labels = (start + 5 * torch.arange(LENGTH)) % (VOCABULARY - 3) + 3
        noise = 0.1 * torch.randn(batch_size, 8, 16, generator=rng, dtype=torch.float64)
        result.append({"input_features": (table[labels[:, 0]] + noise).to(dtype), "labels": labels})
    return result


_encoded: Batches = _speech

CASES: list[Case] = [
    _case("hf_gpt_neox", gpt_neox, _text(), "parallel residual; q, k, v by head; partial rotary", **_causal),
    _case("hf_opt", opt, _text(mask=True), "learned positions with an offset; tied; attention mask", **_causal),
    _case("hf_qwen3", qwen3, _text(), "q_norm and k_norm by head; heads wider than the model", **_causal),
    _case("hf_phi", phi, _text(), "parallel residual, biases, partial rotary; head with a bias", **_causal),
    _case("hf_falcon", falcon, _text(), "multi-query, fused; parallel residual; tied", **_causal),
    _case(
        "hf_gemma2",
        gemma2,
        _text(),
        "soft caps, softmax in float32, sliding windows in every other block; tied",
        **{**_causal, "tolerance": 1e-5},
    ),
    _case("hf_distilbert", distilbert, _text(_unmasked, mask=True, shift=False), "masked", equal_shares=False),
    _case("hf_whisper", whisper, _encoded, "convolutions, encoder, decoder with cross-attention"),
]
