"""What the traced step knows of calls and of the values between them."""

import random
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.pipeline.plans import PlanBook, unit_groups
from lnn_lightning.parallel.step.observer import StepObserver
from lnn_lightning.parallel.step.trace import HIDDEN, TensorInfo, Trace, trace_step
from lnn_lightning.parallel.step.units import find_units
from tests.zoo import ZOO

WIDTH, SIZE = 4, 3


def follow(root: nn.Module, step: Callable[[Any], Any], batch: Any, logged: list[Any] | None = None) -> Trace:
    """The trace of a step; `logged`: what the step shows while it runs is appended by `root.show(value)`."""

    @contextmanager
    def watch(on_value: Callable[[Any], None]) -> Any:
        root.__dict__["show"] = on_value
        yield

    groups = unit_groups(root, find_units(root))
    return trace_step(root, groups, step, batch, watch, {}, FakeTensorMode(allow_non_fake_inputs=True))


class Net(nn.Module):
    """`embed`, three blocks and a `head`, to be used in steps of all kinds."""

    def __init__(self, block: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([(block or Block)() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 2)
        self.scale = nn.Parameter(torch.ones(()))

    def through(self, h: Any) -> Any:
        for block in self.blocks:
            h = block(h)
        return h


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.fc(x))


def inputs() -> Tensor:
    return torch.randn(SIZE, WIDTH)


# ------------------------------------------------------------------------------------------------ calls


def test_calls_in_order_with_outputs_needs_and_parameters() -> None:
    net = Net()
    trace = follow(net, lambda x: net.head(net.through(net.embed(x))).sum(), inputs())
    assert trace.names == ("embed", "blocks.0", "blocks.1", "blocks.2", "head")
    assert [call.index for call in trace.calls] == list(range(5))
    assert [call.group for call in trace.calls] == list(trace.names)
    assert [call.needs for call in trace.calls] == [frozenset({(i - 1, 0)} if i else ()) for i in range(5)]
    shapes = [(SIZE, WIDTH)] * 4 + [(SIZE, 2)]
    assert [call.outputs for call in trace.calls] == [[TensorInfo(s, torch.float32, True)] for s in shapes]
    for call in trace.calls:
        names = {name for name, _ in net.named_parameters() if name.startswith(call.unit + ".")}
        assert call.parameters == names
        assert not call.glue_parameters
        assert not call.random
        assert not call.aliases
    assert trace.tail == {(4, 0)}
    assert not trace.tail_parameters
    assert not trace.everywhere
    assert not trace.mutated
    assert not trace.glue_random
    assert not trace.mutates_batch
    assert trace.losses == []
    assert trace.tail_error is None


def test_a_unit_called_twice_is_two_calls_and_what_is_inside_is_none() -> None:
    net = Net()
    trace = follow(net, lambda x: net.blocks[0](net.blocks[0](x)).sum(), inputs())
    assert trace.names == ("blocks.0", "blocks.0")
    assert trace.calls[1].needs == {(0, 0)}


def test_parts_of_a_block_called_from_glue_belong_to_its_group() -> None:
    net = Net()
    trace = follow(net, lambda x: net.blocks[1].fc(net.blocks[0](x)).sum(), inputs())
    assert trace.names == ("blocks.0", "blocks.1.fc")
    assert [call.group for call in trace.calls] == ["blocks.0", "blocks.1"]


def test_needs_go_through_glue() -> None:
    net = Net()

    def step(x: Tensor) -> Tensor:
        first = net.embed(x)
        second = net.blocks[0](x * 2)
        both = torch.cat([first, second], dim=1).view(-1, WIDTH)
        third = net.blocks[1](both.mean(0, keepdim=True))
        return net.head(third + first.detach().sum()).sum()

    trace = follow(net, step, inputs())
    assert [call.needs for call in trace.calls] == [
        frozenset(),
        frozenset(),
        frozenset({(0, 0), (1, 0)}),
        frozenset({(0, 0), (2, 0)}),
    ]


class Several(Block):
    """Takes and returns a structure."""

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        out = super().forward(state["x"])
        return {"x": out, "seen": [*state["seen"], out.mean(dim=-1).detach()], "depth": state["depth"] + 1}


def test_structures_are_taken_apart() -> None:
    net = Net(Several)

    def step(x: Tensor) -> Tensor:
        state = net.through({"x": net.embed(x), "seen": [], "depth": 0})
        assert state["depth"] == 3
        return state["seen"][1].sum() + state["x"].sum()

    trace = follow(net, step, inputs())
    last = trace.calls[-1]
    assert last.outputs == [
        TensorInfo((SIZE, WIDTH), torch.float32, True),
        TensorInfo((SIZE,), torch.float32, False),
        TensorInfo((SIZE,), torch.float32, False),
        TensorInfo((SIZE,), torch.float32, False),
        3,
    ]
    assert last.aliases == {1: 1, 2: 2}, "the entries of the history that are there already"
    assert last.needs == {(2, 0), (2, 2), (1, 1)}, "an alias keeps the name of the one who made it"
    assert trace.tail == {(3, 0), (2, 2)}
    assert last.unflatten is not None
    assert last.unflatten(["x", "a", "b", "c", 3]) == {"x": "x", "seen": ["a", "b", "c"], "depth": 3}


class Passing(Block):
    def forward(self, x: Tensor, mask: Tensor | None = None, *, mode: str = "a") -> tuple[Tensor, Any, str]:  # type: ignore[override]
        return super().forward(x), mask, mode


def test_aliases_none_and_keywords() -> None:
    net = Net(Passing)

    def step(x: Tensor) -> Tensor:
        mask = x > 0
        h, same, mode = net.blocks[0](x, mask=mask, mode="b")
        assert same is mask, "the very object"
        assert mode == "b"
        h, nothing, _ = net.blocks[1](h)
        assert nothing is None
        return (h * same).sum()

    trace = follow(net, step, inputs())
    first, second = trace.calls
    assert first.aliases == {1: 1}
    assert first.outputs[1:] == [TensorInfo((SIZE, WIDTH), torch.bool, False), "b"]
    assert second.outputs[1:] == [None, "a"]
    assert trace.tail == {(1, 0)}


# ------------------------------------------------------------------------------------------------ parameters


def test_parameters_that_glue_uses() -> None:
    net = Net()

    def step(x: Tensor) -> Tensor:
        h = net.embed(x)
        h = net.blocks[0](h * torch.exp(net.scale))
        h = net.blocks[1](h)
        return net.head(h).sum() + F.linear(h, net.head.weight).sum()

    trace = follow(net, step, inputs())
    assert [call.glue_parameters for call in trace.calls] == [
        frozenset(),
        frozenset({"scale"}),
        frozenset(),
        frozenset(),
    ]
    assert trace.calls[1].parameters == {"scale", "blocks.0.fc.weight", "blocks.0.fc.bias"}
    assert trace.tail_parameters == {"head.weight"}
    assert trace.tail == {(2, 0), (3, 0)}


def test_a_tied_parameter_goes_by_its_first_name() -> None:
    net = Net()
    net.head = nn.Linear(WIDTH, WIDTH)
    net.head.weight = net.embed.weight
    trace = follow(net, lambda x: net.head(net.embed(x)).sum(), inputs())
    assert trace.calls[1].parameters == {"embed.weight", "head.bias"}


def test_a_unit_that_uses_a_strangers_parameter() -> None:
    """A block that was handed the model."""
    net = Net()
    net.blocks[1].__dict__["model"] = net
    net.blocks[1].forward = lambda x: x * net.scale + net.blocks[1].fc(x)  # type: ignore[method-assign]
    trace = follow(net, lambda x: net.blocks[1](net.blocks[0](x)).sum(), inputs())
    assert trace.calls[1].parameters == {"scale", "blocks.1.fc.weight", "blocks.1.fc.bias"}
    assert not trace.calls[1].glue_parameters


def test_a_parameter_read_as_a_number_is_needed_everywhere() -> None:
    net = Net()

    def step(x: Tensor) -> Tensor:
        factor = float((net.scale * 2).detach())
        return net.head(net.embed(x) * factor).sum()

    trace = follow(net, step, inputs())
    assert trace.everywhere == {"scale"}
    assert trace.calls[1].outputs[0].shape == (SIZE, 2)


# ------------------------------------------------------------------------------------------------ tail


def test_what_was_logged_is_needed_at_the_end() -> None:
    net = Net()

    def step(x: Tensor) -> Tensor:
        h = net.embed(x)
        net.show(h.mean())  # type: ignore[operator]
        second = net.blocks[0](h)
        net.show({"numbers": [second.std(), 1.0]})  # type: ignore[operator]
        return net.head(net.blocks[1](second)).sum()

    trace = follow(net, step, inputs())
    assert trace.tail == {(0, 0), (1, 0), (3, 0)}


def test_what_the_tail_looks_at_is_needed_even_if_it_is_not_returned() -> None:
    net = Net()

    def step(x: Tensor) -> Tensor:
        first = net.embed(x)
        out = net.head(net.blocks[0](first))
        first.mean() * net.scale  # for a metric, say
        return out.sum()

    trace = follow(net, step, inputs())
    assert trace.tail == {(0, 0), (2, 0)}
    assert trace.tail_parameters == {"scale"}


def test_a_tail_that_cannot_be_followed() -> None:
    net = Net()

    def step(x: Tensor) -> Any:
        h = net.head(net.embed(x))
        return h.sum() if h.sum() > 0 else -h.sum()

    trace = follow(net, step, inputs())
    assert trace.names == ("embed", "head")
    assert trace.tail_error is not None
    assert trace.tail == {(1, 0)}, "then all of the last call is taken to be needed"


def test_a_user_error_before_the_first_unit_is_the_users() -> None:
    net = Net()

    def step(x: Tensor) -> Tensor:
        raise KeyError("labels")

    with pytest.raises(KeyError, match="labels"):
        follow(net, step, inputs())


def test_a_step_without_units_is_refused() -> None:
    net = Net()
    with pytest.raises(StepError, match="Net's step calls no sub-module with parameters"):
        follow(net, lambda x: x.sum() * net.scale, inputs())


# ------------------------------------------------------------------------------------------------ in place, hidden


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.relu_())


