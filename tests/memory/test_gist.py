"""Gist: bytes by measurement, gradients to the bit, and what it must leave alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lnn_lightning import Gist, PTDPStrategy
from lnn_lightning.memory.gist import GistOperations
from lnn_lightning.memory.saved_tensors import SavedTensors
from lnn_lightning.parallel.errors import LayoutError, StepError
from tests.helpers.convolutional import VGG, ResNet, alive_after

IMAGES = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(4)


def run(settings: Gist | None, forward: Callable[[], Tensor], smallest: int = 0) -> tuple[Tensor, GistOperations]:
    """A forward on its own, as the engine would run it."""
    if settings is None:
        return forward(), GistOperations(Gist())
    operations = GistOperations(settings)
    saved = SavedTensors(encoders=operations.encoders(), smallest=smallest)
    operations.attach(saved)
    operations.begin(1, training=True)
    with saved.forward(0, 0), operations.forward(0, 0):
        result = forward()
    operations.finish()
    return result, operations


def train(module: nn.Module, settings: Gist | None, images: Tensor) -> tuple[Tensor, list[Tensor], GistOperations]:
    torch.manual_seed(1)
    module.zero_grad()
    loss, operations = run(settings, lambda: F.cross_entropy(module(images), LABELS), 1024)
    loss.backward()
    return loss.detach(), [parameter.grad.clone() for parameter in module.parameters()], operations  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("model", "lossless", "half"),
    [(VGG, 1.8, 3.5), (lambda: VGG(batch_norm=True), 1.8, 3.5), (ResNet, 1.3, 2.0)],
    ids=["vgg", "vgg_bn", "resnet"],
)
def test_bytes_and_gradients(model: Callable[[], nn.Module], lossless: float, half: float) -> None:
    """Everything alive behind the forward counts, whoever holds it."""
    torch.manual_seed(0)
    module = model()
    there = [*module.parameters(), *module.buffers(), IMAGES]
    names = list(module.state_dict())

    def alive(settings: Gist | None) -> int:
        return alive_after(lambda: run(settings, lambda: F.cross_entropy(module(IMAGES), LABELS), 1024), there)

    plain = alive(None)
    expected_loss, expected, _ = train(module, None, IMAGES)
    loss, gradients, operations = train(module, Gist(), IMAGES)
    assert torch.equal(loss, expected_loss) and all(map(torch.equal, gradients, expected))
    assert plain / alive(Gist()) >= lossless
    total = operations.report.total if operations.report is not None else None
    assert total is not None and total.before - IMAGES.nbytes == pytest.approx(plain, rel=0.01)
    assert total.after - IMAGES.nbytes == pytest.approx(alive(Gist()), rel=0.01)

    loss, gradients, _ = train(module, Gist(dpr="fp16"), IMAGES)
    assert torch.equal(loss, expected_loss)  # the forward is not touched
    for found, reference in zip(gradients, expected, strict=True):
        assert float((found - reference).norm()) <= 0.02 * float(reference.norm()) + 1e-5
    assert plain / alive(Gist(dpr="fp16")) >= half
    assert plain / alive(Gist(dpr="fp8")) > 1.5 * half
    assert list(module.state_dict()) == names


@pytest.mark.parametrize("model", [VGG, ResNet])
def test_channels_last(model: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module = model().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = IMAGES.contiguous(memory_format=torch.channels_last)
    _, expected, _ = train(module, None, images)
    _, gradients, _ = train(module, Gist(), images)
    assert all(map(torch.equal, gradients, expected))


LINEAR = nn.Linear(8, 8)
KERNEL = torch.randn(8, 4, 3, 3, generator=torch.Generator().manual_seed(0))


def _relu_used_by_many(x: Tensor) -> Tensor:
    y = F.relu(x, inplace=True)
    return F.max_pool2d(y, 2).sum() + y.square().mean() + F.conv2d(y, KERNEL).sum() + (y + 1).exp().mean()


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu_pool": lambda x: F.max_pool2d(x.relu(), 2),
    "relu_in_place": lambda x: nn.MaxPool2d(3, 2, 1)(nn.ReLU(inplace=True)(x)),
    "relu_of_many": _relu_used_by_many,
    "windows": lambda x: F.max_pool2d(torch.relu(x), (3, 5), (2, 1), (1, 2), (2, 1), ceil_mode=True),
    "overlapping": lambda x: torch.max_pool2d(x.relu(), 3, 1),
    "by_name": lambda x: (
        torch.max_pool2d(input=torch.relu(input=x), kernel_size=2) + torch.add(input=1.0, other=2.0 * x[..., ::2, ::2])
    ),
    "largest_window": lambda x: F.max_pool2d(x, 16, 5, 8),
    "too_large_a_window": lambda x: F.max_pool2d(x, 17, 5, 8),
    "narrow": lambda x: F.max_pool2d(x[..., :2].relu(), 5, 1, 2),
    "indices_wanted": lambda x: F.max_unpool2d(*F.max_pool2d(x.relu(), 2, return_indices=True), 2),
    "means": lambda x: F.avg_pool2d(x.relu(), 2).mean() + F.adaptive_avg_pool2d(x.exp(), (3, 2)).mean(),
    "relu_of_view": lambda x: F.relu(x[:, :2]) * F.relu_(x[:, 2:]),
    "nan": lambda x: torch.nan_to_num((x - 3).log().relu() * x),
    "masks": lambda x: F.dropout(torch.where(x > 0, x, x.exp()).relu(), 0.5),
    "normalised": lambda x: F.conv2d(F.batch_norm(x.sin(), None, None, training=True).relu_(), KERNEL),
    "normalised_sum": lambda x: F.conv2d((x.sin() + F.batch_norm(x.sin(), None, None, training=True)).relu(), KERNEL),
    "activations": lambda x: LINEAR(F.gelu(LINEAR(F.silu(LINEAR(F.layer_norm(x[..., :8].exp(), (8,))))))),
    "autocast": lambda x: _autocast(x),
    "relu_out_of_checkpoint": lambda x: checkpoint(lambda y: LINEAR(y).relu(), x[..., :8], use_reentrant=False) ** 3,
}


def _autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = F.relu(F.layer_norm(LINEAR(x[..., :8].exp()), (8,)))
        return LINEAR(F.gelu(LINEAR(y))).float()


@pytest.mark.parametrize("name", OPERATIONS)
def test_same_to_the_bit(name: str) -> None:
    x = torch.randn(2, 4, 24, 26)
    found = []
    for settings in (None, Gist()):
        leaf = x.clone().requires_grad_()
        LINEAR.zero_grad()
        torch.manual_seed(1)
        loss, operations = run(settings, lambda leaf=leaf: OPERATIONS[name](leaf * 1).square().sum())  # type: ignore[misc]
        loss.backward()
        found.append([loss.detach(), leaf.grad, *(each.grad for each in LINEAR.parameters() if each.grad is not None)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_second_derivatives() -> None:
    x = torch.randn(2, 4, 8, 8)
    found = []
    for settings in (None, Gist()):
        leaf = x.clone().requires_grad_()
        loss, _ = run(settings, lambda leaf=leaf: F.max_pool2d(F.relu(leaf).square(), 2).square().sum() * leaf.mean())  # type: ignore[misc]
        (first,) = torch.autograd.grad(loss, leaf, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), leaf)[0])
    assert torch.equal(*found)


def test_changes_in_place_are_noticed() -> None:
    def change(x: Tensor) -> Tensor:
        y = (x * 1).relu()
        z = F.max_pool2d(y, 2)
        y.add_(1)
        return z.sum()

    for settings in (None, Gist()):
        loss, _ = run(settings, lambda: change(torch.randn(1, 1, 4, 4, requires_grad=True)))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


class _Change(torch.autograd.Function):
    """In place, where no function mode sees it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.add_(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def test_unseen_changes_are_noticed() -> None:
    for settings in (None, Gist()):
        loss, _ = run(settings, lambda: _Change.apply((torch.randn(64, requires_grad=True) * 1).relu()).sum())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_hooks_of_the_user_are_refused() -> None:
    def forward() -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return torch.ones(4, requires_grad=True).exp().sum()

    with pytest.raises(StepError, match="saved_tensors_hooks.*save_on_cpu.*activation_compression"):
        run(Gist(), forward)


@pytest.mark.parametrize(
    "wrong", [{"dpr": "fp4"}, {"dpr": True}, {"binarize": 1}, {"binarize": False, "rebuild": False}]
)
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(LayoutError, match="Gist"):
        Gist(**wrong)


def test_from_yaml() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Strategy, "strategy")
    given = {"class_path": "lnn_lightning.Gist", "init_args": {"dpr": "fp16"}}
    parsed = parser.parse_object(
        {"strategy": {"class_path": "lnn_lightning.PTDPStrategy", "init_args": {"activation_compression": given}}}
    )
    assert parser.instantiate_classes(parsed).strategy._activation_compression == Gist(dpr="fp16")
    with pytest.raises(LayoutError, match="activation_compression"):
        PTDPStrategy(activation_compression="gist")  # type: ignore[arg-type]
