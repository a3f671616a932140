"""Losses that are not a plain mean over samples."""

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from tests.zoo.base import Case, generator, tokens
from tests.zoo.language import GPT, LENGTH, VOCABULARY, LitGPT
from tests.zoo.odd import FEATURES, TARGETS, Regression

IGNORED = -100


class SumLoss(Regression):
    """A sum over samples, not a mean."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.mse_loss(self(x), y, reduction="sum") / 100
        self.log("train_loss", loss)
        return loss


class HalvedSum(Regression):
    """A sum divided by a constant, plus a mean."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = (self(x) - y).pow(2).sum() / (x.size(0) * 2)
        self.log("train_loss", loss)
        return loss


class LanguageLoss(LitGPT):
    """Logits of a GPT; what is done with them differs."""

    def __init__(self) -> None:
        super().__init__(tied=False)

    def logits(self, x: Tensor) -> Tensor:
        model: GPT = self.model
        h = model.transformer.wte(x) + model.transformer.wpe(torch.arange(x.size(1), device=x.device))
        for block in model.transformer.h:
            h = block(h)
        return model.lm_head(model.transformer.ln_f(h))


class IgnoredTargets(LanguageLoss):
    """The mean over the targets that count."""

    options: dict[str, Any] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.logits(x).flatten(0, 1), y.flatten(), ignore_index=IGNORED, **self.options)
        self.log("train_loss", loss)
        return loss


class SmoothedTargets(IgnoredTargets):
    options = {"label_smoothing": 0.1}


class WeightedClasses(LanguageLoss):
    """Classes weigh differently, by a module that holds the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.criterion = nn.CrossEntropyLoss(weight=torch.linspace(0.2, 2.0, VOCABULARY))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = self.criterion(self.logits(x).transpose(1, 2), y)
        self.log("train_loss", loss)
        return loss


class LogSoftmaxAndNll(LanguageLoss):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.nll_loss(F.log_softmax(self.logits(x), dim=-1).flatten(0, 1), y.flatten(), ignore_index=IGNORED)
        self.log("train_loss", loss)
        return loss


class HandWrittenMask(LanguageLoss):
    """The mean over the targets that count, written out."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        mask = (y != IGNORED).float()
        losses = F.cross_entropy(self.logits(x).transpose(1, 2), y.clamp(min=0), reduction="none")
        loss = (losses * mask).sum() / mask.sum()
        self.log("train_loss", loss)
        return loss


class TwoLosses(LanguageLoss):
    """A mean over targets that count and another over all."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.logits(x)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=IGNORED)
        loss = loss + 0.01 * torch.logsumexp(logits, dim=-1).pow(2).mean()
        self.log("train_loss", loss)
        return loss


class Contrastive(Regression):
    """Each sample against all others of its batch: micro-batches are smaller batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        left = F.normalize(self(x), dim=-1)
        right = F.normalize(x[:, :TARGETS], dim=-1)
        loss = F.cross_entropy(left @ right.T / 0.5, torch.arange(x.size(0), device=x.device))
        self.log("train_loss", loss)
        return loss


def _masked_tokens(n: int, batch_size: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    rng = generator(1)
    result = []
    for x, y in tokens(VOCABULARY, LENGTH)(n, batch_size, dtype):
        lengths = torch.randint(1, LENGTH, (batch_size, 1), generator=rng)
        result.append((x, y.masked_fill(torch.arange(LENGTH) >= lengths, IGNORED)))
    return result


def _vectors(n: int, batch_size: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    rng = generator(2)
    return [
        (
            torch.randn(batch_size, FEATURES, generator=rng, dtype=torch.float64).to(dtype),
            torch.randn(1, TARGETS, generator=rng, dtype=torch.float64).expand(batch_size, -1).to(dtype).clone(),
        )
        for _ in range(n)
    ]


def _language(name: str, build: Any, notes: str, **options: Any) -> Case:
    return Case(name, build, _masked_tokens, 4, notes, equal_shares=False, **options)


CASES = [
    Case("sum_loss", SumLoss, _vectors, 4, "a sum over samples", equal_shares=False),
    Case("sum_over_size_loss", HalvedSum, _vectors, 4, "a sum divided by the batch's size"),
    _language("ignored_targets", IgnoredTargets, "F.cross_entropy with ignore_index"),
    _language("smoothed_targets", SmoothedTargets, "the same with label smoothing"),
    Case(
        "weighted_classes",
        WeightedClasses,
        tokens(VOCABULARY, LENGTH),
        4,
        "nn.CrossEntropyLoss with class weights",
        equal_shares=False,
    ),
    _language("nll_loss", LogSoftmaxAndNll, "log_softmax and nll_loss"),
    _language("masked_mean", HandWrittenMask, "a mask and a division written by hand", per_sample=False),
    Case("contrastive", Contrastive, _vectors, 4, "samples against each other", per_sample=False),
    _language("two_losses", TwoLosses, "a mean over some targets and one over all"),
]
