"""`nn.MultiheadAttention.forward` in ordinary operations, so that a planner can cut it by heads.

torch's own goes through one large function that leaves every function mode and computes with fused views of the head
and batch dimensions. Here every step is a linear layer, a view with the whole number of heads, a transpose, or
`scaled_dot_product_attention`.

How it can be cut over tensor ranks, when their number divides `num_heads`: `in_proj_weight` by rows within each of its
three sections (or `q_proj_weight`, `k_proj_weight`, `v_proj_weight` by rows), `out_proj.weight` by columns. What needs
more than that:

* attention weights that are used (`need_weights=True`): averaged, they are a mean over all heads and need an
  all-reduce; by head, they need a gather;
* an `attn_mask` of three dimensions has a slice for every head: each rank takes those of its own (`_by_head` makes the
  head dimension visible);
* `bias_k` and `bias_v` are appended to keys and values: they must be cut along their last dimension as the rows of
  their section are.

Self- and cross-attention, padding masks and masks of two dimensions, causal hints, `add_zero_attn`, `kdim`, `vdim`,
both layouts and unbatched inputs are cut without more; dropout draws one mask per head, so the ranks must draw
different ones. Nested tensors are refused. The fast path of `nn.TransformerEncoderLayer` in evaluation does not call
its attention at all: with cut weights it must be switched off (`torch.backends.mha.set_fastpath_enabled`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Sections = Literal["q", "k", "v", "qkv", "kv"]

Project = Callable[[Tensor, Sections], Tensor]
"""Maps a tensor `(..., features)` to the named projections of it, side by side in the last dimension."""


def expanded_forward(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    *,
    project: Project | None = None,
) -> tuple[Tensor, Tensor | None]:
    """What `module(query, key, value, ...)` returns, with the same random numbers drawn in dropout.

    Args:
        module: the attention; its `embed_dim` and `num_heads` are those of the whole.
        query: shape `(L, E)`, `(L, N, E)`, or `(N, L, E)` with `batch_first`.
        key: shape `(S, kdim)`, `(S, N, kdim)` or `(N, S, kdim)`.
        value: shape `(S, vdim)`, `(S, N, vdim)` or `(N, S, vdim)`.
        key_padding_mask: shape `(S,)` or `(N, S)`, boolean or to be added.
        need_weights: return the attention weights too.
        attn_mask: shape `(L, S)` or `(N * num_heads, L, S)`, boolean or to be added.
        average_attn_weights: the weights as a mean over heads.
        is_causal: a hint that `attn_mask` is the causal mask.
        project: computes projections of an input in place of :func:`project`: all three at once if query, key and value
            are one tensor, keys and values at once if these two are.

    Returns:
        The output in the shape and layout of `query`, and the weights, of shape `(N, L, S)` or `(N, num_heads, L, S)`
        (without `N` for unbatched inputs); None if they are not needed.

    Raises:
        ValueError: nested tensors.
        RuntimeError: a mask of the wrong shape or dtype, or a causal hint without a mask.
    """
    if query.is_nested or key.is_nested or value.is_nested:
        raise ValueError("Attention on nested tensors cannot be expanded: pad the inputs.")
    if is_causal and attn_mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    batched = query.dim() == 3
    q, k, v = _projected(module, query, key, value, project or partial(project_with, module))
    q, k, v = (_batch_first(x, module.batch_first) for x in (q, k, v))
    batch, length, source = q.size(0), q.size(1), k.size(1)
    if is_causal and key_padding_mask is None and not need_weights:
        mask = None
    else:
        is_causal = False
        mask = _merged_mask(module, attn_mask, key_padding_mask, (batch, length, source), query.dtype)
    if module.bias_k is not None and module.bias_v is not None:
        k = torch.cat([k, module.bias_k.expand(batch, 1, -1)], dim=1)
        v = torch.cat([v, module.bias_v.expand(batch, 1, -1)], dim=1)
        mask = None if mask is None else F.pad(mask, (0, 1))
    q, k, v = (_heads(x, module) for x in (q, k, v))
    if module.add_zero_attn:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        mask = None if mask is None else F.pad(mask, (0, 1))
    dropout = module.dropout if module.training else 0.0
    weights = None
    if need_weights:
        out, weights = _attention(q, k, v, mask, dropout)
        weights = weights.mean(dim=1) if average_attn_weights else weights
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=is_causal)
    out = out.transpose(1, 2).reshape(batch, length, module.embed_dim)
    if not batched:
        out = out.squeeze(0)
    elif not module.batch_first:
        out = out.transpose(0, 1)
    out = F.linear(out, module.out_proj.weight, module.out_proj.bias)
    if weights is not None and not batched:
        weights = weights.squeeze(0)
    return out, weights


def project_with(module: nn.MultiheadAttention, x: Tensor, which: Sections) -> Tensor:
    """Projections of `x` by the module's own weights, side by side: shape `(..., embed_dim * len(which))`."""
    start = "qkv".index(which) * module.embed_dim
    rows = slice(start, start + len(which) * module.embed_dim)
    bias = module.in_proj_bias
    if not module._qkv_same_embed_dim:
        weight = {"q": module.q_proj_weight, "k": module.k_proj_weight, "v": module.v_proj_weight}[which]
        return F.linear(x, weight, None if bias is None else bias[rows])
    if which == "qkv":  # the parameters themselves, which is what a planner looks for
        return F.linear(x, module.in_proj_weight, bias)
    return F.linear(x, module.in_proj_weight[rows], None if bias is None else bias[rows])


