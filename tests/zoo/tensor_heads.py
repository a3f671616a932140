"""Attentions with unusual heads, and blocks that hold their weights in other ways than nn.Linear."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from tests.zoo.base import Case, tokens
from tests.zoo.language import RMSNorm
from tests.zoo.tensor import HEADS, LENGTH, VOCABULARY, WIDTH, Decoder, GatedMLP, LitGPTAttention, PreNorm

SIZE = WIDTH // HEADS


class QKNormAttention(nn.Module):
    """OLMo 2: norms over the whole width of queries and keys, before the heads are split."""

    def __init__(self, kv_heads: int = 2) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.kv_heads, self.size = kv_heads, size
        self.q_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj = nn.Linear(WIDTH, kv_heads * size, bias=False)
        self.v_proj = nn.Linear(WIDTH, kv_heads * size, bias=False)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.q_norm, self.k_norm = RMSNorm(WIDTH), RMSNorm(kv_heads * size)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], -1, self.size)
        q = self.q_norm(self.q_proj(x)).view(shape).transpose(1, 2)
        k = self.k_norm(self.k_proj(x)).view(shape).transpose(1, 2)
        v = self.v_proj(x).view(shape).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(*x.shape[:-1], -1).contiguous())


class OLMoBlock(nn.Module):
    """Norms behind attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = QKNormAttention(), GatedMLP()
        self.post_attention_layernorm, self.post_feedforward_layernorm = RMSNorm(WIDTH), RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(x))
        return x + self.post_feedforward_layernorm(self.mlp(x))


class FusedSwiGLU(nn.Module):
    """xFormers and DINOv2: gate and value in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.w12 = nn.Linear(WIDTH, 2 * 40)
        self.w3 = nn.Linear(40, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x1, x2 = self.w12(x).chunk(2, dim=-1)
        return self.w3(F.silu(x1) * x2)


class ThreeHeads(nn.Module):
    """Two ranks do not divide the heads."""

    def __init__(self, width: int = 36, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(x).split(C, dim=2)
        q, k, v = (t.view(B, T, self.heads, C // self.heads).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).contiguous().view(B, T, C))


class MultiQuery(nn.Module):
    """GPT-BigCode and Falcon: one head of keys and values, fused with the queries."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = WIDTH // HEADS
        self.c_attn = nn.Linear(WIDTH, WIDTH + 2 * self.head_dim)
        self.c_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, kv = self.c_attn(x).split((C, 2 * self.head_dim), dim=2)
        k, v = kv.unsqueeze(1).chunk(2, dim=-1)
        q = q.view(B, T, HEADS, self.head_dim).permute(0, 2, 1, 3)
        y = F.scaled_dot_product_attention(q, k.expand(-1, HEADS, -1, -1), v.expand(-1, HEADS, -1, -1), is_causal=True)
        return self.c_proj(y.permute(0, 2, 1, 3).reshape(B, T, C))


