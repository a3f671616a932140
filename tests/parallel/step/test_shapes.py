"""Blocks whose shapes depend on data."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.pipeline.plans import unit_groups
from lnn_lightning.parallel.step.shapes import ShapeRule, own_object
from lnn_lightning.parallel.step.standin import replace_tensors, stand_in_for
from lnn_lightning.parallel.step.trace import TensorInfo, Trace, trace_step
from lnn_lightning.parallel.step.units import find_units

WIDTH = 4


class Routed(nn.Module):
    """Rows above zero go through one layer, the others through another."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.seen += 1
        out = torch.empty_like(x)
        chosen = (x.sum(-1) > 0).nonzero().squeeze(-1)
        rest = (x.sum(-1) <= 0).nonzero().squeeze(-1)
        out[chosen], out[rest] = self.up(x[chosen]), self.down(x[rest])
        return self.give(x, out, chosen)

    def give(self, x: Tensor, out: Tensor, chosen: Tensor) -> Any:
        return out


class Net(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([block() for _ in range(2)])
        self.head = nn.Linear(WIDTH, 2)

    def step(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).sum()


def follow(net: Net, batch: Any, rules: dict[str, ShapeRule] | None = None, step: Any = None) -> Trace:
    groups = unit_groups(net, find_units(net))
    return trace_step(
        net,
        groups,
        step or net.step,
        batch,
        lambda on_value: nullcontext(),
        rules if rules is not None else {},
        FakeTensorMode(allow_non_fake_inputs=True),
    )


def test_a_routing_block_learns_its_output() -> None:
    net = Net(Routed)
    rules: dict[str, ShapeRule] = {}
    values = {name: value.clone() for name, value in net.state_dict().items()}
    state = torch.get_rng_state()
    torch.manual_seed(0)
    trace = follow(net, torch.randn(6, WIDTH), rules)
    torch.set_rng_state(state)
    assert trace.tail_error is None
    assert trace.names == ("embed", "blocks.0", "blocks.1", "head")
    for call in trace.calls[1:3]:
        assert call.outputs == [TensorInfo((6, WIDTH), torch.float32, True)]
        assert call.flops == 2 * 6 * 2 * (WIDTH * WIDTH + WIDTH)
        assert call.random, "it may draw numbers"
    assert trace.calls[2].needs == {(1, 0)}
    assert set(rules) == {"blocks.0", "blocks.1"}
    assert all(torch.equal(value, values[name]) for name, value in net.state_dict().items()), "buffers are put back"
    assert all(parameter.grad is None for parameter in net.parameters())


def test_what_was_learnt_serves_other_batches() -> None:
    net = Net(Routed)
    rules: dict[str, ShapeRule] = {}
    follow(net, torch.randn(6, WIDTH), rules)
    learnt = dict(rules)
    trace = follow(net, torch.randn(2, WIDTH).double(), rules, lambda x: net.step(x.float()))
    assert rules == learnt
    assert trace.calls[1].outputs == [TensorInfo((2, WIDTH), torch.float32, True)]
    with torch.no_grad():
        trace = follow(net, torch.randn(5, WIDTH), rules)
    assert trace.calls[1].outputs == [TensorInfo((5, WIDTH), torch.float32, False)]


class GivesMore(Routed):
    """With a loss for the balance and how many rows were chosen, as a tensor and not."""

    def give(self, x: Tensor, out: Tensor, chosen: Tensor) -> Any:
        return {"x": out, "balance": out.mean(), "kind": "routed", "none": None, "same": x}


def test_scalars_and_plain_values() -> None:
    net = Net(GivesMore)

    def step(x: Tensor) -> Tensor:
        first = net.blocks[0](net.embed(x))
        assert first["kind"] == "routed"
        assert first["none"] is None
        assert isinstance(first["x"], FakeTensor)
        return net.head(first["x"]).sum() + first["balance"]

    trace = follow(net, torch.randn(6, WIDTH), step=step)
    assert trace.tail_error is None
    x, balance, kind, none, _ = trace.calls[1].outputs
    assert x == TensorInfo((6, WIDTH), torch.float32, True)
    assert balance == TensorInfo((), torch.float32, True)
    assert (kind, none) == ("routed", None)
    assert trace.tail == {(1, 1), (2, 0)}


class GivesRows(Routed):
    """How many rows come out is not known before it runs."""

    def give(self, x: Tensor, out: Tensor, chosen: Tensor) -> Any:
        return out.repeat(2, 1)[: 2 * len(x) - 1]


def test_an_unknown_shape_is_refused_by_name() -> None:
    with pytest.raises(StepError) as caught:
        follow(Net(GivesRows), torch.randn(6, WIDTH))
    text = str(caught.value)
    assert "'blocks.0' depends on data" in text
    assert "shape (11, 4)" in text


class Broken(Routed):
    def give(self, x: Tensor, out: Tensor, chosen: Tensor) -> Any:
        raise ValueError("out of range")


def test_a_block_that_fails_on_made_up_values_too() -> None:
    with pytest.raises(StepError) as caught:
        follow(Net(Broken), torch.randn(6, WIDTH))
    text = str(caught.value)
    assert "'blocks.0' (Broken)" in text
    assert "DynamicOutputShapeException" in text
    assert "ValueError: out of range" in text
    assert "split_points" in text


def test_a_block_that_is_not_here_is_taken_to_keep_the_shape() -> None:
    net = Net(Routed)
    replace_tensors(net.blocks[1], lambda name, tensor: stand_in_for(tensor))
    trace = follow(net, torch.randn(6, WIDTH))
    assert trace.calls[2].outputs == [TensorInfo((6, WIDTH), torch.float32, True)]


class Cache:
    def __init__(self) -> None:
        self.keys: list[Tensor] = []


class Caching(Routed):
    """Writes into an object it is given before it fails on fake values."""

    def forward(self, x: Tensor, cache: Cache) -> Any:  # type: ignore[override]
        cache.keys.append(x)
        keys = torch.stack(cache.keys)
        assert len(cache.keys) <= 2
        return super().forward(x) + keys.mean(0)


def test_a_cache_is_not_written_to_twice() -> None:
    net = Net(Caching)

    def step(x: Tensor) -> Tensor:
        cache = Cache()
        h = net.embed(x)
        for block in net.blocks:
            h = block(h, cache)
        return net.head(h).sum()

    trace = follow(net, torch.randn(6, WIDTH), step=step)
    assert trace.tail_error is None
    assert trace.names == ("embed", "blocks.0", "blocks.1", "head")


def test_own_object_copies_objects_and_keeps_tensors() -> None:
    cache = Cache()
    x, module = torch.ones(2), nn.Linear(1, 1)
    cache.keys.append(x)
    copy, same_tensor, same_module, same_function = own_object([cache, x, module, torch.relu])
    copy.keys.append(x)
    assert cache.keys == [x]
    assert type(copy) is Cache
    assert copy.keys[0] is x
    assert same_tensor is x
    assert same_module is module
    assert same_function is torch.relu
