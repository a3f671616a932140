"""Hand-written language models."""

import math
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.zoo.base import Case, Lit, mapped, tokens

VOCABULARY, LENGTH, WIDTH, HEADS = 32, 12, 16, 4


class CausalSelfAttention(nn.Module):
    def __init__(self, width: int = WIDTH, heads: int = HEADS, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.resid_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (t.view(B, T, self.heads, C // self.heads).transpose(1, 2) for t in (q, k, v))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)))


class MLP(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, heads: int = HEADS, dropout: float = 0.0) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = CausalSelfAttention(width, heads, dropout)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """nanoGPT's model, tied head, scaled initialisation and all."""

    def __init__(self, layers: int = 4, tied: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "wpe": nn.Embedding(LENGTH, WIDTH),
                "drop": nn.Dropout(dropout),
                "h": nn.ModuleList([Block(dropout=dropout) for _ in range(layers)]),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, mean=0.0, std=0.02 / math.sqrt(2 * layers))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, mean=0.0, std=0.1)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class LitGPT(Lit):
    """With nanoGPT's two parameter groups: matrices decay, vectors do not."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.model = GPT(**options)

    def forward(self, idx: Tensor) -> Tensor:
        return self.model(idx, idx)[0]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        _, loss = self.model(x, y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        _, loss = self.model(x, y)
        self.log("val_loss", loss)

    def configure_optimizers(self) -> Any:
        parameters = {name: p for name, p in self.named_parameters() if p.requires_grad}
        decay = [p for p in parameters.values() if p.dim() >= 2]
        rest = [p for p in parameters.values() if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95), eps=1e-4)


class CheckpointedGPT(LitGPT):
    """The user recomputes the blocks already."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        idx, targets = batch
        transformer = self.model.transformer
        x = transformer.wte(idx) + transformer.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in transformer.h:
            x = checkpoint(block, x, use_reentrant=False)
        logits = self.model.lm_head(transformer.ln_f(x))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.log("train_loss", loss)
        return loss


class TorchEncoder(Lit):
    """torch's own encoder, with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.pos = nn.Parameter(0.1 * torch.randn(1, LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1), device=x.device)
        h = self.encoder(self.embed(x) + self.pos, mask=mask, is_causal=True)
        loss = F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())
        self.log("train_loss", loss)
        return loss


class TorchTransformer(Lit):
    """torch's own encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.transformer = nn.Transformer(WIDTH, HEADS, 3, 3, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        mask = self.transformer.generate_square_subsequent_mask(y.size(1) - 1, device=x.device)
        h = self.transformer(self.embed(x), self.embed(y[:, :-1]), tgt_mask=mask, tgt_is_causal=True)
        loss = F.cross_entropy(self.head(h).flatten(0, 1), y[:, 1:].flatten())
        self.log("train_loss", loss)
        return loss


class SharedLayers(Lit):
    """ALBERT's idea: two blocks, called six times."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.embed(x)
        for i in range(6):
            h = self.blocks[i // 3](h)
        loss = F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())
        self.log("train_loss", loss)
        return loss


class AlternatingLayers(SharedLayers):
    """The same blocks called in turn, so that each is called on both sides of any cut."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.embed(x)
        for i in range(6):
            h = self.blocks[i % 2](h)
        loss = F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())
        self.log("train_loss", loss)
        return loss


class CrossBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2, self.norm_3 = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.self_attention = CausalSelfAttention()
        self.q = nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * WIDTH)
        self.o = nn.Linear(WIDTH, WIDTH)
        self.mlp = MLP()

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + self.self_attention(self.norm_1(x))
        k, v = self.kv(memory).chunk(2, dim=-1)
        x = x + self.o(F.scaled_dot_product_attention(self.q(self.norm_2(x)), k, v))
        return x + self.mlp(self.norm_3(x))