class AlibiAttention(nn.Module):
    """A slope for every head, in a buffer; MPT's and BLOOM's positions."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        slopes = torch.tensor([2.0 ** (-8.0 * (i + 1) / HEADS) for i in range(HEADS)])
        self.register_buffer("slopes", slopes)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (t.reshape(B, T, HEADS, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        position = torch.arange(T, device=x.device)
        distance = (position[None, :] - position[:, None]).to(x.dtype)
        bias = self.slopes.view(1, HEADS, 1, 1) * distance
        bias = bias.masked_fill(distance > 0, float("-inf"))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.out(y.transpose(1, 2).flatten(2))


class EinsumAttention(nn.Module):
    """Weights of three dimensions, as in JAX code."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Parameter(torch.randn(WIDTH, HEADS, SIZE) / WIDTH**0.5) for _ in range(3))
        self.wo = nn.Parameter(torch.randn(HEADS, SIZE, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("btd,dhk->bthk", x, w) for w in (self.wq, self.wk, self.wv))
        scores = torch.einsum("bqhk,bshk->bhqs", q, k) * SIZE**-0.5
        scores = scores + torch.full_like(scores[0, 0], float("-inf")).triu(1)
        out = torch.einsum("bhqs,bshk->bqhk", scores.softmax(dim=-1), v)
        return torch.einsum("bqhk,hkd->bqd", out, self.wo)


class BareParameters(nn.Module):
    """No sub-module at all but norms: `F.linear` and `@` on parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.w_qkv = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) / WIDTH**0.5)
        self.b_qkv = nn.Parameter(torch.zeros(3 * WIDTH))
        self.w_o = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.w_up = nn.Parameter(torch.randn(WIDTH, 64) / WIDTH**0.5)
        self.b_up = nn.Parameter(torch.zeros(64))
        self.w_down = nn.Parameter(torch.randn(64, WIDTH) / 8.0)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = F.linear(self.norm_1(x), self.w_qkv, self.b_qkv).chunk(3, dim=-1)
        q, k, v = (t.view(B, T, HEADS, SIZE).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + y.transpose(1, 2).reshape(B, T, C) @ self.w_o
        return x + F.gelu(self.norm_2(x) @ self.w_up + self.b_up) @ self.w_down


class T5Attention(nn.Module):
    def __init__(self, has_bias: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.relative_attention_bias = nn.Embedding(8, HEADS) if has_bias else None

    def compute_bias(self, length: int, device: torch.device) -> Tensor:
        position = torch.arange(length, device=device)
        buckets = (position[:, None] - position[None, :]).clamp(0, 7)
        return self.relative_attention_bias(buckets).permute(2, 0, 1).unsqueeze(0)

    def forward(self, x: Tensor, mask: Tensor, position_bias: Tensor | None) -> tuple[Tensor, Tensor]:
        B, T, _ = x.shape
        q, k, v = (f(x).view(B, -1, HEADS, SIZE).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = torch.matmul(q, k.transpose(3, 2))
        if position_bias is None:
            position_bias = self.compute_bias(T, x.device) + mask
        scores += position_bias
        y = torch.matmul(F.softmax(scores, dim=-1), v)
        return self.o(y.transpose(1, 2).contiguous().view(B, -1, WIDTH)), position_bias


class T5Block(nn.Module):
    def __init__(self, has_bias: bool) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = T5Attention(has_bias)
        self.wi, self.wo = nn.Linear(WIDTH, 64, bias=False), nn.Linear(64, WIDTH, bias=False)

    def forward(self, x: Tensor, mask: Tensor, position_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y, position_bias = self.attention(self.norm_1(x), mask, position_bias)
        x = x + y
        return x + self.wo(F.relu(self.wi(self.norm_2(x)))), position_bias


class T5Decoder(Decoder):
    """The first block makes the bias of every head that all others add."""

    def __init__(self) -> None:
        super().__init__(nn.Identity, layers=0)
        self.layers = nn.ModuleList([T5Block(has_bias=i == 0) for i in range(3)])

    def forward(self, idx: Tensor) -> Tensor:
        h, position_bias = self.embed(idx), None
        mask = torch.full((idx.size(1), idx.size(1)), float("-inf"), dtype=h.dtype, device=h.device).triu(1)
        for layer in self.layers:
            h, position_bias = layer(h, mask, position_bias)
        return self.output(self.norm(h))


_tokens = tokens(VOCABULARY, LENGTH)

CASES = [
    Case("olmo", lambda: Decoder(OLMoBlock, RMSNorm), _tokens, 3, "qk-norm over the whole width; norms behind"),
    Case(
        "fused_swiglu",
        lambda: Decoder(lambda: PreNorm(LitGPTAttention(groups=4), FusedSwiGLU())),
        _tokens,
        3,
        "fused gate and value",
    ),
    Case(
        "three_heads",
        lambda: Decoder(lambda: PreNorm(ThreeHeads(), width=36), width=36),
        _tokens,
        3,
        "heads that two ranks do not divide",
    ),
    Case("multi_query", lambda: Decoder(lambda: PreNorm(MultiQuery())), _tokens, 3, "one head of keys and values"),
    Case("alibi", lambda: Decoder(lambda: PreNorm(AlibiAttention())), _tokens, 3, "a buffer with a value per head"),
    Case(
        "odd_vocabulary",
        lambda: Decoder(lambda: PreNorm(LitGPTAttention()), vocabulary=33),
        tokens(33, LENGTH),
        3,
        "a vocabulary that does not divide",
    ),
    Case(
        "odd_vocabulary_tied",
        lambda: Decoder(lambda: PreNorm(LitGPTAttention()), vocabulary=33, tied=True),
        tokens(33, LENGTH),
        3,
        "and the head is the embedding",
    ),
    Case(
        "einsum_attention", lambda: Decoder(lambda: PreNorm(EinsumAttention())), _tokens, 3, "three-dimensional weights"
    ),
    Case("bare_parameters", lambda: Decoder(BareParameters), _tokens, 3, "F.linear and @ on parameters"),
    Case("t5_bias", T5Decoder, _tokens, 3, "a bias by head from the first block; in-place addition"),
]
