"""Which optimizers may step on parts of parameters."""

import copy
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.optim.optimizer as optimizers
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from lnn_lightning.optim.elementwise import not_elementwise

Make = Callable[[Any], Optimizer]


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape)) for shape in ((16, 8), (8,), (5, 3, 2, 2), ())]


def matrices() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(16, 8))]


ELEMENTWISE: dict[str, Make] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "sgd momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: optim.Adam(p, amsgrad=True, weight_decay=0.1),
    "adam fused": lambda p: optim.Adam(p, fused=True),
    "adam foreach": lambda p: optim.Adam(p, foreach=True),
    "adam differentiable": lambda p: optim.Adam(p, differentiable=True),
    "adam capturable": lambda p: optim.Adam(p, lr=torch.tensor(1e-3), capturable=True),
    "adamw": lambda p: optim.AdamW(p, maximize=True),
    "adamax": optim.Adamax,
    "nadam": lambda p: optim.NAdam(p, decoupled_weight_decay=True, weight_decay=0.1),
    "radam": optim.RAdam,
    "adadelta": optim.Adadelta,
    "adagrad": lambda p: optim.Adagrad(p, lr_decay=0.1, initial_accumulator_value=0.1),
    "asgd": optim.ASGD,
    "rmsprop": lambda p: optim.RMSprop(p, centered=True, momentum=0.9),
    "rprop": optim.Rprop,
    "sparse adam": optim.SparseAdam,
}