def _projected(
    module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, project: Project
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values in the layout of the inputs, with as few products as the inputs allow."""
    width = module.embed_dim
    if key is value and module._qkv_same_embed_dim:
        if query is key:
            q, k, v = project(query, "qkv").split(width, dim=-1)
        else:
            q = project(query, "q")
            k, v = project(key, "kv").split(width, dim=-1)
        return q, k, v
    return project(query, "q"), project(key, "k"), project(value, "v")


def _batch_first(x: Tensor, batch_first: bool) -> Tensor:
    """Shape `(N, L, E)`."""
    if x.dim() == 2:
        return x.unsqueeze(0)
    return x if batch_first else x.transpose(0, 1)


def _heads(x: Tensor, module: nn.MultiheadAttention) -> Tensor:
    """Shape `(N, H, L, E / H)`."""
    return x.reshape(x.size(0), x.size(1), module.num_heads, module.head_dim).transpose(1, 2)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> tuple[Tensor, Tensor]:
    scores = (q * (q.size(-1) ** -0.5)) @ k.transpose(-2, -1)
    if mask is not None:
        scores = scores + mask.to(scores.dtype)
    weights = scores.softmax(dim=-1)
    if dropout > 0.0:
        weights = F.dropout(weights, dropout)
    return weights @ v, weights


def _merged_mask(
    module: nn.MultiheadAttention,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
) -> Tensor | None:
    """What to add to the scores, of a shape that broadcasts to `(N, H, L, S)`."""
    batch, length, source = sizes
    merged = None
    if attn_mask is not None:
        merged = _by_head(_to_add(attn_mask, dtype), batch, module.num_heads, length, source)
    if key_padding_mask is not None:
        if key_padding_mask.shape not in ((batch, source), (source,)) or (key_padding_mask.dim() == 1 and batch > 1):
            raise RuntimeError(
                f"The shape of the key_padding_mask is {tuple(key_padding_mask.shape)}, should be {(batch, source)}."
            )
        padding = _to_add(key_padding_mask, dtype).reshape(batch, 1, 1, source)
        merged = padding if merged is None else merged + padding
    return merged


def _to_add(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf)
    if not mask.is_floating_point():
        raise RuntimeError(f"Only boolean and floating-point masks are supported, got {mask.dtype}.")
    return mask


def _by_head(mask: Tensor, batch: int, heads: int, length: int, source: int) -> Tensor:
    """Shape `(1, 1, L, S)` or `(N, H, L, S)`."""
    if mask.shape == (length, source):
        return mask[None, None]
    if mask.shape == (batch * heads, length, source):
        return mask.view(batch, heads, length, source)
    raise RuntimeError(
        f"The shape of the attn_mask is {tuple(mask.shape)}, should be {(length, source)} or "
        f"{(batch * heads, length, source)}."
    )
