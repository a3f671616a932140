"""A small GPT on bytes: an ordinary LightningModule that knows one device and nothing of others."""

import math

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256  # one token per byte


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, n_head: int, n_embd: int, dropout: float) -> None:
        super().__init__()
        if n_embd % n_head:
            raise ValueError(f"n_embd={n_embd} is not divisible by n_head={n_head}.")
        self.n_head = n_head
        self.dropout = dropout
        self.qkv = nn.Linear(n_embd, 3 * n_embd)
        self.proj = nn.Linear(n_embd, n_embd)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.n_head, width // self.n_head).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """One layer: attention, then a two-layer perceptron, each normed before and added to what came in."""

    def __init__(self, n_head: int, n_embd: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(n_embd)
        self.attention = Attention(n_head, n_embd, dropout)
        self.mlp_norm = nn.LayerNorm(n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class ByteGPT(LightningModule):
    """A GPT that predicts the next byte of a text.

    Args:
        n_layer: Number of blocks.
        n_head: Attention heads per block.
        n_embd: Width.
        block_size: Longest context, in bytes.
        dropout: Dropout probability.
        lr: Learning rate after the warm-up.
        warmup_steps: Optimizer steps over which the learning rate rises from nothing to `lr`.
        min_lr_ratio: The share of `lr` that is left when the training ends.
        weight_decay: Decay of matrices; biases and norms are not decayed.
    """

    def __init__(
        self,
        n_layer: int = 6,
        n_head: int = 6,
        n_embd: int = 384,
        block_size: int = 256,
        dropout: float = 0.0,
        lr: float = 1e-3,
        warmup_steps: int = 100,
        min_lr_ratio: float = 0.1,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.block_size = block_size
        self.lr = lr
        self.warmup_steps = warmup_steps
        self.min_lr_ratio = min_lr_ratio
        self.weight_decay = weight_decay

        self.byte_embedding = nn.Embedding(VOCABULARY, n_embd)
        self.position_embedding = nn.Embedding(block_size, n_embd)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(n_head, n_embd, dropout) for _ in range(n_layer))
        self.norm = nn.LayerNorm(n_embd)
        self.head = nn.Linear(n_embd, VOCABULARY, bias=False)
        self.head.weight = self.byte_embedding.weight
        self._initialize()

    def _initialize(self) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                # What is added to the residual stream is scaled down, so that its size doesn't grow with the depth.
                to_residual = name.endswith(("attention.proj.weight", "mlp.2.weight"))
                std = 0.02 / math.sqrt(2 * len(self.blocks)) if to_residual else 0.02
                nn.init.normal_(parameter, std=std)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the byte that follows each position of `tokens` (batch, length)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.byte_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, batch: tuple[Tensor, Tensor], reduction: str = "mean") -> Tensor:
        """Cross entropy of the bytes of a batch, in nats."""
        tokens, targets = batch
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten(), reduction=reduction)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """How surprising each text of the batch is, in bits per byte."""
        return self.loss(batch, reduction="none").view_as(batch[1]).mean(dim=1) / math.log(2)

    def _evaluate(self, batch: tuple[Tensor, Tensor], name: str) -> None:
        loss = self.loss(batch)
        self.log(f"{name}_loss", loss, on_epoch=True, sync_dist=True)
        self.log(f"{name}_bpb", loss / math.log(2), on_epoch=True, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        vectors = [p for p in self.parameters() if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": self.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95))
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: warmup_cosine(step, self.warmup_steps, steps, self.min_lr_ratio)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def warmup_cosine(step: int, warmup: int, steps: float, floor: float) -> float:
    """Factor of the learning rate: a line up for `warmup` steps, then half a cosine down to `floor` at `steps`."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
