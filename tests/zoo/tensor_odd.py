"""Encoders, vision models, convolutions."""

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from tests.zoo.base import Batches, Case, Lit, generator, images, tokens
from tests.zoo.tensor import HEADS, LENGTH, MLP, VOCABULARY, WIDTH, Decoder, PreNorm
from tests.zoo.tensor_heads import SIZE, EinsumAttention, FusedSwiGLU

CLASSES = 5


class Classifier(Lit):
    """Patches, blocks, mean, head."""

    def __init__(self, blocks: list[nn.Module], positions: bool = True) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, WIDTH, 4, 4)
        self.pos_embed = nn.Parameter(0.1 * torch.randn(1, 16, WIDTH)) if positions else None
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        if self.pos_embed is not None:
            x = x + self.pos_embed
        return self.head(self.norm(self.blocks(x)).mean(dim=1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss


class MixerBlock(nn.Module):
    """MLP-Mixer: one MLP along the patches, one along the features."""

    def __init__(self, patches: int = 16) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mlp_tokens, self.mlp_channels = MLP(patches, 24), MLP(WIDTH, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.mlp_channels(self.norm2(x))


class TimmAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, SIZE
        self.qkv = nn.Linear(WIDTH, WIDTH * 3, bias=True)
        self.q_norm, self.k_norm = nn.LayerNorm(SIZE), nn.LayerNorm(SIZE)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.proj_drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        attn = (q * self.head_dim**-0.5) @ k.transpose(-2, -1)
        x = attn.softmax(dim=-1) @ v
        return self.proj_drop(self.proj(x.transpose(1, 2).reshape(B, N, C)))


class LayerScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(0.5 * torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class TimmBlock(nn.Module):
    """timm's ViT with qk_norm and layer scale."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = TimmAttention(), FusedSwiGLU()
        self.ls1, self.ls2 = LayerScale(), LayerScale()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class WindowAttention(nn.Module):
    """Swin's: a table of biases with a column for every head, and a mask for shifted windows."""

    def __init__(self, window: int = 2) -> None:
        super().__init__()
        self.relative_position_bias_table = nn.Parameter(0.1 * torch.randn((2 * window - 1) ** 2, HEADS))
        coords = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        relative = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0) + window - 1
        self.register_buffer("relative_position_index", relative[..., 0] * (2 * window - 1) + relative[..., 1])
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        B_, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B_, N, 3, HEADS, C // HEADS).permute(2, 0, 3, 1, 4)
        attn = (q * SIZE**-0.5) @ k.transpose(-2, -1)
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)].view(N, N, -1)
        attn = attn + bias.permute(2, 0, 1).contiguous().unsqueeze(0)
        if mask is not None:
            nW = mask.shape[0]
            attn = attn.view(B_ // nW, nW, HEADS, N, N) + mask.unsqueeze(1).unsqueeze(0)
            attn = attn.view(-1, HEADS, N, N)
        x = (attn.softmax(dim=-1) @ v).transpose(1, 2).reshape(B_, N, C)
        return self.proj(x)


class SwinBlock(nn.Module):
    def __init__(self, shift: int, side: int = 4, window: int = 2) -> None:
        super().__init__()
        self.shift, self.side, self.window = shift, side, window
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = WindowAttention(window), MLP()
        mask = None
        if shift:
            region = (torch.arange(side) >= side - window).int() + (torch.arange(side) >= side - shift).int()
            parts = self.partition((region[:, None] * 3 + region[None])[None, ..., None]).squeeze(-1)
            mask = (parts[:, None, :] != parts[:, :, None]) * -100.0
        self.register_buffer("attn_mask", mask)

    def partition(self, x: Tensor) -> Tensor:
        B, H, W, C = x.shape
        w = self.window
        return x.view(B, H // w, w, W // w, w, C).permute(0, 1, 3, 2, 4, 5).reshape(-1, w * w, C)

    def forward(self, x: Tensor) -> Tensor:
        B, L, C = x.shape
        s, w = self.side, self.window
        h = self.norm1(x).view(B, s, s, C)
        if self.shift:
            h = torch.roll(h, shifts=(-self.shift, -self.shift), dims=(1, 2))
        h = self.attn(self.partition(h), mask=self.attn_mask)
        h = h.view(B, s // w, s // w, w, w, C).permute(0, 1, 3, 2, 4, 5).reshape(B, s, s, C)
        if self.shift:
            h = torch.roll(h, shifts=(self.shift, self.shift), dims=(1, 2))
        x = x + h.view(B, L, C)
        return x + self.mlp(self.norm2(x))


class Conformer(nn.Module):
    """Attention, then a convolution module: pointwise, gated, depthwise, pointwise."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = PreNorm(EinsumAttention())
        self.norm = nn.LayerNorm(WIDTH)
        self.pointwise_in = nn.Conv1d(WIDTH, 2 * WIDTH, 1)
        self.depthwise = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH)
        self.pointwise_out = nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        h = F.glu(self.pointwise_in(self.norm(x).transpose(1, 2)), dim=1)
        h = F.silu(self.depthwise(F.pad(h, (2, 0))))
        return x + self.pointwise_out(h).transpose(1, 2)


class BertLayer(nn.Module):
    """Norms behind the residual, attention mask added to the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.dense = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.intermediate, self.output = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def transpose_for_scores(self, x: Tensor) -> Tensor:
        return x.view(x.size()[:-1] + (HEADS, SIZE)).permute(0, 2, 1, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (self.transpose_for_scores(f(x)) for f in (self.query, self.key, self.value))
        probabilities = (torch.matmul(q, k.transpose(-1, -2)) / SIZE**0.5 + mask).softmax(dim=-1)
        context = torch.matmul(probabilities, v).permute(0, 2, 1, 3).contiguous()
        x = self.norm_1(x + self.dense(context.view(context.size()[:-2] + (WIDTH,))))
        return self.norm_2(x + self.output(F.gelu(self.intermediate(x))))


class BertPretraining(Lit):
    """A pooler with a loss of its own, and a head tied to the embedding, with a bias over the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.position_embeddings = nn.Embedding(LENGTH, WIDTH)
        self.layer_norm = nn.LayerNorm(WIDTH)
        self.layer = nn.ModuleList([BertLayer() for _ in range(3)])
        self.pooler = nn.Linear(WIDTH, WIDTH)
        self.seq_relationship = nn.Linear(WIDTH, 2)
        self.transform, self.transform_norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.decoder = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))
        self.decoder.weight = self.word_embeddings.weight

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, labels, mask, order = batch
        positions = torch.arange(ids.size(1), device=ids.device)
        h = self.layer_norm(self.word_embeddings(ids) + self.position_embeddings(positions))
        extended = (1.0 - mask[:, None, None, :].to(h.dtype)) * torch.finfo(h.dtype).min
        for layer in self.layer:
            h = layer(h, extended)
        pooled = torch.tanh(self.pooler(h[:, 0]))
        scores = self.decoder(self.transform_norm(F.gelu(self.transform(h)))) + self.bias
        loss = F.cross_entropy(scores.view(-1, VOCABULARY), labels.view(-1))
        loss = loss + F.cross_entropy(self.seq_relationship(pooled), order)
        self.log("train_loss", loss)
        return loss


def _bert(n: int, batch_size: int, dtype: torch.dtype) -> list[Any]:
    rng, result = generator(), []
    for _ in range(n):
        ids = torch.randint(1, VOCABULARY, (batch_size, LENGTH), generator=rng)
        mask = (torch.arange(LENGTH) < torch.randint(6, LENGTH + 1, (batch_size, 1), generator=rng)).long()
        result.append((ids * mask, (3 * ids + 1) % VOCABULARY, mask, ids[:, 0] % 2))
    return result


class TorchEncoderPadded(Lit):
    """torch's encoder as by default: norms behind, time first; with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.0, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, labels, mask, _ = batch
        h = self.encoder(self.embed(ids).transpose(0, 1), src_key_padding_mask=mask == 0).transpose(0, 1)
        loss = F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())
        self.log("train_loss", loss)
        return loss


class TorchSeq2Seq(Lit):
    """torch's encoder and decoder, time first, with padding of the source."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.transformer = nn.Transformer(WIDTH, HEADS, 2, 2, 64, dropout=0.0, norm_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, labels, mask, _ = batch
        causal = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=ids.device, dtype=torch.bool)
        padding = mask == 0
        source = self.embed(ids).transpose(0, 1)
        target = self.embed(F.pad(labels[:, :-1], (1, 0))).transpose(0, 1)
        h = self.transformer(
            source, target, tgt_mask=causal, src_key_padding_mask=padding, memory_key_padding_mask=padding
        )
        loss = F.cross_entropy(self.head(h).permute(1, 2, 0), labels)
        self.log("train_loss", loss)
        return loss


_images, _tokens = images(16, CLASSES), tokens(VOCABULARY, LENGTH)
_padded: Batches = _bert

CASES = [
    Case("mlp_mixer", lambda: Classifier([MixerBlock() for _ in range(3)], positions=False), _images, 3, "two MLPs"),
    Case("timm_block", lambda: Classifier([TimmBlock() for _ in range(3)]), _images, 3, "qk-norm, layer scale, unbind"),
    Case("window_attention", lambda: Classifier([SwinBlock(i % 2) for i in range(4)]), _images, 4, "biases by head"),
    Case("conformer", lambda: Decoder(Conformer), _tokens, 3, "Conv1d, pointwise and depthwise, GLU over channels"),
    Case("bert_pretraining", BertPretraining, _padded, 3, "pooler; tied head with a bias of its own; padding_idx"),
    Case("torch_encoder_padded", TorchEncoderPadded, _padded, 3, "nn.TransformerEncoder, time first, padding"),
    Case("torch_seq2seq", TorchSeq2Seq, _padded, 4, "nn.Transformer, time first, padding, boolean mask"),
]
