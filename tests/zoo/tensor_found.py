"""Models by which a tester broke tensor parallelism while it was built."""

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.zoo.base import Batches, Case, tokens
from tests.zoo.tensor import LENGTH, MLP, VOCABULARY, WIDTH, Decoder
from tests.zoo.tensor_heads import EinsumAttention

_all: Batches = tokens(VOCABULARY, LENGTH)


def _lengths(n: int, batch_size: int, dtype: torch.dtype) -> list[Any]:
    """Long and short batches in turn, also of an odd length."""
    lengths = [LENGTH, 6, LENGTH, 7, 6]
    batches = _all(n, batch_size, dtype)
    return [(x[:, : lengths[i % 5]].clone(), y[:, : lengths[i % 5]].clone()) for i, (x, y) in enumerate(batches)]


class ByLength(nn.Module):
    """Short texts take another way: parameters that the first batch does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = EinsumAttention(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 8:
            return x + self.attn(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class RunningMean(nn.Module):
    """A buffer assigned from what is divided, and a residual added in place between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp, self.second = nn.LayerNorm(WIDTH), MLP(), MLP()
        self.register_buffer("mean", torch.zeros(4 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.mlp.fc_in(self.norm(x)))
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean((0, 1)).to(self.mean)
        x = x.clone()
        x += self.mlp.fc_out(h - self.mean.detach().mean())
        return x + torch.tanh(self.second(x))


class _Swish(torch.autograd.Function):
    """As fused kernels are wrapped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(x)
        return grad * (gate + x * gate * (1 - gate))


class OwnFunction(nn.Module):
    """One activation by an autograd function, one by an ordinary one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp, self.second = nn.LayerNorm(WIDTH), MLP(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.second(self.norm(x))
        return x + self.mlp.fc_out(_Swish.apply(self.mlp.fc_in(x)))  # type: ignore[no-untyped-call]


class PartlyRecomputed(nn.Module):
    """`checkpoint` around a part of the block: the recomputation comes outside of the block's call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.mlp, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), MLP(), MLP()

    def body(self, x: Tensor) -> Tensor:
        return self.inner(self.mlp(x)) + self.second(x)

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.body, self.norm(x), use_reentrant=False)


class Hooked(Decoder):
    """Hooks on gradients: of parameters, and of a value between blocks."""

    def __init__(self) -> None:
        super().__init__(OwnFunction)
        for layer in self.layers:
            layer.mlp.fc_in.weight.register_hook(lambda grad: grad * (0.5 / (1 + grad.norm())))
            layer.norm.weight.register_hook(lambda grad: grad.clamp(max=grad.mean()))

    def forward(self, idx: Tensor) -> Tensor:
        h = self.embed(idx)
        for layer in self.layers:
            h = layer(h)
            h.register_hook(lambda grad: grad * torch.clamp(0.01 / grad.norm(), max=1.0))
        return self.output(self.norm(h))


class Masked(Decoder):
    """Writes into the logits, which stay divided up to the loss."""

    def __init__(self) -> None:
        super().__init__(RunningMean)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        logits[..., 0] = -5.0
        logits[:, :, 3] -= 1.0
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        self.log("train_loss", loss)
        return loss


CASES = [
    Case("partly_recomputed", lambda: Decoder(PartlyRecomputed), _all, 3, "checkpoint within a block"),
    Case("gradient_hooks", Hooked, _all, 3, "hooks on gradients of parameters and values", per_sample=False),
    Case("own_function", lambda: Decoder(OwnFunction), _all, 3, "a torch.autograd.Function within a block"),
    Case("ways_by_length", lambda: Decoder(ByLength), _lengths, 3, "branch by length, odd lengths"),
    Case(
        "written_logits",
        Masked,
        _all,
        3,
        "logits changed in place, buffer assigned, residual in place",
        per_sample=False,
    ),
]