def test_outputs_changed_in_place_by_the_next_unit() -> None:
    net = Net(InPlace)
    trace = follow(net, lambda x: net.blocks[1](net.blocks[0](net.embed(x))).sum(), inputs())
    assert trace.mutated == {(0, 0), (1, 0)}
    assert not trace.mutates_batch


def test_outputs_changed_in_place_by_glue() -> None:
    net = Net()

    def step(x: Tensor) -> Tensor:
        h = net.blocks[0](net.embed(x))
        h += 1
        view = h.view(-1)[:2]
        second = net.blocks[1](h * 2)
        second.detach().mul_(2)
        view.zero_()
        return (second + h).sum()

    trace = follow(net, step, inputs())
    assert trace.mutated == {(1, 0), (2, 0)}
    assert trace.tail == {(1, 0), (2, 0)}


def test_a_value_written_into_another() -> None:
    """A buffer made by glue collects what the blocks give."""
    net = Net()

    def step(x: Tensor) -> Tensor:
        store = torch.zeros(2, SIZE, WIDTH)
        store[0] = net.embed(x)
        store[1] = net.blocks[0](x)
        return net.head(store.sum(0)).sum()

    trace = follow(net, step, inputs())
    assert trace.calls[2].needs == {(0, 0), (1, 0)}


