"""Given gradients through DDP and a way of compression: what arrives, what it took, and what is kept."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lnn_lightning.communication import Compression, attach

SHAPES = {"matrix": (31, 17), "conv": (6, 4, 3, 3), "vector": (23,), "wide": (9, 70), "scalar": ()}


@dataclass(frozen=True)
class Plan:
    """A run.

    `scales`: loss scale of each step. `spoilt`: (step, rank, name): an infinite gradient. `unused`: (step, name): on no
    rank; `unused_here`: (step, rank, name). `begin_anew`: a step before which state goes through a checkpoint.
    """

    compression: Compression
    steps: int = 10
    dtype: torch.dtype = torch.float64
    scales: tuple[float, ...] = ()
    spoilt: tuple[int, int, str] | None = None
    unused: tuple[int, str] | None = None
    unused_here: tuple[int, int, str] | None = None
    begin_anew: int | None = None


@dataclass
class Outcome:
    """Of a rank: gradients that arrived, by step; bytes that collectives were given, and that were counted."""

    arrived: list[dict[str, Tensor]] = field(default_factory=list)
    bytes: int = 0
    counted: int = 0
    plain: int = 0
    error_norm: float | None = None


def gradient(step: int, rank: int, name: str, dtype: torch.dtype) -> Tensor:
    """Of a parameter, before any scale: not even in size, and with rows of zeros."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + list(SHAPES).index(name))
    drawn = torch.randn(SHAPES[name], generator=generator, dtype=torch.float64)
    drawn = drawn * torch.rand(SHAPES[name], generator=generator, dtype=torch.float64) ** 4 * 10.0 ** (-len(name) % 3)
    if name == "wide":
        drawn[step % 9] = 0
    return drawn.to(dtype)


class _Given(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.held = nn.ParameterDict({name: nn.Parameter(torch.zeros(s, dtype=dtype)) for name, s in SHAPES.items()})

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        return torch.stack([(self.held[name] * each).sum() for name, each in gradients.items()]).sum()


def _counting(outcome: Outcome) -> Callable[[], None]:
    """Counts what collectives are given, wherever they are called from."""
    before = {}
    for name, place in (
        ("all_reduce", 0),
        ("all_gather_single", 1),
        ("all_to_all_single", 1),
        ("reduce_scatter_single", 1),
    ):
        original = before[name] = getattr(dist, name)

        def counted(*args: Any, _original: Any = original, _place: int = place, **kwargs: Any) -> Any:
            outcome.bytes += args[_place].numel() * args[_place].element_size()
            return _original(*args, **kwargs)

        setattr(dist, name, counted)

    def put_back() -> None:
        for name, original in before.items():
            setattr(dist, name, original)

    return put_back


def send(rank: int, world_size: int, plans: list[Plan]) -> list[Outcome]:
    """Runs plans; buckets are small, and built anew behind the first step."""
    return [_send(rank, plan) for plan in plans]


def _send(rank: int, plan: Plan) -> Outcome:
    outcome = Outcome()
    model = _Given(plan.dtype)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.004, find_unused_parameters=plan.unused is not None)
    compressors = attach(ddp, plan.compression, seed=5)
    put_back = _counting(outcome)
    for step in range(plan.steps):
        if step == plan.begin_anew:
            put_back()
            state = compressors.state_dict()
            kept = {place: {key: _copy(value) for key, value in each.items()} for place, each in state.items()}
            ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
            compressors = attach(ddp, plan.compression, seed=5)
            compressors.load_state_dict(kept)
            outcome.bytes = 0  # it counts from here on
            put_back = _counting(outcome)
        given = {name: gradient(step, rank, name, plan.dtype) for name in SHAPES if plan.unused != (step, name)}
        if plan.unused_here is not None and plan.unused_here[:2] == (step, rank):
            given[plan.unused_here[2]].zero_()
        if plan.spoilt is not None and plan.spoilt[:2] == (step, rank):
            given[plan.spoilt[2]].view(-1)[1] = torch.inf
        scale = plan.scales[step] if plan.scales else 1.0
        compressors.scaled(scale)
        model.zero_grad()
        (ddp(given) * scale).backward()
        grads = {name: parameter.grad for name, parameter in model.held.items()}
        outcome.arrived.append({name: g.clone() / scale for name, g in grads.items() if g is not None})
    put_back()
    (compressor,) = compressors.by_place.values()
    outcome.counted, outcome.plain = compressor.traffic.payload, compressor.traffic.plain
    norm = compressor.error_norm()
    outcome.error_norm = None if norm is None else float(norm)
    return outcome


def _copy(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


Simulation = Callable[[int, dict[str, list[Tensor]]], dict[str, Tensor]]
"""Of a step: gradients of all ranks by parameter -> what arrives by parameter."""


def check(results: list[list[Outcome]], index: int, plan: Plan, simulate: Simulation, tolerance: float = 1e-6) -> None:
    """Compares what arrived on all ranks with a simulation in one process, and the bytes with what was counted."""
    ranks = len(results)
    for step in range(plan.steps):
        own = {name: [gradient(step, rank, name, plan.dtype) for rank in range(ranks)] for name in SHAPES}
        if plan.unused_here is not None and plan.unused_here[0] == step:
            own[plan.unused_here[2]][plan.unused_here[1]].zero_()
        expected = simulate(step, own)
        for name, value in expected.items():
            for rank in range(ranks):
                arrived = results[rank][index].arrived[step][name]
                error = (arrived - value).abs().max() / value.abs().max().clamp_min(1e-30)
                assert error <= tolerance, (step, name, rank, float(error))
                assert torch.equal(arrived, results[0][index].arrived[step][name])
    for outcome in (result[index] for result in results):
        assert outcome.bytes == outcome.counted > 0
