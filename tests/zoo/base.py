"""What a model of the zoo is, and makers of batches.

The models are written as their users would write them: nothing in them knows of stages or micro-batches.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

Batches = Callable[[int, int, torch.dtype], list[Any]]
"""`(number of batches, batch size, dtype of the floating-point inputs)` -> the batches, always the same ones."""


@dataclass(frozen=True)
class Case:
    """One model of the zoo."""

    name: str
    build: Callable[[], pl.LightningModule]
    batches: Batches
    blocks: int
    """How many repeated blocks it has, roughly: no point in cutting it into more stages."""
    notes: str = ""
    per_sample: bool = True
    """The loss is a mean over samples: micro-batches give what the whole batch gives. Not so with BatchNorm."""
    deterministic: bool = True
    """No dropout: comparable with one process."""
    equal_shares: bool = True
    """Every sample weighs the same in the loss: no ignored targets."""
    tolerance: float = 1e-9
    """Relative, of the parameters in float64."""
    loss_tolerance: float = 1e-9
    refused: str = ""
    """Cannot be pipelined with profit: words of the refusal."""


class Lit(pl.LightningModule):
    """The optimizer of nearly all of them. `eps`: gradients that are zero in theory must not amplify noise."""

    lr = 1e-2

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, eps=1e-4)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(1234 + seed)


def tokens(vocabulary: int = 32, length: int = 12) -> Batches:
    """`(x, y)` of token numbers; `y` follows from `x`, so that the losses fall."""

    def make(n: int, batch_size: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        rng = generator()
        inputs = [torch.randint(0, vocabulary, (batch_size, length), generator=rng) for _ in range(n)]
        return [(x, (3 * x + 1) % vocabulary) for x in inputs]

    return make


def vectors(features: int = 12, targets: int = 4) -> Batches:
    """`(x, y)` of vectors; `y` is a fixed linear map of `x`."""

    def make(n: int, batch_size: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        rng = generator()
        true_map = torch.randn(features, targets, generator=rng, dtype=torch.float64)
        inputs = [torch.randn(batch_size, features, generator=rng, dtype=torch.float64) for _ in range(n)]
        return [(x.to(dtype), (x @ true_map).to(dtype)) for x in inputs]

    return make


def images(size: int = 16, classes: int = 5, channels: int = 3) -> Batches:
    """`(image, class)`; the class shows in the image's brightness."""

    def make(n: int, batch_size: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        rng = generator()
        result = []
        for _ in range(n):
            y = torch.randint(0, classes, (batch_size,), generator=rng)
            x = torch.randn(batch_size, channels, size, size, generator=rng, dtype=torch.float64)
            result.append(((x + y.view(-1, 1, 1, 1) - classes / 2).to(dtype), y))
        return result

    return make


def mapped(batches: Batches, change: Callable[[Any], Any]) -> Batches:
    """The same batches in another structure."""
    return lambda n, batch_size, dtype: [change(batch) for batch in batches(n, batch_size, dtype)]