class EncoderDecoder(Lit):
    """Every decoder block reads the encoder's output; the embedding serves both and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.ModuleList([Block() for _ in range(3)])
        self.encoder_norm = nn.LayerNorm(WIDTH)
        self.decoder = nn.ModuleList([CrossBlock() for _ in range(3)])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        memory = self.embed(x)
        for block in self.encoder:
            memory = block(memory)
        memory = self.encoder_norm(memory)
        h = self.embed(y[:, :-1])
        for block in self.decoder:
            h = block(h, memory=memory)
        logits = F.linear(h, self.embed.weight)
        loss = F.cross_entropy(logits.flatten(0, 1), y[:, 1:].flatten())
        self.log("train_loss", loss)
        return loss


def build_rope_cache(length: int, size: int) -> tuple[Tensor, Tensor]:
    theta = 1.0 / (10000 ** (torch.arange(0, size, 2).float() / size))
    angles = torch.outer(torch.arange(length).float(), theta).repeat(1, 2)
    return torch.cos(angles), torch.sin(angles)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.size(-1) // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos.to(x.dtype) + rotated * sin.to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class LitGPTBlock(nn.Module):
    """In litgpt's manner: rope values come in from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = RMSNorm(WIDTH), RMSNorm(WIDTH)
        self.attn = nn.Linear(WIDTH, (HEADS + 2 * 2) * (WIDTH // HEADS), bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.fc_1, self.fc_2 = nn.Linear(WIDTH, 24, bias=False), nn.Linear(WIDTH, 24, bias=False)
        self.mlp_proj = nn.Linear(24, WIDTH, bias=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None, pos: Tensor | None = None
    ) -> Tensor:
        B, T, _ = x.shape
        size, groups = WIDTH // HEADS, 2
        qkv = self.attn(self.norm_1(x)).view(B, T, groups, HEADS // groups + 2, size).permute(0, 2, 3, 1, 4)
        q, k, v = qkv.split((HEADS // groups, 1, 1), dim=2)
        k, v = (t.expand(B, groups, HEADS // groups, T, size) for t in (k, v))
        q, k, v = (t.reshape(B, HEADS, T, size) for t in (q, k, v))
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = self.proj(y.transpose(1, 2).reshape(B, T, WIDTH)) + x
        h = self.norm_2(x)
        return self.mlp_proj(F.silu(self.fc_1(h)) * self.fc_2(h)) + x


class LitGPTModel(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "h": nn.ModuleList(LitGPTBlock() for _ in range(4)),
                "ln_f": RMSNorm(WIDTH),
            }
        )
        cos, sin = build_rope_cache(2 * LENGTH, WIDTH // HEADS)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, idx: Tensor, input_pos: Tensor | None = None) -> Tensor:
        T = idx.size(1)
        cos, sin = self.cos[:T], self.sin[:T]
        x = self.transformer.wte(idx)
        for block in self.transformer.h:
            x = block(x, cos, sin, None, input_pos)
        return self.lm_head(self.transformer.ln_f(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch["input_ids"])
        loss = F.cross_entropy(logits.reshape(-1, logits.size(-1)), batch["labels"].reshape(-1))
        self.log("train_loss", loss)
        return loss


class BiasedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mlp = MLP()

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        weights = (q @ k.transpose(1, 2) / WIDTH**0.5 + bias).softmax(dim=-1)
        x = x + weights @ v
        return x + self.mlp(x)


class SharedBias(Lit):
    """One learned positional bias, a bare parameter, goes into every block (and is changed on the way)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.bias = nn.Parameter(0.1 * torch.randn(LENGTH, LENGTH))
        self.blocks = nn.ModuleList([BiasedBlock() for _ in range(4)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.embed(x)
        for i, block in enumerate(self.blocks):
            h = block(h, torch.tanh(self.bias) / (i + 1))
        loss = F.cross_entropy(self.head(h).flatten(0, 1), y.flatten()) + 0.01 * self.bias.pow(2).sum()
        self.log("train_loss", loss)
        return loss


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class MoEBlock(nn.Module):
    """The expert loop found in many a repository: which rows go where depends on the data."""

    def __init__(self, experts: int = 4, k: int = 2) -> None:
        super().__init__()
        self.k = k
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = CausalSelfAttention()
        self.gate = nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList([Expert() for _ in range(experts)])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm_1(x))
        rows = self.norm_2(x).reshape(-1, WIDTH)
        weights, chosen = torch.topk(self.gate(rows).softmax(dim=-1), self.k)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        result = torch.zeros_like(rows)
        for i, expert in enumerate(self.experts):
            row, nth = torch.where(chosen == i)
            if row.numel() == 0:
                continue
            result[row] += weights[row, nth, None] * expert(rows[row])
        return x + result.view_as(x)


class HandWrittenMoE(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([MoEBlock() for _ in range(4)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h)
        loss = F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())
        self.log("train_loss", loss)
        return loss


class TokenExpertsBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = nn.ModuleList([Expert() for _ in range(6)])

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        rows, result = self.norm(x), torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            where = torch.where(tokens % 6 == i)
            if where[0].numel():
                result[where] += expert(rows[where])
        return x + result


class TokenExperts(Lit):
    """Which expert a token goes to depends on the token alone; the batches leave most experts without any."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([TokenExpertsBlock() for _ in range(3)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.embed(x)
        for block in self.blocks:
            h = block(h, x)
        loss = F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())
        self.log("train_loss", loss)
        return loss


class FrozenEmbedding(Lit):
    """Nothing before the first block learns."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding.from_pretrained(torch.randn(VOCABULARY, WIDTH), freeze=True)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.blocks[1].requires_grad_(False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        loss = F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr, eps=1e-4)


class TwoGroups(LitGPT):
    """The second group holds only what the last stage has, and has its own rate, on a schedule."""

    def configure_optimizers(self) -> Any:
        head = list(self.model.lm_head.parameters())
        ids = {id(p) for p in head}
        body = [p for p in self.model.parameters() if id(p) not in ids]
        groups = [{"params": body, "lr": self.lr}, {"params": head, "lr": 3 * self.lr, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, eps=1e-4)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class StackedLSTM(Lit):
    """Recurrent layers return nested tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(4)])
        self.head = nn.Linear(2 * WIDTH, VOCABULARY)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h, memories = self.embed(x), []
        for layer in self.layers:
            out, (_, memory) = layer(h)
            h = h + out
            memories.append(memory[-1])
        context = torch.stack(memories).mean(dim=0)
        features = torch.cat([h, context[:, None].expand_as(h)], dim=-1)
        loss = F.cross_entropy(self.head(features).flatten(0, 1), y.flatten())
        self.log("train_loss", loss)
        return loss


def _starving(n: int, batch_size: int, dtype: torch.dtype) -> list[Any]:
    """All tokens of a sample go to one expert, a batch of eight meets three of them; the sixth gets no token ever."""
    batches = []
    for index in range(n):
        expert = (index + torch.arange(batch_size).view(-1, 1) // 3) % 5
        x = (expert + 6 * torch.arange(LENGTH)) % 30
        batches.append((x, (3 * x + 1) % VOCABULARY))
    return batches


_as_dict = mapped(tokens(VOCABULARY, LENGTH), lambda batch: {"input_ids": batch[0], "labels": batch[1]})
_tokens = tokens(VOCABULARY, LENGTH)

CASES = [
    Case("gpt_tied", lambda: LitGPT(tied=True), _tokens, 4, "nanoGPT; the embedding is the head's weight"),
    Case("gpt_untied", lambda: LitGPT(tied=False), _tokens, 4, "nanoGPT"),
    Case("gpt_deep", lambda: LitGPT(layers=8), _tokens, 8, "nanoGPT for four and eight stages"),
    Case("gpt_dropout", lambda: LitGPT(dropout=0.1), _tokens, 4, "nanoGPT", deterministic=False),
    Case("gpt_checkpointed", CheckpointedGPT, _tokens, 4, "torch.utils.checkpoint round each block"),
    Case("gpt_two_groups", lambda: TwoGroups(tied=False), _tokens, 4, "a parameter group wholly in one stage; StepLR"),
    Case("torch_encoder", TorchEncoder, _tokens, 4, "nn.TransformerEncoder, mask, bare position parameter"),
    Case("torch_transformer", TorchTransformer, _tokens, 6, "nn.Transformer: two trunks"),
    Case("shared_layers", SharedLayers, _tokens, 6, "a block called several times in a row"),
    Case(
        "alternating_layers",
        AlternatingLayers,
        _tokens,
        6,
        "blocks called on both sides of any cut",
        refused="live on several pipeline stages",
    ),
    Case("encoder_decoder", EncoderDecoder, _tokens, 6, "cross attention; embedding weight used by glue as the head"),
    Case("litgpt", LitGPTModel, _as_dict, 4, "rope buffers sliced in glue; dict batches"),
    Case("shared_bias", SharedBias, _tokens, 4, "a glue parameter used on every stage and in the loss"),
    Case("token_experts", TokenExperts, _starving, 3, "many experts get no token in a micro-batch, some in a batch"),
    Case("moe", HandWrittenMoE, _tokens, 4, "data-dependent expert loop"),
    Case("frozen_embedding", FrozenEmbedding, _tokens, 4, "frozen first unit and a frozen block"),
    Case("lstm", StackedLSTM, _tokens, 4, "nested tuples; an output of every block reaches the tail"),
]