class ByHand(Optimizer):
    """Some optimizers as found in repositories; `kind` is among the options of a group."""

    def __init__(self, params: Any, lr: float = 0.01, kind: str = "sgd", **options: Any) -> None:
        super().__init__(params, {"lr": lr, "kind": kind, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(getattr(self, group["kind"])(p, p.grad, group), alpha=-group["lr"])
        return loss

    def sgd(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        return grad

    def lars(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        return grad * (0.001 * p.norm() / (grad.norm() + 1e-8))

    def lars_of_matrices(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        return self.lars(p, grad, group) if p.dim() > 1 else grad

    def lamb(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[p]
        if not state:
            state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
        state["m"].lerp_(grad, 0.1)
        state["v"].lerp_(grad * grad, 0.01)
        update = state["m"] / (state["v"].sqrt() + 1e-6) + 0.01 * p
        return update * (p.norm().clamp(0, 10) / update.norm())

    def clipped(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        return grad / (grad.norm() / group["max_norm"]).clamp(min=1.0)

    def clipped_by_value(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        return grad.clamp(-0.5, 0.5)

    def centralized(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        return grad - grad.mean(dim=tuple(range(1, p.dim())), keepdim=True) if p.dim() > 1 else grad

    def centralized_columns(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        return grad - grad.mean(dim=0, keepdim=True) if p.dim() > 1 else grad

    def langevin(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        return grad + torch.randn_like(p)


class Lookahead(Optimizer):
    """Wraps another and shares its groups."""

    def __init__(self, base: Optimizer, k: int = 2) -> None:
        self.base, self.k, self.t = base, k, 0
        super().__init__(base.param_groups, base.defaults)
        self.param_groups = base.param_groups

    def step(self, closure: Any = None) -> Any:
        loss = self.base.step(closure)
        self.t += 1
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.detach().clone())
                if self.t % self.k == 0:
                    slow.lerp_(p.detach(), 0.5)
                    p.data.copy_(slow)
        return loss


class ClippedByAttribute(optim.SGD):
    """A required argument that is in no group, kept under another name; no closure."""

    def __init__(self, params: Any, threshold: float | None, rate: float = 0.1) -> None:
        super().__init__(params, lr=rate, momentum=0.5)
        self.settings = {"clip": threshold}

    def step(self) -> None:  # type: ignore[override]
        if self.settings["clip"] is not None:
            nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], self.settings["clip"])
        super().step()


class PresetState(Optimizer):
    """State made by the constructor, and an argument that it remembers."""

    def __init__(self, params: Any, beta: float) -> None:
        self._beta = beta
        super().__init__(params, {"lr": 0.1})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["m"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["m"].mul_(self._beta).add_(p.grad)
                p.add_(self.state[p]["m"], alpha=-group["lr"])


class Locked(optim.SGD):
    """Cannot be copied."""

    def __init__(self, params: Any, lr: float, gain: float = 1.0) -> None:
        super().__init__(params, lr=lr)
        self.lock = threading.Lock()


class NeedsTwo(optim.SGD):
    """Works on parameters of one shape only."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data -= 0.1 * p.grad @ torch.ones(8, 8, dtype=p.dtype)


ELEMENTWISE |= {
    "by hand": ByHand,
    "clipped by value": lambda p: ByHand(p, kind="clipped_by_value"),
    "lookahead": lambda p: Lookahead(optim.Adam(p)),
    "by attribute, off": lambda p: ClippedByAttribute(p, None),
    "preset state": lambda p: PresetState(p, 0.9),
    "lars, but on vectors": lambda p: ByHand([x for x in p if x.dim() < 2], kind="lars_of_matrices"),
}

NOT_TRAINED = ("sparse adam", "adam capturable", "adam differentiable", "by attribute, off")
"""Not in the test below: needs sparse gradients, a GPU, parameters that are no leaves; takes no closure."""

NOT_ELEMENTWISE: dict[str, Make] = {
    "adafactor": optim.Adafactor,
    "adafactor of vectors": lambda p: optim.Adafactor([x for x in p if x.dim() == 1]),
    "muon": lambda p: optim.Muon(matrices()),
    "lbfgs": optim.LBFGS,
    "lbfgs wolfe": lambda p: optim.LBFGS(p, line_search_fn="strong_wolfe"),
    "lars": lambda p: ByHand(p, kind="lars"),
    "lars of matrices": lambda p: ByHand(p, kind="lars_of_matrices"),
    "lamb": lambda p: ByHand(p, kind="lamb"),
    "clipped": lambda p: ByHand(p, kind="clipped", max_norm=1.0),
    "clipped high": lambda p: ByHand(p, kind="clipped", max_norm=100.0),
    "clipped low": lambda p: ByHand(p, kind="clipped", max_norm=1e-4),
    "centralized": lambda p: ByHand(p, kind="centralized"),
    "centralized columns": lambda p: ByHand(p, kind="centralized_columns"),
    "langevin": lambda p: ByHand(p, kind="langevin"),
    "lookahead of lars": lambda p: Lookahead(ByHand(p, kind="lars")),
    "by attribute": lambda p: ClippedByAttribute(p, 1.0),
    "one group of two": lambda p: ByHand(
        [{"params": p[:1]}, {"params": p[1:], "kind": "lars"}],
    ),
    "no rate yet": lambda p: ByHand(p, lr=0.0, kind="lars"),
}


def test_every_optimizer_of_torch_is_tried() -> None:
    classes = {value for value in vars(optim).values() if isinstance(value, type) and issubclass(value, Optimizer)}
    tried = {type(make(parameters())) for make in (*ELEMENTWISE.values(), *NOT_ELEMENTWISE.values())}
    assert classes - {Optimizer} <= tried


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise(name: str) -> None:
    assert not_elementwise(ELEMENTWISE[name](parameters())) is None


@pytest.mark.parametrize("name", NOT_ELEMENTWISE)
def test_not_elementwise(name: str) -> None:
    optimizer = NOT_ELEMENTWISE[name](parameters())
    reason = not_elementwise(optimizer)
    assert reason is not None and type(optimizer).__name__ in reason and "other numbers than on the whole" in reason


@pytest.mark.parametrize("make", [lambda p: Locked(p, 0.1), lambda p: NeedsTwo(p, lr=0.1)])
def test_could_not_be_tried(make: Make) -> None:
    optimizer = make(parameters())
    reason = not_elementwise(optimizer)
    assert reason is not None and type(optimizer).__name__ in reason and "could not be found out" in reason


def test_locked_is_constructed_where_its_arguments_are_known() -> None:
    optimizer = Locked(parameters(), 0.1)
    optimizer.gain = 1.0  # type: ignore[attr-defined]
    assert not_elementwise(optimizer) is None


def test_named_parameters_and_empty_groups() -> None:
    model = nn.Linear(3, 3)
    assert not_elementwise(optim.AdamW(model.named_parameters())) is None
    groups = [{"params": list(model.parameters())}, {"params": [], "kind": "lars"}]
    assert not_elementwise(ByHand(groups)) is not None
    assert not_elementwise(optim.SGD([{"params": []}], lr=0.1)) is None


def _train(optimizer: Optimizer, steps: int) -> None:
    for _ in range(steps):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = 0.1 * p.detach() + 1.0
        optimizer.step(lambda: torch.ones(()))


@pytest.mark.parametrize(
    "make",
    [*(make for name, make in ELEMENTWISE.items() if name not in NOT_TRAINED), optim.LBFGS],
)
def test_in_the_middle_of_training_nothing_changes(make: Make) -> None:
    """The twin that is not looked at ends where the other does, with the same state."""
    torch.manual_seed(0)
    values = [p for p in parameters() if p.dim()]
    results = []
    for looked_at in (False, True):
        own = [nn.Parameter(p.detach().clone()) for p in values]
        optimizer = make(own)
        scheduler = optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4) if not_lookahead(optimizer) else None
        calls: list[str] = []
        optimizer.register_step_pre_hook(lambda *_, c=calls: c.append("pre"))
        handle = optimizers.register_optimizer_step_post_hook(lambda *_, c=calls: c.append("post"))
        try:
            for _ in range(3):
                _train(optimizer, 1)
                if scheduler is not None:
                    scheduler.step()
                if looked_at:
                    before = [{**group, "params": 0} for group in optimizer.param_groups]
                    seen = len(calls)
                    not_elementwise(optimizer)
                    assert len(calls) == seen, "no hook is called"
                    assert before == [{**group, "params": 0} for group in optimizer.param_groups]
        finally:
            handle.remove()
        assert calls
        results.append((own, copy.deepcopy(optimizer.state_dict()["state"])))
    for p, q in zip(results[0][0], results[1][0], strict=True):
        assert torch.equal(p, q) and (p.grad is q.grad is None or torch.equal(p.grad, q.grad))
    for mine, expected in zip(results[1][1].values(), results[0][1].values(), strict=True):
        assert mine.keys() == expected.keys()
        for key, value in mine.items():
            if isinstance(value, Tensor):
                torch.testing.assert_close(value, expected[key], rtol=0, atol=0)


def not_lookahead(optimizer: Optimizer) -> bool:
    return not isinstance(optimizer, Lookahead)


def test_trained_optimizers_are_recognised() -> None:
    for name in ("adam", "adagrad", "lookahead", "sgd momentum"):
        optimizer = ELEMENTWISE[name](parameters())
        _train(optimizer, 2)
        assert not_elementwise(optimizer) is None
    for name in ("lamb", "adafactor", "lbfgs"):
        optimizer = NOT_ELEMENTWISE[name](parameters())
        _train(optimizer, 2)
        reason = not_elementwise(optimizer)
        assert reason is not None and "other numbers" in reason


def test_random_states_stay() -> None:
    optimizer = NOT_ELEMENTWISE["langevin"](parameters())
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    not_elementwise(optimizer)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1] and (np.random.get_state()[1] == before[2]).all()


def test_large_attributes_are_not_copied() -> None:
    optimizer = optim.SGD(parameters(), lr=0.1)
    optimizer.shadow = torch.zeros(1000).expand(2000, 1000)  # type: ignore[attr-defined]
    assert not_elementwise(optimizer) is None, "constructed anew"
