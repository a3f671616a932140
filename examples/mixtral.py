"""A small Mixtral on bytes: transformers' model, as it is, in an ordinary LightningModule."""

import math

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torch.nn import functional as F

from examples.gpt import VOCABULARY, warmup_cosine

try:
    from transformers import MixtralConfig, MixtralForCausalLM
except ImportError as error:
    raise ImportError(
        "examples/mixtral.py trains transformers' Mixtral, which this package does not install by itself: "
        "`pip install transformers` (release 5 or newer)."
    ) from error


class ByteMixtral(LightningModule):
    """A Mixtral that predicts the next byte of a text.

    Args:
        n_layer: Number of blocks.
        n_head: Attention heads per block; half as many for keys and values.
        n_embd: Width.
        n_expert: Experts per block.
        top_k: Experts that a byte goes to.
        n_hidden: Hidden width of an expert.
        block_size: Longest context, in bytes.
        balance: Weight of Mixtral's loss for the balance of its experts.
        lr: Learning rate after the warm-up.
        warmup_steps: Optimizer steps over which the learning rate rises from nothing to `lr`.
        min_lr_ratio: The share of `lr` that is left when the training ends.
        weight_decay: Decay of matrices; norms are not decayed.
    """

    def __init__(
        self,
        n_layer: int = 4,
        n_head: int = 4,
        n_embd: int = 128,
        n_expert: int = 8,
        top_k: int = 2,
        n_hidden: int = 256,
        block_size: int = 128,
        balance: float = 0.02,
        lr: float = 2e-3,
        warmup_steps: int = 50,
        min_lr_ratio: float = 0.1,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.balance = balance
        self.lr = lr
        self.warmup_steps = warmup_steps
        self.min_lr_ratio = min_lr_ratio
        self.weight_decay = weight_decay
        self.model = MixtralForCausalLM(
            MixtralConfig(
                vocab_size=VOCABULARY,
                hidden_size=n_embd,
                intermediate_size=n_hidden,
                num_hidden_layers=n_layer,
                num_attention_heads=n_head,
                num_key_value_heads=max(n_head // 2, 1),
                num_local_experts=n_expert,
                num_experts_per_tok=top_k,
                max_position_embeddings=block_size,
                output_router_logits=balance > 0,
                use_cache=False,
            )
        )

    def losses(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Cross entropy of the bytes of a batch, in nats, and the loss for balance."""
        tokens, targets = batch
        output = self.model(input_ids=tokens)
        return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten()), output.aux_loss

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss, balance = self.losses(batch)
        self.log("train_loss", loss, on_step=True, prog_bar=True)
        return loss if balance is None else loss + self.balance * balance

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        loss, _ = self.losses(batch)
        self.log("val_loss", loss, on_epoch=True, sync_dist=True)
        self.log("val_bpb", loss / math.log(2), on_epoch=True, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        groups = [
            {"params": [p for p in self.parameters() if p.dim() >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in self.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95))
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: warmup_cosine(step, self.warmup_steps, steps, self.min_lr_ratio)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
