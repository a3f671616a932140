"""Mean losses over targets that count: parts that add up to the whole batch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lnn_lightning.parallel.step.losses import counted_losses, whole_batch_losses

CLASSES = 5
LOGITS = torch.randn(8, CLASSES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TARGETS = torch.tensor([0, 1, -100, 2, -100, -100, -100, 4])
WEIGHT = torch.tensor([0.5, 1.0, 2.0, 0.25, 3.0], dtype=torch.float64)
SPATIAL = torch.randn(4, CLASSES, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
SPATIAL_TARGETS = torch.tensor([[0, 1, 2], [-100, -100, 3], [4, -100, 0], [1, 1, 1]])

Loss = Callable[[Tensor, Tensor], Tensor]
LOSSES: dict[str, Loss] = {
    "cross_entropy": F.cross_entropy,
    "keywords": lambda x, y: F.cross_entropy(input=x, target=y, reduction="mean"),
    "module": nn.CrossEntropyLoss(),
    "another index": lambda x, y: F.cross_entropy(x, y.where(y >= 0, 3), ignore_index=3),
    "class weights": lambda x, y: F.cross_entropy(x, y, weight=WEIGHT),
    "weighted module": nn.CrossEntropyLoss(weight=WEIGHT),
    "smoothed": lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
    "smoothed and weighted": lambda x, y: F.cross_entropy(x, y, weight=WEIGHT, label_smoothing=0.1),
    "nll": lambda x, y: F.nll_loss(x.log_softmax(1), y),
    "nll module": lambda x, y: nn.NLLLoss(weight=WEIGHT)(x.log_softmax(1), y),
}


def cut(values: Tensor, sizes: list[int]) -> list[Tensor]:
    return list(values.split(sizes))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("sizes", [[4, 4], [2, 2, 2, 2], [6, 2], [1] * 8])
def test_parts_add_up(name: str, sizes: list[int]) -> None:
    """Also where a part has no valid target at all: its mean would be NaN."""
    loss = LOSSES[name]
    whole = LOGITS.clone().requires_grad_()
    expected = loss(whole, TARGETS)
    expected.backward()
    counts: list[Tensor] = []
    with counted_losses(counts):
        for x, y in zip(cut(LOGITS, sizes), cut(TARGETS, sizes), strict=True):
            loss(x, y)
    parts = LOGITS.clone().requires_grad_()
    factor = 1.0 / float(torch.stack(counts).sum())
    total = torch.zeros(())
    for x, y in zip(cut(parts, sizes), cut(TARGETS, sizes), strict=True):
        with whole_batch_losses([factor]):
            total = total + loss(x, y)
    total.backward()
    torch.testing.assert_close(total, expected, check_dtype=False)
    torch.testing.assert_close(parts.grad, whole.grad)


@pytest.mark.parametrize("name", ["cross_entropy", "class weights", "smoothed"])
def test_with_more_dimensions(name: str) -> None:
    loss = LOSSES[name]
    counts: list[Tensor] = []
    with counted_losses(counts):
        expected = loss(SPATIAL, SPATIAL_TARGETS)
        loss(SPATIAL[:2], SPATIAL_TARGETS[:2])
        loss(SPATIAL[2:], SPATIAL_TARGETS[2:])
    assert float(counts[1] + counts[2]) == pytest.approx(float(counts[0]))
    total = torch.zeros(())
    for part in (slice(0, 2), slice(2, 4)):
        with whole_batch_losses([1.0 / float(counts[0])]):
            total = total + loss(SPATIAL[part], SPATIAL_TARGETS[part])
    torch.testing.assert_close(total, expected, check_dtype=False)


def test_counts() -> None:
    counts: list[Tensor] = []
    with counted_losses(counts):
        F.cross_entropy(LOGITS, TARGETS)
        F.cross_entropy(LOGITS, TARGETS, weight=WEIGHT)
        F.nll_loss(LOGITS, TARGETS.clamp(min=0), ignore_index=0)
        F.cross_entropy(LOGITS[4:7], TARGETS[4:7])
    assert [float(count) for count in counts] == [4.0, 0.5 + 1.0 + 2.0 + 3.0, 3.0, 0.0]
    assert all(count.dtype == torch.float64 and count.dim() == 0 for count in counts)


def test_what_is_no_mean_over_targets_is_left_alone() -> None:
    others: list[Callable[[], Any]] = [
        lambda: F.cross_entropy(LOGITS, TARGETS, reduction="sum"),
        lambda: F.cross_entropy(LOGITS, TARGETS, reduction="none"),
        lambda: F.cross_entropy(LOGITS, LOGITS.softmax(1)),
        lambda: F.cross_entropy(LOGITS, TARGETS, size_average=False),
        lambda: F.cross_entropy(LOGITS, TARGETS, reduce=False),
        lambda: F.mse_loss(LOGITS, LOGITS * 0),
        lambda: F.binary_cross_entropy_with_logits(LOGITS, LOGITS.sigmoid()),
    ]
    counts: list[Tensor] = []
    with pytest.warns(UserWarning, match="deprecated"):
        expected = [loss() for loss in others]
        with counted_losses(counts):
            counted = [loss() for loss in others]
        with whole_batch_losses([]):
            scaled = [loss() for loss in others]
    assert counts == []
    for one, two, three in zip(expected, counted, scaled, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)


def test_losses_are_told_apart_by_their_order() -> None:
    def both(y: Tensor) -> Tensor:
        return F.cross_entropy(LOGITS, y) + 10 * F.cross_entropy(LOGITS * 2, y, ignore_index=0)

    with whole_batch_losses([0.25, 0.5]):
        got = both(TARGETS.clamp(min=0))
    expected = 0.25 * F.cross_entropy(LOGITS, TARGETS.clamp(min=0), reduction="sum")
    expected = expected + 5 * F.cross_entropy(LOGITS * 2, TARGETS.clamp(min=0), ignore_index=0, reduction="sum")
    torch.testing.assert_close(got, expected)


def test_targets_that_are_not_here_cannot_be_counted() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        logits, targets = torch.empty(8, CLASSES), torch.empty(8, dtype=torch.long)
    counts: list[Tensor] = []
    with counted_losses(counts):
        F.cross_entropy(logits, TARGETS)
        F.cross_entropy(logits, targets)
    assert float(counts[0]) == 4.0
    assert counts[1].isnan()
