"""Decoder blocks as the well-known repositories write them: what a tensor-parallel planner has to understand."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from tests.zoo.base import Case, Lit, tokens
from tests.zoo.language import RMSNorm, apply_rope, build_rope_cache

VOCABULARY, LENGTH, WIDTH, HEADS = 32, 12, 32, 4


class Decoder(Lit):
    """Embedding, blocks that map `x` to `x`, norm, head."""

    def __init__(
        self,
        block: Callable[[], nn.Module],
        norm: Callable[[int], nn.Module] = nn.LayerNorm,
        layers: int = 3,
        vocabulary: int = VOCABULARY,
        width: int = WIDTH,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([block() for _ in range(layers)])
        self.norm = norm(width)
        self.output = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.embed.weight, std=0.5)
        if tied:
            self.output.weight = self.embed.weight

    def forward(self, idx: Tensor) -> Tensor:
        h = self.embed(idx)
        for layer in self.layers:
            h = layer(h)
        return self.output(self.norm(h))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1))
        self.log("train_loss", loss)
        return loss


class GatedMLP(nn.Module):
    """Llama's, in Hugging Face's names."""

    def __init__(self, width: int = WIDTH, hidden: int = 48) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MLP(nn.Module):
    def __init__(self, width: int = WIDTH, hidden: int | None = None) -> None:
        super().__init__()
        self.fc_in = nn.Linear(width, hidden or 4 * width)
        self.fc_out = nn.Linear(hidden or 4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc_out(F.gelu(self.fc_in(x), approximate="tanh"))


class PreNorm(nn.Module):
    """The usual block round an attention and an MLP."""

    def __init__(self, attention: nn.Module, mlp: nn.Module | None = None, width: int = WIDTH) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = attention
        self.mlp = mlp or MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Rotary(nn.Module):
    """Base of the attentions with rotary positions: buffers of their own."""

    def __init__(self, size: int) -> None:
        super().__init__()
        cos, sin = build_rope_cache(LENGTH, size)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)


class LitGPTAttention(Rotary):
    """litgpt 0.5: q, k and v one after the other, with query groups; rotary on a part of the head."""

    def __init__(self, groups: int = 2, head_size: int = 8, rope: int = 4) -> None:
        super().__init__(rope)
        self.n_head, self.n_query_groups, self.head_size, self.rope_n_elem = HEADS, groups, head_size, rope
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * groups) * head_size, bias=True)
        self.proj = nn.Linear(head_size * HEADS, WIDTH, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        head_size, n_head, n_query_groups = self.head_size, self.n_head, self.n_query_groups
        rope_n_elem = self.rope_n_elem
        B, T, _ = x.size()
        qkv = self.qkv(x)
        query_size, key_size = n_head * head_size, n_query_groups * head_size
        q, k, v = qkv.split((query_size, key_size, key_size), dim=-1)
        q = q.view(B, T, n_head, head_size).transpose(1, 2)
        k = k.view(B, T, n_query_groups, head_size).transpose(1, 2)
        v = v.view(B, T, n_query_groups, head_size).transpose(1, 2)
        q_roped = apply_rope(q[..., :rope_n_elem], self.cos[:T], self.sin[:T])
        k_roped = apply_rope(k[..., :rope_n_elem], self.cos[:T], self.sin[:T])
        q = torch.cat((q_roped, q[..., rope_n_elem:]), dim=-1)
        k = torch.cat((k_roped, k[..., rope_n_elem:]), dim=-1)
        if n_query_groups != n_head:
            q_per_kv = n_head // n_query_groups
            k = k.repeat_interleave(q_per_kv, dim=1)
            v = v.repeat_interleave(q_per_kv, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.0, is_causal=True)
        y = y.transpose(1, 2).reshape(B, T, head_size * n_head)
        return self.proj(y)


class OldLitGPTAttention(Rotary):
    """litgpt before 0.5: the queries of a group, then its key, then its value, group by group."""

    def __init__(self, groups: int = 2, head_size: int = 8) -> None:
        super().__init__(head_size)
        self.n_head, self.n_query_groups, self.head_size = HEADS, groups, head_size
        self.attn = nn.Linear(WIDTH, (HEADS + 2 * groups) * head_size, bias=False)
        self.proj = nn.Linear(head_size * HEADS, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.size()
        q_per_kv = self.n_head // self.n_query_groups
        total_qkv = q_per_kv + 2
        qkv = self.attn(x).view(B, T, self.n_query_groups, total_qkv, self.head_size)
        qkv = qkv.permute(0, 2, 3, 1, 4)
        q, k, v = qkv.split((q_per_kv, 1, 1), dim=2)
        if self.n_query_groups != self.n_head:
            k = k.expand(B, self.n_query_groups, q_per_kv, T, self.head_size)
            v = v.expand(B, self.n_query_groups, q_per_kv, T, self.head_size)
        q = q.reshape(B, -1, T, self.head_size)
        k = k.reshape(B, -1, T, self.head_size)
        v = v.reshape(B, -1, T, self.head_size)
        q, k = apply_rope(q, self.cos[:T], self.sin[:T]), apply_rope(k, self.cos[:T], self.sin[:T])
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(B, T, self.head_size * self.n_head))


def precompute_freqs_cis(dim: int, end: int, theta: float = 10000.0) -> Tensor:
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2)[: (dim // 2)].float() / dim))
    freqs = torch.outer(torch.arange(end).float(), freqs)
    return torch.polar(torch.ones_like(freqs), freqs)


def apply_rotary_emb(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    xq_ = torch.view_as_complex(xq.reshape(*xq.shape[:-1], -1, 2))
    xk_ = torch.view_as_complex(xk.reshape(*xk.shape[:-1], -1, 2))
    freqs_cis = freqs_cis.view(1, xq_.shape[1], 1, xq_.shape[-1])
    xq_out = torch.view_as_real(xq_ * freqs_cis).flatten(3)
    xk_out = torch.view_as_real(xk_ * freqs_cis).flatten(3)
    return xq_out.type_as(xq), xk_out.type_as(xk)


def repeat_kv(x: Tensor, n_rep: int) -> Tensor:
    bs, slen, n_kv_heads, head_dim = x.shape
    if n_rep == 1:
        return x
    x = torch.unsqueeze(x, dim=3).expand(bs, slen, n_kv_heads, n_rep, head_dim)
    return x.reshape(bs, slen, n_kv_heads * n_rep, head_dim)


class TitanAttention(nn.Module):
    def __init__(self, n_kv_heads: int = 2) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = HEADS, n_kv_heads, WIDTH // HEADS
        self.n_rep = self.n_heads // self.n_kv_heads
        self.wq = nn.Linear(WIDTH, self.n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(WIDTH, self.n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(WIDTH, self.n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(self.n_heads * self.head_dim, WIDTH, bias=False)

    def forward(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        bs, seqlen, _ = x.shape
        xq, xk, xv = self.wq(x), self.wk(x), self.wv(x)
        xq = xq.view(bs, seqlen, -1, self.head_dim)
        xk = xk.view(bs, seqlen, -1, self.head_dim)
        xv = xv.view(bs, seqlen, -1, self.head_dim)
        xq, xk = apply_rotary_emb(xq, xk, freqs_cis=freqs_cis)
        keys, values = repeat_kv(xk, self.n_rep), repeat_kv(xv, self.n_rep)
        xq, xk, xv = xq.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
        output = F.scaled_dot_product_attention(xq, xk, xv, is_causal=True)
        output = output.transpose(1, 2).contiguous()
        return self.wo(output.view(bs, seqlen, -1))


class TitanFeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (
            nn.Linear(WIDTH, 40, bias=False),
            nn.Linear(40, WIDTH, bias=False),
            nn.Linear(WIDTH, 40, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TitanBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = TitanAttention(), TitanFeedForward()
        self.attention_norm, self.ffn_norm = RMSNorm(WIDTH), RMSNorm(WIDTH)

    def forward(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), freqs_cis)
        return h + self.feed_forward(self.ffn_norm(h))


class TitanLlama(Decoder):
    """The rotary values are complex numbers, kept as a plain attribute as Meta's code does."""

    def __init__(self) -> None:
        super().__init__(TitanBlock, RMSNorm)
        self.freqs_cis = precompute_freqs_cis(WIDTH // HEADS, 2 * LENGTH)

    def forward(self, idx: Tensor) -> Tensor:
        h = self.embed(idx)
        freqs_cis = self.freqs_cis.to(h.device)[: idx.size(1)]
        for layer in self.layers:
            h = layer(h, freqs_cis)
        return self.output(self.norm(h))


class NeoXBlock(Rotary):
    """GPT-NeoX: parallel residual, two norms; q, k and v of a head side by side; partial rotary."""

    def __init__(self) -> None:
        super().__init__(4)
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.mlp = MLP()
        self.head_size = WIDTH // HEADS

    def attention(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        qkv = self.query_key_value(x).view(B, T, HEADS, 3 * self.head_size).transpose(1, 2)
        q, k, v = qkv.chunk(3, dim=-1)
        n = self.cos.size(-1)
        q = torch.cat([apply_rope(q[..., :n], self.cos[:T], self.sin[:T]), q[..., n:]], dim=-1)
        k = torch.cat([apply_rope(k[..., :n], self.cos[:T], self.sin[:T]), k[..., n:]], dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dense(y.transpose(1, 2).contiguous().view(B, T, -1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.input_layernorm(x)) + self.mlp(self.post_attention_layernorm(x))


def rotate_every_two(x: Tensor) -> Tensor:
    return torch.stack((-x[:, :, :, 1::2], x[:, :, :, ::2]), dim=-1).flatten(-2)


class GPTJBlock(nn.Module):
    """GPT-J: parallel residual with one norm, interleaved rotary, softmax by hand with a mask buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.mlp = MLP()
        self.head_dim = WIDTH // HEADS
        self.register_buffer("bias", torch.tril(torch.ones(LENGTH, LENGTH, dtype=torch.bool)), persistent=False)
        angles = torch.outer(torch.arange(LENGTH).float(), 10000 ** (-torch.arange(0, 8, 2).float() / 8))
        self.register_buffer("sin", angles.sin().repeat_interleave(2, 1)[None, :, None], persistent=False)
        self.register_buffer("cos", angles.cos().repeat_interleave(2, 1)[None, :, None], persistent=False)

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.view(x.size()[:-1] + (HEADS, self.head_dim))

    def forward(self, x: Tensor) -> Tensor:
        h = self.ln_1(x)
        T = x.size(1)
        q, k, v = (self._split_heads(proj(h)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q = q * self.cos[:, :T] + rotate_every_two(q) * self.sin[:, :T]
        k = k * self.cos[:, :T] + rotate_every_two(k) * self.sin[:, :T]
        q, k, v = (t.permute(0, 2, 1, 3) for t in (q, k, v))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.head_dim)
        scores = torch.where(self.bias[:T, :T], scores, torch.finfo(scores.dtype).min)
        out = torch.matmul(scores.softmax(dim=-1), v).permute(0, 2, 1, 3).contiguous()
        out = self.out_proj(out.view(out.size()[:-2] + (WIDTH,)))
        return out + self.mlp(h) + x


_tokens = tokens(VOCABULARY, LENGTH)

CASES = [
    Case(
        "litgpt_groups",
        lambda: Decoder(lambda: PreNorm(LitGPTAttention())),
        _tokens,
        3,
        "fused q|k|v with unequal sections and query groups",
    ),
    Case(
        "litgpt_interleaved",
        lambda: Decoder(lambda: PreNorm(OldLitGPTAttention())),
        _tokens,
        3,
        "fused qkv, group by group",
    ),
    Case("titan_llama", TitanLlama, _tokens, 3, "complex rotary, repeat_kv, w1/w3/w2"),
    Case("neox_parallel", lambda: Decoder(NeoXBlock), _tokens, 3, "parallel residual, qkv by head"),
    Case("gptj_parallel", lambda: Decoder(GPTJBlock), _tokens, 3, "parallel residual with one norm, softmax by hand"),
]
