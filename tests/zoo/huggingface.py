"""Models of transformers, tiny, random, without dropout."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from tests.zoo.base import Batches, Case, Lit, generator, images, mapped

VOCABULARY, LENGTH = 32, 12


class HuggingFace(Lit):
    """As in every tutorial."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Any:
        return self.model(**inputs)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        outputs = self(**batch)
        loss = outputs.loss
        self.log("train_loss", loss, prog_bar=True)
        return loss


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_ff=32,
        d_kv=4,
        num_layers=3,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def llama(tied: bool = False) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def llama_recomputed() -> nn.Module:
    model = llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=16,
        n_embd=16,
        n_layer=4,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config)


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(num_hidden_layers=4, **_small_bert()))


def albert(groups: int = 2) -> nn.Module:
    from transformers import AlbertConfig, AlbertForMaskedLM

    config = AlbertConfig(num_hidden_layers=4, num_hidden_groups=groups, embedding_size=8, **_small_bert())
    return AlbertForMaskedLM(config)


def _small_bert() -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "max_position_embeddings": 16,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=16,
        patch_size=4,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_labels=5,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return ViTForImageClassification(config)


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        experts_implementation="eager",  # the grouped one does not know float64
    )
    return MixtralForCausalLM(config)


def _text(
    ignore: Callable[[Tensor, torch.Generator], Tensor] | None = None, mask: bool = False, shift: bool = True
) -> Batches:
    """`input_ids` and `labels`, some of which are -100; with `mask`, padded sequences of unequal length."""

    def make(n: int, batch_size: int, dtype: torch.dtype) -> list[dict[str, Tensor]]:
        rng, result = generator(), []
        for _ in range(n):
            start = torch.randint(3, VOCABULARY, (batch_size, 1), generator=rng)
            ids = (start + 5 * torch.arange(LENGTH)) % (VOCABULARY - 3) + 3
            labels = ids.clone() if shift else (ids + 1) % VOCABULARY
            batch = {"input_ids": ids, "labels": labels}
            if ignore is not None:
                labels[ignore(labels, rng)] = -100
            if mask:
                lengths = torch.randint(LENGTH // 2, LENGTH + 1, (batch_size, 1), generator=rng)
                batch["attention_mask"] = (torch.arange(LENGTH) < lengths).long()
            result.append(batch)
        return result

    return make


def _prompts(labels: Tensor, rng: torch.Generator) -> Tensor:
    """Prompts of unequal length do not count: 1 to LENGTH - 3 tokens a sample."""
    lengths = torch.randint(1, LENGTH - 2, (labels.size(0), 1), generator=rng)
    return torch.arange(LENGTH) < lengths


def _unmasked(labels: Tensor, rng: torch.Generator) -> Tensor:
    """About two in three tokens are not predicted."""
    return torch.rand(labels.shape, generator=rng, dtype=torch.float64) < 0.65


def _case(name: str, build: Callable[[], nn.Module], batches: Batches, notes: str, **options: Any) -> Case:
    def module() -> pl.LightningModule:
        model = build()
        model.train()
        return HuggingFace(model)

    return Case(name, module, batches, 4, notes, **options)


_pictures = mapped(images(16, 5), lambda batch: {"pixel_values": batch[0], "labels": batch[1]})

# transformers computes the loss of causal models in float32, whatever the model's dtype.
_causal = {"loss_tolerance": 1e-6}
_causal_ignored = {"loss_tolerance": 1e-6, "tolerance": 1e-6, "equal_shares": False}

CASES = [
    _case("hf_t5", t5, _text(), "two trunks, tied three times, relative bias made in the first blocks"),
    _case("hf_llama", llama, _text(), "grouped query attention, rotary embedding as keyword arguments", **_causal),
    _case("hf_llama_tied", lambda: llama(tied=True), _text(mask=True), "tied embeddings, attention mask", **_causal),
    _case("hf_llama_ignored", llama, _text(_prompts), "labels of -100, unevenly over micro-batches", **_causal_ignored),
    _case("hf_llama_recomputed", llama_recomputed, _text(), "gradient_checkpointing_enable()", **_causal),
    _case("hf_gpt2", gpt2, _text(), "Conv1D, tied head", **_causal),
    _case("hf_bert", bert, _text(_unmasked, mask=True, shift=False), "masked language model", equal_shares=False),
    _case("hf_albert", albert, _text(_unmasked, shift=False), "two blocks, called twice each", equal_shares=False),
    _case(
        "hf_albert_one_block",
        lambda: albert(groups=1),
        _text(_unmasked, shift=False),
        "one block, called four times",
        equal_shares=False,
    ),
    _case("hf_vit", vit, _pictures, "class token and positions"),
    _case("hf_mixtral", mixtral, _text(), "mixture of experts, data-dependent", **_causal),
]