def test_a_batch_changed_in_place() -> None:
    net = Net()

    def by_glue(batch: dict[str, Tensor]) -> Tensor:
        batch["x"].mul_(2)
        return net.head(net.embed(batch["x"])).sum()

    assert follow(net, by_glue, {"x": inputs()}).mutates_batch
    in_place = Net(InPlace)
    assert follow(in_place, lambda x: in_place.blocks[0](x).sum(), inputs()).mutates_batch
    assert not follow(net, lambda x: net.head(net.embed(x * 2)).sum(), inputs()).mutates_batch


class Telling(Block):
    """Leaves a value on itself."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.kept = out.pow(2).mean()
        return out


def test_a_value_that_leaves_by_an_attribute_is_hidden() -> None:
    net = Net(Telling)
    trace = follow(net, lambda x: net.through(x).sum() + net.blocks[1].kept, inputs())
    assert trace.tail == {(1, HIDDEN), (2, 0)}
    trace = follow(net, lambda x: net.blocks[2](net.blocks[1](x) * net.blocks[1].kept).sum(), inputs())
    assert trace.calls[1].needs == {(0, HIDDEN), (0, 0)}


class ChangesItsArgument(Block):
    def forward(self, x: Tensor, memory: Tensor) -> Tensor:  # type: ignore[override]
        out = super().forward(x)
        memory.add_(out.detach())
        return out


def test_an_argument_changed_in_place_and_read_later_is_hidden() -> None:
    net = Net(ChangesItsArgument)

    def step(x: Tensor) -> Tensor:
        memory = torch.zeros(SIZE, WIDTH)
        out = net.blocks[0](x, memory)
        return (out + memory).sum()

    trace = follow(net, step, inputs())
    assert trace.tail == {(0, 0), (0, HIDDEN)}


# ------------------------------------------------------------------------------------------------ chance, cost


class Dropping(Block):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5)


def test_a_unit_that_uses_torch_func() -> None:
    class Derivative(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.func.grad(lambda given: F.linear(given, self.weight).tanh().sum())(x)

    root = nn.Sequential(nn.Linear(WIDTH, WIDTH), Derivative(WIDTH, WIDTH))
    first, second = follow(root, lambda batch: root(batch).mean(), inputs()).calls
    assert not second.random and second.parameters == {"1.weight", "1.bias"} and second.needs == {(first.index, 0)}


def test_random_units_and_random_glue() -> None:
    net = Net(Dropping)
    trace = follow(net, lambda x: net.head(net.blocks[0](net.embed(x))).sum(), inputs())
    assert [call.random for call in trace.calls] == [False, True, False]
    assert not trace.glue_random
    trace = follow(net, lambda x: net.head(F.dropout(net.embed(x), 0.5)).sum(), inputs())
    assert [call.random for call in trace.calls] == [False, False]
    assert trace.glue_random
    trace = follow(net, lambda x: net.head(x + torch.rand(SIZE, WIDTH)).sum(), inputs())
    assert trace.glue_random, "on values that follow from the batch"


def test_flops() -> None:
    net = Net()
    trace = follow(net, lambda x: net.head(net.through(net.embed(x))).sum(), inputs())
    multiplications = 2 * SIZE * WIDTH * WIDTH
    assert [call.flops for call in trace.calls] == [multiplications] * 4 + [2 * SIZE * WIDTH * 2]


@pytest.mark.parametrize("name", ["gpt_tied", "resnet", "hf_t5", "lstm", "moe", "torch_encoder"])
def test_every_block_costs_something(name: str) -> None:
    case = ZOO[name]
    module = case.build()
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    batch = case.batches(1, 2, torch.float32)[0]
    units = find_units(module)
    book = PlanBook(module, units, 1, StepObserver())
    trace = book.trace(lambda part: module.training_step(part, 0), batch)
    blocks = [call for call in trace.calls if call.group in units.blocks]
    assert {call.group for call in blocks} == set(units.blocks)
    assert all(call.flops > 0 for call in blocks)


# ------------------------------------------------------------------------------------------------ losses


class LossInside(Block):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(self.fc(x), y)


def test_losses_and_where_their_targets_come_from() -> None:
    net = Net()
    net.loss_block = LossInside()
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0]))
    batch = {"x": inputs(), "y": torch.tensor([0, 1, 1]), "z": torch.tensor([[0], [1], [1]])}

    def step(batch: dict[str, Tensor]) -> Tensor:
        logits = net.head(net.embed(batch["x"]))
        first = F.cross_entropy(logits, batch["y"])
        view = F.nll_loss(logits.log_softmax(-1), batch["z"].view(-1), ignore_index=-1)
        computed = F.cross_entropy(logits, batch["y"] * 1, ignore_index=7)
        inside = net.loss_block(batch["x"], batch["y"])
        module = nn.CrossEntropyLoss()(logits, batch["y"])
        others = F.cross_entropy(logits, batch["y"], reduction="sum") + F.mse_loss(logits, logits * 0)
        none = F.cross_entropy(logits, batch["y"], reduction="none").mean()
        soft = F.cross_entropy(logits, logits.detach().softmax(-1)) + weighted(logits, batch["y"])
        return first + view + computed + inside + module + others + none + soft

    trace = follow(net, step, batch)
    assert trace.tail_error is None
    assert [(call.ignore_index, call.batch_leaf, call.inside) for call in trace.losses] == [
        (-100, 1, False),
        (-1, 2, False),
        (7, None, False),
        (-100, None, True),
        (-100, 1, False),
        (-100, 1, False),
    ]
    assert [call.weighted for call in trace.losses] == [False, False, False, False, False, True]


# ------------------------------------------------------------------------------------------------ nothing is left


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.drop(self.norm(self.fc(x)))


def test_nothing_is_left_behind() -> None:
    net = Net(Counting)
    net.register_buffer("average", torch.zeros(WIDTH))
    net.register_buffer("replaced", torch.zeros(()))

    def step(batch: list[Tensor]) -> Tensor:
        x = batch[0]
        x.mul_(2)
        net.average.lerp_(x.mean(0), 0.5)
        net.replaced = net.replaced + 1
        noise = torch.rand(SIZE, WIDTH) * random.random() * np.random.rand()
        return net.head(net.through(net.embed(x + noise))).sum()

    batch = [inputs()]
    before = {name: value.clone() for name, value in net.state_dict().items()}
    objects = {name: id(value) for name, value in [*net.named_parameters(), *net.named_buffers()]}
    copies, states = batch[0].clone(), (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy())
    attributes = {name: set(vars(module)) for name, module in net.named_modules()}
    book = PlanBook(net, find_units(net), 2, StepObserver())
    trace = book.trace(step, batch)
    assert trace.mutates_batch
    assert trace.glue_random
    assert [call.random for call in trace.calls] == [False, True, True, True, False]
    assert {name: id(value) for name, value in [*net.named_parameters(), *net.named_buffers()]} == objects
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())
    assert torch.equal(batch[0], copies)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()
    assert {name: set(vars(module)) for name, module in net.named_modules()} == attributes
    assert not isinstance(net.embed(batch[0]), FakeTensor), "units compute again"


def test_units_work_again_after_an_error() -> None:
    net = Net()

    def step(x: Tensor) -> Tensor:
        net.embed(x)
        raise StepError("stop")

    with pytest.raises(StepError, match="stop"):
        follow(net, step, inputs())
    assert "_call_impl" not in vars(net.embed)
    assert not isinstance(net.embed(inputs()), FakeTensor)
