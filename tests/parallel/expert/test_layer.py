"""The layer of experts against a loop over tokens; on two ranks against one; without data."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.expert.axis import ExpertAxis
from lnn_lightning.parallel.expert.layer import MoELayer
from lnn_lightning.parallel.expert.router import Router
from lnn_lightning.parallel.step.standin import is_stand_in, replace_tensors, stand_in_for
from lnn_lightning.parallel.step.units import find_units
from lnn_lightning.parallel.tensor.axis import Spec, TensorAxis
from lnn_lightning.parallel.tensor.sharded import is_sharded, wrap
from tests.helpers.ranks import RanksFailed, run_ranks
from tests.parallel.expert.upcycled import FeedForward

EXPERTS, WIDTH, TOKENS = 5, 8, 12


def build(gate: Any = "top_k", k: int = 2, capacity_factor: float | None = None) -> MoELayer:
    torch.manual_seed(2)
    router = Router(WIDTH, EXPERTS, gate, k, capacity_factor, std=0.5)
    return MoELayer(router, [FeedForward(WIDTH) for _ in range(EXPERTS)]).double()


def tokens(seed: int = 4) -> Tensor:
    return torch.randn(2, TOKENS // 2, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def in_a_loop(layer: MoELayer, hidden: Tensor) -> Tensor:
    """Token by token, choice by choice."""
    flat = hidden.flatten(0, 1)
    routing = layer.router(flat)
    rows = []
    for token, experts, weights in zip(flat, routing.expert.tolist(), routing.weights, strict=True):
        parts = [weight * layer.experts[e](token, 2.0) for e, weight in zip(experts, weights, strict=True) if e >= 0]
        rows.append(torch.stack(parts).sum(0) if parts else torch.zeros_like(token))
    return torch.stack(rows).view_as(hidden)


@pytest.mark.parametrize(
    ("gate", "k", "capacity_factor"),
    [("top_k", 2, None), ("top_k", 1, None), ("switch", 1, 0.5), ("expert_choice", 2, 1.0), ("top_k", 3, 0.6)],
)
def test_layer_is_a_loop_over_tokens(gate: Any, k: int, capacity_factor: float | None) -> None:
    layer = build(gate, k, capacity_factor)
    results = []
    for run in (lambda x: layer(x, scale=2.0), lambda x: in_a_loop(layer, x)):
        layer.zero_grad()
        hidden = tokens().requires_grad_()
        out = run(hidden)
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
        results.append([out, hidden.grad, *(parameter.grad for parameter in layer.parameters())])
    for ours, theirs in zip(*results, strict=True):
        assert (ours is None) == (theirs is None), "an expert without tokens has no gradient"
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def _on_a_rank(rank: int, world_size: int, wrong: str) -> dict[str, Any]:
    layer = build()
    axis = layer.axis = ExpertAxis(world_size, rank, dist.group.WORLD, scale=1 / world_size)
    for index, expert in enumerate(layer.experts):
        if index not in axis.span(EXPERTS):
            replace_tensors(expert, lambda _, tensor: stand_in_for(tensor))
    hidden = tokens(rank).requires_grad_()
    if wrong == "nan" and rank == 1:
        with torch.no_grad():
            layer.router.weight[0, 0] = torch.nan
    out = layer(hidden, 2.0)
    (out.square().sum() / 2).backward()
    grads = {
        n: p.grad * world_size for n, p in layer.experts.named_parameters() if not is_stand_in(p) and p.grad is not None
    }
    # all tokens to expert 0: the second rank has no rows, and must still answer in the dtype of the first
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[0], layer.router.k = 1.0, 1
    layer.float()
    with torch.autocast("cpu", torch.bfloat16):
        low = layer(torch.ones(1, 3, WIDTH))
    return {"out": out.detach(), "hidden": hidden.grad, "experts": grads, "dtype": low.dtype}


def test_two_ranks_are_one() -> None:
    results = run_ranks(_on_a_rank, 2, "")
    layer = build()
    outs, gradients = [], []
    for rank in range(2):
        hidden = tokens(rank).requires_grad_()
        outs.append(layer(hidden, 2.0))
        (outs[-1].square().sum() / 2).backward()
        gradients.append(hidden.grad)
    found = results[0]["experts"] | results[1]["experts"]
    wanted = {name: p.grad for name, p in layer.experts.named_parameters() if p.grad is not None}
    assert set(found) == set(wanted) and results[0]["experts"].keys().isdisjoint(results[1]["experts"])
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-9)
    for result, out, gradient in zip(results, outs, gradients, strict=True):
        torch.testing.assert_close(result["out"], out.detach(), rtol=0, atol=1e-12)
        torch.testing.assert_close(result["hidden"], gradient, rtol=0, atol=1e-9)
        assert result["dtype"] == torch.bfloat16


def test_router_that_is_not_finite_stops_all_ranks() -> None:
    with pytest.raises(RanksFailed) as failure:
        run_ranks(_on_a_rank, 2, "nan")
    for text in failure.value.tracebacks.values():
        assert "numbers that are not finite" in text and "z_loss" in text


def test_values_without_data() -> None:
    layer = build()
    flops = 2 * TOKENS * WIDTH * (EXPERTS + 2 * 2 * 3 * WIDTH)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, FlopCounterMode(display=False) as counter:
        fake = mode.from_tensor(tokens().requires_grad_())
        out = layer(fake, scale=2.0)
    assert out.shape == fake.shape and out.requires_grad and counter.get_total_flops() == flops
    assert layer(tokens().to("meta")).shape == fake.shape
    part = wrap(torch.empty(2, TOKENS // 2, WIDTH // 2, device="meta"), Spec(2, (WIDTH,)), TensorAxis(2, 0))
    whole = layer(part)
    assert not is_sharded(whole) and whole.shape == fake.shape


def test_experts_are_no_trunk() -> None:
    model = nn.ModuleDict({"first": nn.Linear(WIDTH, WIDTH), "layer": build()})
    assert find_units(model, 4).names == ("first", "layer")


class Two(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x, x


@pytest.mark.parametrize(
    ("experts", "given", "message"),
    [
        (FeedForward, (torch.zeros(3, WIDTH), torch.zeros(1)), "called with 2 tensors"),
        (Two, (torch.zeros(3, WIDTH),), r"An expert \(Two\) was given tokens of shape \(\d, 8\) and returned tuple"),
        (lambda: nn.Linear(WIDTH, 2), (torch.zeros(3, WIDTH),), r"returned a tensor of shape \(\d, 2\)"),
    ],
)
def test_what_cannot_be_an_expert(experts: Any, given: Any, message: str) -> None:
    layer = MoELayer(Router(WIDTH, 2, k=1), [experts(), experts()])
    with pytest.raises(StepError, match=message):
        layer(*given)


class Normed(nn.Module):
    """Counts its calls, draws numbers, and keeps statistics of its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.calls = nn.BatchNorm1d(WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return F.dropout(self.norm(x), 0.5, self.training)


def test_experts_without_tokens_leave_nothing_behind() -> None:
    layer = MoELayer(Router(WIDTH, 2, k=1), [Normed(), Normed()])
    before, random = {name: value.clone() for name, value in layer.state_dict().items()}, torch.get_rng_state()
    rows = layer._compute(lambda expert, rows: expert(rows), torch.zeros(0, WIDTH), [0, 0])
    assert rows.shape == (0, WIDTH) and torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    assert [expert.calls for expert in layer.experts] == [0, 0]
