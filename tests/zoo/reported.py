"""Models that were silently different, or crashed, once: code as people write it, each with the fault it showed."""

import copy
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.zoo.base import Case, Lit, tokens, vectors
from tests.zoo.odd import FEATURES, TARGETS, WIDTH, Regression, Residual


class UnusedGlueParameter(Regression):
    """A parameter that the step does not use, on a module that every stage runs."""

    def __init__(self) -> None:
        super().__init__()
        self.mask_token = nn.Parameter(torch.zeros(WIDTH))


class CheckpointPerBlock(Regression):
    """`torch.utils.checkpoint` written around the call of a block."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class CheckpointAroundSeveral(Regression):
    """A checkpoint around three blocks, which must stay together."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = checkpoint(lambda x: self.blocks[2](self.blocks[1](self.blocks[0](x))), x, use_reentrant=False)
        return self.head(self.blocks[3](x))


class ReentrantCheckpoint(Regression):
    """Its values have no graph when a stage is left inside of it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(x)


class AppendingBlock(Residual):
    def forward(self, x: Tensor, found: list[Tensor]) -> Tensor:  # type: ignore[override]
        out = super().forward(x)
        found.append(out.pow(2).mean())
        return out


class BlocksThatAppend(Regression):
    """Blocks that put a loss into a list they are given: those of other stages would be missing."""

    def block(self, i: int) -> nn.Module:
        return AppendingBlock()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        found: list[Tensor] = []
        h = self.embed(x)
        for block in self.blocks:
            h = block(h, found)
        return F.mse_loss(self.head(h), y) + torch.stack(found).sum()


class HookedActivations(Regression):
    """Forward hooks collect what every block returns; the loss reads one of an early block."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []
        for block in self.blocks:
            block.register_forward_hook(lambda module, args, out: self.found.append(out))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.found.clear()
        loss = F.mse_loss(self(x), y) + 0.1 * self.found[1].pow(2).mean() / len(self.found)
        self.found.clear()
        self.log("train_loss", loss)
        return loss


@lru_cache
def ramp(size: int) -> Tensor:
    return torch.arange(size) / size


class CachedBlock(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (1 + ramp(x.shape[-1]).to(x)))


class FunctionCache(Regression):
    """A function cache that a traced run fills with a fake tensor."""

    def block(self, i: int) -> nn.Module:
        return CachedBlock()


class WeightAverage(Regression):
    """A copy of the model, averaged by hand."""

    def __init__(self) -> None:
        super().__init__()
        parts = nn.ModuleDict({"embed": self.embed, "blocks": self.blocks, "head": self.head})
        self.average = copy.deepcopy(parts).requires_grad_(False)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda *_: self.update_average())
        return optimizer

    @torch.no_grad()
    def update_average(self) -> None:
        own = nn.ModuleDict({"embed": self.embed, "blocks": self.blocks, "head": self.head})
        for mean, parameter in zip(self.average.parameters(), own.parameters(), strict=True):
            mean.lerp_(parameter, 0.1)


class MaskedLogits(Lit):
    """Logits of the targets that count, by a mask of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList([Residual() for _ in range(4)])
        self.head = nn.Linear(WIDTH, 32)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        mask = y % 3 != 0
        loss = F.cross_entropy(self.head(h)[mask], y[mask])
        self.log("train_loss", loss)
        return loss


class LearntLossWeight(MaskedLogits):
    """A mean loss with ignored targets, multiplied by a learnt factor (Kendall et al.)."""

    def __init__(self) -> None:
        super().__init__()
        self.log_variance = nn.Parameter(torch.zeros(()))
        self.criterion = nn.CrossEntropyLoss()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        targets = y.masked_fill(x % 5 == 0, -100)
        entropy = self.criterion(self.head(h).flatten(0, 1), targets.flatten())
        loss = entropy * torch.exp(-self.log_variance) + self.log_variance
        self.log("train_loss", loss)
        return loss


class GradientPenalty(Regression):
    """Derivatives within the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = x.clone().requires_grad_()
        out = self(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.mse_loss(out, y) + slope.pow(2).mean()


_vectors = vectors(FEATURES, TARGETS)


def pictures_with_boxes(n: int, batch_size: int, dtype: torch.dtype) -> list[dict[str, Any]]:
    """A tensor and a list of dicts, one a sample, as for detectors; as many boxes a sample as samples in a batch."""
    return [
        {"x": x, "labels": [{"y": row.expand(batch_size, -1).clone()} for row in y]}
        for x, y in _vectors(n, batch_size, dtype)
    ]


class Detector(Regression):
    """A batch with a list of dicts."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        targets = torch.stack([label["y"].mean(0) for label in batch["labels"]])
        loss = F.mse_loss(self(batch["x"]), targets)
        self.log("train_loss", loss)
        return loss


CASES = [
    Case("unused_glue_parameter", UnusedGlueParameter, _vectors, 4, "crashed on all stages but the last"),
    Case("checkpoint_per_block", CheckpointPerBlock, _vectors, 4, "right"),
    Case("checkpoint_around_several", CheckpointAroundSeveral, _vectors, 4, "was cut within the checkpoint"),
    Case("reentrant_checkpoint", ReentrantCheckpoint, _vectors, 4, "silently wrong", refused="use_reentrant=False"),
    Case("blocks_that_append", BlocksThatAppend, _vectors, 4, "silently wrong", refused="writes into a list or dict"),
    Case("hooked_activations", HookedActivations, _vectors, 4, "hooks of absent blocks did not run"),
    Case("function_cache", FunctionCache, _vectors, 4, "kept a fake tensor"),
    Case("weight_average", WeightAverage, _vectors, 4, "wrote into stand-ins"),
    Case("masked_logits", MaskedLogits, tokens(), 4, "could not be counted", equal_shares=False),
    Case("learnt_loss_weight", LearntLossWeight, tokens(), 4, "gradient of the factor", equal_shares=False),
    Case("gradient_penalty", GradientPenalty, _vectors, 4, "crashed in the first step", refused="autograd.grad"),
    Case("detector", Detector, pictures_with_boxes, 4, "boxes were cut, or the batch refused", equal_shares=True),
]
