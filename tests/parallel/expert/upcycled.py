"""A small dense model, what it is upcycled to, and its training on one process, written out."""

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lnn_lightning.parallel.expert.layer import moe_layers
from lnn_lightning.parallel.expert.settings import Upcycle
from lnn_lightning.parallel.expert.upcycle import upcycle

WORDS, WIDTH, LENGTH, BATCH = 20, 8, 5, 8


class FeedForward(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.down(F.gelu(self.up(x))) * scale


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.mlp = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x.cumsum(1) / LENGTH)
        return x + self.mlp(self.norm(x), scale=2.0)


class Dense(pl.LightningModule):
    """Predicts its own words; `reduction` is that of its loss."""

    def __init__(self, reduction: str = "mean", manual: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)
        self.reduction, self.automatic_optimization = reduction, not manual

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        logits = self(batch)[:, :-1].flatten(0, 1)
        loss = F.cross_entropy(logits, batch[:, 1:].flatten(), reduction=self.reduction)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-3)


def build(**options: Any) -> Dense:
    torch.manual_seed(5)
    return Dense(**options).double()


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(WORDS, (BATCH, LENGTH), generator=generator) for _ in range(count)]


class Tokens:
    """What the routers of a model were given since the last reading."""

    def __init__(self, model: nn.Module) -> None:
        self.given: dict[str, Tensor] = {}
        for name, layer in moe_layers(model).items():
            layer.router.register_forward_pre_hook(lambda _, args, name=name: self.given.update({name: args[0]}))

    def losses(self, model: nn.Module, settings: Upcycle) -> Tensor:
        """The weighted losses of all layers, as Switch and ST-MoE write them."""
        total = torch.zeros((), dtype=torch.float64)
        for name, layer in moe_layers(model).items():
            logits = self.given[name] @ layer.router.weight.T
            probs = logits.softmax(-1)
            chosen = F.one_hot(probs.topk(settings.top_k, -1).indices, settings.experts).sum((0, 1)).double()
            balance = settings.experts * (chosen / chosen.sum() * probs.mean(0)).sum()
            total = total + settings.aux_loss * balance + settings.z_loss * logits.logsumexp(-1).square().mean()
        return total


def micro_batch(batch: Tensor, index: int, ranks: int, parts: int) -> Tensor:
    """The samples that the data ranks have in their micro-batches of one number."""
    return batch.view(ranks, parts, -1, LENGTH)[:, index].flatten(0, 1)


def train_plainly(
    settings: Upcycle,
    steps: int,
    ranks: int,
    parts: int,
    accumulate: int = 1,
    seed: int = 0,
    given: list[Tensor] | None = None,
    **options: Any,
) -> tuple[dict[str, Tensor], list[float]]:
    """AdamW on loss + losses of the layers; the state at the end and the latter's mean in each step."""
    model = build(**options)
    upcycle(model, settings, seed)
    tokens = Tokens(model)
    optimizer = model.configure_optimizers()
    added = []
    for index, batch in enumerate(given or batches(steps * accumulate)):
        total = 0.0
        for part in range(parts):
            words = micro_batch(batch, part, ranks, parts)
            logits = model(words)[:, :-1].flatten(0, 1)
            loss = F.cross_entropy(logits, words[:, 1:].flatten(), reduction=model.reduction)
            losses = tokens.losses(model, settings) / parts
            total += float(losses.detach())
            ((loss / parts if model.reduction == "mean" else loss) / accumulate + losses / accumulate).backward()
        added.append(total)
        if (index + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}, added
