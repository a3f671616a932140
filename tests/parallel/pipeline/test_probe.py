"""What a loss is of the losses of the parts of its batch."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lnn_lightning.parallel.pipeline.plans import PlanBook
from lnn_lightning.parallel.pipeline.probe import find_loss_form
from lnn_lightning.parallel.step.observer import StepObserver
from lnn_lightning.parallel.step.run import StepRunner
from lnn_lightning.parallel.step.units import find_units

FEATURES, CLASSES = 6, 4


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()) for _ in range(3)])
        self.norm = nn.BatchNorm1d(FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = F.dropout(block(x), self.dropout)
        return self.head(self.norm(x))


def batch(size: int = 8) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(0)
    y = torch.randint(0, CLASSES, (size,), generator=rng)
    labels = y.clone()
    labels[[0, 1, 2]] = -100
    return {
        "x": torch.randn(size, FEATURES, generator=rng),
        "y": y,
        "labels": labels,
        "target": torch.randn(size, CLASSES, generator=rng),
        "n": torch.tensor(float(size)),
    }


def form(step: Callable[[Any, Any], Any], data: Any = None, **options: Any) -> str:
    torch.manual_seed(0)
    net = Net(**options)
    units = find_units(net)
    book = PlanBook(net, units, 2, StepObserver())
    runner = StepRunner({name: net.get_submodule(name) for name in book.groups})
    before = {name: value.clone() for name, value in net.state_dict().items()}
    state = torch.get_rng_state()
    found = find_loss_form(
        book, runner, StepObserver(), lambda part: step(net, part), batch() if data is None else data
    )
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all("_call_impl" not in vars(module) for module in net.modules())
    return found


def contrastive(net: Any, part: Any) -> Tensor:
    """Every sample against all others of the batch (SimCLR, CLIP)."""
    z = F.normalize(net(part["x"]), dim=-1)
    return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)))


def masked_mean(net: Any, part: Any) -> Tensor:
    mask = (part["labels"] >= 0).float()
    losses = F.cross_entropy(net(part["x"]), part["labels"].clamp(min=0), reduction="none")
    return (losses * mask).sum() / mask.sum()


STEPS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "cross entropy": (lambda net, part: F.cross_entropy(net(part["x"]), part["y"]), "mean"),
    "mean squares": (lambda net, part: F.mse_loss(net(part["x"]), part["target"]), "mean"),
    "dict": (lambda net, part: {"loss": F.mse_loss(net(part["x"]), part["target"]), "more": part["x"]}, "mean"),
    "with a penalty": (
        lambda net, part: F.mse_loss(net(part["x"]), part["target"]) + 0.1 * net.head.weight.pow(2).sum(),
        "mean",
    ),
    "two means": (
        lambda net, part: F.cross_entropy(net(part["x"]), part["y"]) + net(part["x"]).pow(2).mean(),
        "mean",
    ),
    "sum over size": (
        lambda net, part: (net(part["x"]) - part["target"]).pow(2).sum() / part["x"].size(0),
        "mean",
    ),
    "ignored targets": (lambda net, part: F.cross_entropy(net(part["x"]), part["labels"]), "mean"),
    "ignored, weighted": (
        lambda net, part: F.cross_entropy(net(part["x"]), part["labels"], weight=torch.linspace(0.5, 2, CLASSES)),
        "mean",
    ),
    "sum": (lambda net, part: F.mse_loss(net(part["x"]), part["target"], reduction="sum"), "sum"),
    "sum of cross entropies": (lambda net, part: F.cross_entropy(net(part["x"]), part["y"], reduction="sum"), "sum"),
    "sum by a constant": (lambda net, part: (net(part["x"]) - part["target"]).pow(2).sum() / 32, "sum"),
    "contrastive": (contrastive, "other"),
    "masked by hand": (masked_mean, "other"),
    "root of a mean": (lambda net, part: F.mse_loss(net(part["x"]), part["target"]).sqrt(), "other"),
    "mean and sum": (
        lambda net, part: F.mse_loss(net(part["x"]), part["target"]) + net(part["x"]).pow(2).sum(),
        "other",
    ),
    "focal": (lambda net, part: (1 - (-F.cross_entropy(net(part["x"]), part["y"])).exp()) ** 2, "other"),
    "variance": (lambda net, part: -net(part["x"]).var(dim=0).sum(), "other"),
    "python in the tail": (lambda net, part: net(part["x"]).sum() * float(net(part["x"]).sum().detach()), "other"),
}


@pytest.mark.parametrize("name", STEPS)
def test_forms(name: str) -> None:
    step, expected = STEPS[name]
    assert form(step) == expected


@pytest.mark.parametrize("name", ["cross entropy", "sum"])
def test_with_chance_in_glue(name: str) -> None:
    step, expected = STEPS[name]
    assert form(step, dropout=0.1) == expected


def test_an_odd_last_sample_is_left_out() -> None:
    assert form(STEPS["cross entropy"][0], batch(7)) == "mean"
    assert form(STEPS["sum"][0], batch(7)) == "sum"


@pytest.mark.parametrize("size", [1, 0])
def test_too_few_samples_say_nothing(size: int) -> None:
    data = {"x": torch.randn(size, FEATURES), "y": torch.zeros(size, dtype=torch.long)}
    assert form(STEPS["cross entropy"][0], data) == "unknown"


def test_no_batch_dimension_says_nothing() -> None:
    assert form(lambda net, part: net(torch.ones(2, FEATURES)).sum() * part["n"], {"n": torch.tensor(1.0)}) == "unknown"


def test_an_error_says_nothing() -> None:
    def step(net: Any, part: Any) -> Tensor:
        loss = F.cross_entropy(net(part["x"]), part["y"])
        raise ValueError(f"after {loss}")

    assert form(step) == "unknown"


def test_a_nan_says_nothing() -> None:
    assert form(lambda net, part: net(part["x"]).mean() * float("nan")) == "unknown"


def test_the_answer_does_not_depend_on_the_random_state() -> None:
    for seed in range(3):
        random.seed(seed)
        assert form(STEPS["sum"][0]) == "sum"
