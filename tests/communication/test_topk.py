"""Deep Gradient Compression against the paper's algorithm in one process."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lnn_lightning.communication import TopK
from lnn_lightning.parallel.errors import LayoutError
from tests.communication.given import SHAPES, Plan, Simulation, check, gradient, send
from tests.helpers.ranks import run_ranks

PLAIN = TopK(density=0.05, min_size=30)
DEEP = TopK(density=0.02, momentum=0.9, warmup_steps=6, clip=3.0, start_step=2, min_size=30)


def algorithm(settings: TopK, ranks: int) -> Simulation:
    """Algorithm 4 of Lin et al., for every rank in turn; plain momentum where gradients are averaged exactly."""
    velocity = {
        (name, rank): torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items() for rank in range(ranks)
    }
    waiting = {key: value.clone() for key, value in velocity.items()}

    def step(number: int, own: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        result = {}
        for name, gradients in own.items():
            if number < settings.start_step or gradients[0].numel() < settings.min_size:
                mean = sum(gradients).double() / ranks  # type: ignore[union-attr]
                for rank in range(ranks):
                    velocity[name, rank] = settings.momentum * velocity[name, rank] + mean
                result[name] = velocity[name, 0]
                continue
            density = settings.density
            if number - settings.start_step < settings.warmup_steps:
                phases = math.ceil(math.log(density) / math.log(0.25))
                phase = (number - settings.start_step) * phases // settings.warmup_steps
                density = max(density, 0.25 ** (phase + 1))
            total = torch.zeros_like(gradients[0], dtype=torch.float64).reshape(-1)
            for rank, g in enumerate(gradients):
                g = g.double()
                if settings.clip is not None and g.norm() > settings.clip / math.sqrt(ranks):
                    g = g * (settings.clip / math.sqrt(ranks) / g.norm())
                key = name, rank
                if not g.any():
                    continue
                velocity[key] = settings.momentum * velocity[key] + g
                waiting[key] = waiting[key] + velocity[key]
                flat = waiting[key].reshape(-1)
                count = max(1, math.ceil(density * flat.numel()))
                largest = sorted(range(flat.numel()), key=lambda i, v=flat: -abs(float(v[i])))[:count]
                total[largest] += flat[largest]
                for kept in (waiting, velocity):
                    changed = kept[key].reshape(-1).clone()
                    changed[largest] = 0
                    kept[key] = changed.view_as(g)
            result[name] = (total / ranks).view_as(gradients[0])
        return result  # type: ignore[return-value]

    return step


PLANS = [
    Plan(PLAIN, steps=12),
    Plan(DEEP, steps=12),
    Plan(PLAIN, steps=12, unused_here=(4, 1, "matrix")),
    Plan(DEEP, steps=12, scales=tuple(2.0 ** (step % 5) for step in range(12))),
    Plan(DEEP, steps=12, begin_anew=5),
    Plan(PLAIN, steps=6, spoilt=(2, 1, "matrix")),
    Plan(DEEP, steps=10, dtype=torch.float32),
    Plan(PLAIN, steps=6, unused=(3, "conv")),
    Plan(DEEP, steps=8, spoilt=(3, 1, "vector")),
    Plan(DEEP, steps=8, unused=(4, "vector")),
]


@pytest.mark.parametrize("ranks", [2, 3])
def test_algorithm(ranks: int) -> None:
    results = run_ranks(send, ranks, PLANS)
    for index in (0, 1, 2, 3, 4):
        plan = PLANS[index]
        check(results, index, plan, algorithm(plan.compression, ranks))  # type: ignore[arg-type]
    check(results, 6, PLANS[6], algorithm(DEEP, ranks), 1e-4)
    for result in results:
        for a, b in zip(result[4].arrived, result[1].arrived, strict=True):
            assert all(torch.equal(a[name], b[name]) for name in SHAPES)
    # values in fp64 and places in int32, of those that are compressed
    sizes = {name: math.prod(shape) for name, shape in SHAPES.items()}
    sent = sum(math.ceil(0.05 * size) * 12 if size >= 30 else size * 8 for size in sizes.values())
    assert results[0][0].counted == 12 * sent
    assert results[0][0].plain == 12 * 8 * sum(sizes.values())


def test_what_is_not_finite_arrives_and_is_not_kept() -> None:
    results = run_ranks(send, 2, PLANS[5:6])
    without = algorithm(PLAIN, 2)
    for step in range(6):
        own = {name: [gradient(step, rank, name, torch.float64) for rank in range(2)] for name in SHAPES}
        if step == 2:
            for rank in range(2):
                assert not results[rank][0].arrived[step]["matrix"].isfinite().all()
            own["matrix"] = [torch.zeros(SHAPES["matrix"], dtype=torch.float64)] * 2  # the step is skipped
        expected = without(step, own)
        if step != 2:
            torch.testing.assert_close(results[1][0].arrived[step], expected, rtol=1e-9, atol=1e-12)


def test_what_no_rank_has_used_waits() -> None:
    """DDP throws away what arrives for it."""
    results = run_ranks(send, 2, PLANS[7:8])
    simulate = algorithm(PLAIN, 2)
    for step in range(6):
        own = {name: [gradient(step, rank, name, torch.float64) for rank in range(2)] for name in SHAPES}
        if step == 3:
            own["conv"] = [torch.zeros(SHAPES["conv"], dtype=torch.float64)] * 2
        expected = simulate(step, own)
        arrived = results[0][0].arrived[step]
        torch.testing.assert_close(arrived, {name: expected[name] for name in arrived}, rtol=1e-9, atol=1e-12)


def test_momentum_of_what_is_averaged_exactly_waits_too() -> None:
    """A skipped step and one without the parameter: its velocity stays as it was."""
    results = run_ranks(send, 2, PLANS[8:10])
    for index, lost in ((0, 3), (1, 4)):
        velocity = torch.zeros(SHAPES["vector"], dtype=torch.float64)
        for step in range(8):
            for rank in range(2):
                arrived = results[rank][index].arrived[step].get("vector")
                if step == lost:
                    assert arrived is None or not arrived.any() if index else not arrived.isfinite().all()
                    continue
                mean = sum(gradient(step, r, "vector", torch.float64) for r in range(2)) / 2
                expected = 0.9 * velocity + mean
                torch.testing.assert_close(arrived, expected, rtol=1e-9, atol=1e-12)
            if step != lost:
                velocity = expected


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"density": 0.0}, "density"),
        ({"density": 1.5}, "density"),
        ({"momentum": 1.0}, "momentum"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"clip": 0.0}, "clip"),
        ({"density": "0.1"}, "density"),
        ({"momentum": "0.9"}, "momentum"),
        ({"warmup_steps": 1.5}, "warmup_steps"),
        ({"clip": "1"}, "clip"),
    ],
)
def test_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(LayoutError, match=named):
        TopK(**settings)


def test_density_comes_down() -> None:
    settings = replace(TopK(density=0.001), warmup_steps=5)
    densities = [settings.density_at(step) for step in range(6)]
    assert densities == [0.25, 0.0625, 0.25**3, 0.25**4, 0.001, 0.001]


def test_two_momentums_are_told() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    with_own = torch.optim.SGD([parameter], 0.1, momentum=0.9), torch.optim.Adam([parameter])
    assert all("twice" in (TopK(momentum=0.9).advice(each) or "") for each in with_own)
    assert TopK(momentum=0.9).advice(torch.optim.SGD([parameter], 0.1)) is None
    assert TopK().advice(with_own[0]) is None
