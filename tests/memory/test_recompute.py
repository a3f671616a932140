"""Recomputation of one process: what is kept, what runs again, and that nothing else does."""

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.recompute import Block, Shape, formula
from lnn_lightning import PTDPStrategy
from lnn_lightning.memory.counting import saved_bytes
from lnn_lightning.memory.recompute import BlockRecomputation, CoreRecomputation, recomputed_blocks, segment_length
from lnn_lightning.memory.recompute_core import CoreWatch
from lnn_lightning.parallel.errors import LayoutError, StepError
from lnn_lightning.parallel.step.extension import StepExtension, UnitRun
from lnn_lightning.parallel.step.randomness import reseed
from lnn_lightning.parallel.step.trace import Call
from lnn_lightning.parallel.step.units import find_units

CPU = torch.device("cpu")


def extension(kind: str, names: set[str], lengths: dict[int, int] | None = None) -> StepExtension:
    made = CoreRecomputation(names) if kind == "selective" else BlockRecomputation(names, lengths or {})
    made.begin(1, training=True)
    return made


def through(blocks: list[nn.Module], made: StepExtension | None, x: Any, is_random: bool = True, **call: Any) -> Any:
    """Runs blocks one after the other as the engine does."""
    for index, block in enumerate(blocks):
        traced = Call(index, f"blocks.{index}", f"blocks.{index}", random=is_random, **call)

        def body(*args: Any, block: nn.Module = block, index: int = index, **kwargs: Any) -> Any:
            if is_random:
                reseed(index, CPU)
            return block(*args, **kwargs)

        run = UnitRun(0, 0, traced, block)
        x = made.call(run, body, (x,), {}) if made is not None else body(x)
    return x


def outcome(blocks: list[nn.Module], made: StepExtension | None, **options: Any) -> list[Tensor]:
    """Result and gradients, and that the random numbers behind them are where they were."""
    for block in blocks:
        block.zero_grad()
    reseed(5, CPU)
    x = torch.randn(4, 12, 32, requires_grad=True)
    y = through(blocks, made, x, **options)
    states = [torch.get_rng_state(), random.getstate()[1], list(numpy.random.get_state()[1])]  # type: ignore[index]
    y.square().sum().backward()
    after = [torch.get_rng_state(), random.getstate()[1], list(numpy.random.get_state()[1])]  # type: ignore[index]
    assert torch.equal(states[0], after[0]) and states[1:] == after[1:]
    return [y.detach(), x.grad, *(p.grad for block in blocks for p in block.parameters() if p.grad is not None)]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def names(blocks: list[nn.Module]) -> set[str]:
    return {f"blocks.{index}" for index in range(len(blocks))}


# ------------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize("value", [0, -1, True, False, "none", "Full", 1.5, [1]])
def test_refused(value: Any) -> None:
    with pytest.raises(LayoutError, match="`recompute` must be None, 'selective', 'full', 'auto' or a whole number"):
        PTDPStrategy(recompute=value)


def test_blocks() -> None:
    """Repeated blocks; without a trunk units that have sub-modules; never a single layer."""
    trunk = nn.ModuleDict({"embed": nn.Embedding(4, 4), "h": nn.ModuleList([Block(Shape(s=4, h=8, a=2))] * 1)})
    trunk["h"].append(Block(Shape(s=4, h=8, a=2)))
    assert recomputed_blocks(trunk, find_units(trunk)) == ["h.0", "h.1"]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up, self.out = (nn.ModuleDict({"a": nn.Linear(2, 2)}) for _ in range(3))
            self.last = nn.Linear(2, 2)

    net = Net()
    assert recomputed_blocks(net, find_units(net)) == ["down", "up", "out"]


def test_segments_are_those_of_ptdp() -> None:
    """c = sqrt(l A_int / A_in) checkpoints, but no more than blocks."""
    assert segment_length(24, given=2, within=34) == 1
    assert segment_length(64, given=1, within=4) == 4  # c = 16
    assert segment_length(100, given=1, within=1) == 10
    assert segment_length(8, given=3, within=0) == 1


# ------------------------------------------------------------------------------------------------ bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recompute", [None, "selective", "full"])
def test_bytes_are_those_of_the_formula(recompute: Any, dtype: torch.dtype) -> None:
    """Korthikanti et al. (2205.05198): sbh(34 + 5as/h), 34sbh, 2sbh; values and masks are as large as they are."""
    shape = Shape(layers=1, s=128, b=2, h=128, a=8)
    block = Block(shape).to(dtype)
    x = torch.randn(shape.b, shape.s, shape.h, dtype=dtype, requires_grad=True)
    made = None if recompute is None else extension(recompute, {"blocks.0"})
    with saved_bytes([*block.parameters(), *block.buffers()]) as counted:
        y = through([block], made, x)
    size = x.element_size()
    assert counted.total == pytest.approx(formula(shape, size, size, recompute), rel=0.05)
    y.sum().backward()


def test_nothing_large_stays_once_it_was_used() -> None:
    """What was recomputed goes to the nodes that ask for it; a second backward recomputes again."""
    shape = Shape(layers=1, s=32, b=2, h=32, a=2)
    for kind in ("selective", "full"):
        block, x = Block(shape), torch.randn(2, 32, 32, requires_grad=True)
        y = through([block], extension(kind, {"blocks.0"}), x)
        (first,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        (second,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(first, second)


# ------------------------------------------------------------------------------------------------ attention's core


class Attention(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.qkv, self.out = form, nn.Linear(32, 96), nn.Linear(32, 32)
        self.drop, self.mask = nn.Dropout(0.2), nn.Parameter(torch.randn(4, 12, 12))
        self.multihead = nn.MultiheadAttention(32, 4, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.view(4, 12, 4, 8).transpose(1, 2) for t in self.qkv(x).split(32, 2))
        if self.form == "multihead":
            return x + self.multihead(x, x, x, need_weights=True)[0]
        if self.form == "sdpa":  # decomposed on the CPU, for its dropout
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2)
        elif self.form == "einsum":  # learnt bias, in-place scale, softmax in double precision
            scores = torch.einsum("bhqd,bhkd->bhqk", q, k)
            scores /= math.sqrt(8)
            weights = self.drop(F.softmax(scores + self.mask, dim=-1, dtype=torch.float64).to(q.dtype))
            y = torch.einsum("bhqk,bhkd->bhqd", weights, v)
        else:
            scores = torch.baddbmm(self.mask.repeat(4, 1, 1), q.flatten(0, 1), k.flatten(0, 1).mT, beta=0.5)
            weights = self.drop(torch.softmax(scores.view(4, 4, 12, 12), -1))
            y = weights @ v + weights.mean()  # the weights are used once more
        return x + self.out(y.transpose(1, 2).reshape(4, 12, 32))


@pytest.mark.parametrize("form", ["sdpa", "einsum", "baddbmm", "multihead"])
def test_the_core_is_found_in_every_form(form: str) -> None:
    blocks: list[nn.Module] = [Attention(form), Attention(form)]
    expected = outcome(blocks, None)
    assert equal(outcome(blocks, extension("selective", names(blocks))), expected)
    ignored = [p for block in blocks for p in block.parameters()]
    x = torch.randn(4, 12, 32, requires_grad=True)
    with saved_bytes(ignored) as plain:
        through(blocks, None, x)
    with saved_bytes(ignored) as selective:
        through(blocks, extension("selective", names(blocks)), x)
    scores = 4 * 4 * 12 * 12 * 4
    assert plain.total - selective.total >= 2 * 2 * scores


def test_changes_that_cannot_be_run_again_are_kept() -> None:
    """Scores that are changed in place by other than elementwise operations."""

    class Topped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            scores = x @ x.mT
            scores.index_fill_(2, torch.tensor([3]), -1.0)
            return torch.softmax(scores, -1).pow(2) @ x

    assert equal(outcome([Topped()], extension("selective", {"blocks.0"})), outcome([Topped()], None))


def test_saved_scores_that_are_changed_are_an_error() -> None:
    """As they are without recomputation."""

    class Changed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            weights = torch.softmax(x @ x.mT, -1)
            weights *= 2
            return weights @ x

    for made in (None, extension("selective", {"blocks.0"})):
        with pytest.raises(RuntimeError, match="modified by an in"):
            outcome([Changed()], made)


def test_products_without_a_softmax_are_no_core() -> None:
    """Linear attention; and a fused kernel, which keeps no scores."""

    class Linear(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x @ x.mT).exp() @ x

    class Fused(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]

    x = torch.randn(4, 12, 32, requires_grad=True)
    for block in (Linear(), Fused()):
        watch = CoreWatch()
        with watch.following():
            block(x).sum().backward()
        assert not watch.found


def test_derivatives_within_a_block() -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            weights = torch.softmax(x @ x.mT, -1)
            (slope,) = torch.autograd.grad((weights @ x).square().sum(), x, create_graph=True)
            return slope

    for kind in ("selective", "full"):
        assert equal(outcome([Own()], extension(kind, {"blocks.0"})), outcome([Own()], None))


# ------------------------------------------------------------------------------------------------ what runs again


class Chance(nn.Module):
    """Draws from every generator there is."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source, self.layer = source, nn.Linear(32, 32)
        self.own, self.rng = torch.Generator().manual_seed(3), numpy.random.default_rng(3)

    def forward(self, x: Tensor) -> Tensor:
        draw: dict[str, Callable[[], Any]] = {
            "torch": lambda: torch.rand(32),
            "python": lambda: random.random(),
            "numpy": lambda: float(numpy.random.rand()),
            "generator": lambda: torch.rand(32, generator=self.own),
            "numpy_generator": lambda: float(self.rng.random()),
        }
        return torch.relu(self.layer(x) * (draw[self.source]() - 0.3)) ** 2


@pytest.mark.parametrize("source", ["torch", "python", "numpy", "generator", "numpy_generator"])
def test_random_numbers_are_those_of_the_first_run(source: str) -> None:
    """Python's and numpy's are not seen by the trace, and so not seeded."""

    def fresh() -> list[nn.Module]:
        torch.manual_seed(0)
        return [Chance(source), Chance(source)]

    seeds = source == "torch"
    assert equal(
        outcome(fresh(), extension("full", {"blocks.0", "blocks.1"}), is_random=seeds),
        outcome(fresh(), None, is_random=seeds),
    )


class Stateful(nn.Module):
    """Everything a block may change besides its result."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(12, momentum=0.3)
        self.layer = nn.utils.spectral_norm(nn.Linear(32, 32))
        for name, size in (("scale", ()), ("assigned", ()), ("moved", (1 << 15,))):
            self.register_buffer(name, torch.ones(size))
        self.calls, self.seen, self.auxiliary = 0, [], None
        self.scale: Tensor
        self.assigned: Tensor
        self.moved: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.scale.mul_(0.5)
        self.assigned = 0.5 * self.assigned + x.detach().abs().mean()
        self.moved.data.add_(x.detach().mean())
        y = torch.relu(self.layer(self.norm(x)) * self.scale / self.assigned + self.moved.mean() * self.calls)
        self.auxiliary = y.detach().mean()
        return y**2


def test_buffers_and_attributes_change_once() -> None:
    """torchgpipe's deferred batch normalization; spectral normalization, whose vectors decide the result."""

    def trained(made: StepExtension | None) -> tuple[list[Tensor], nn.Module]:
        torch.manual_seed(0)
        blocks: list[nn.Module] = [Stateful(), Stateful()]
        result = outcome(blocks, made) + outcome(blocks, made)
        return [*result, *(buffer for block in blocks for buffer in block.buffers())], blocks[1]

    (expected, plain), (found, again) = trained(None), trained(extension("full", {"blocks.0", "blocks.1"}))
    assert equal(found, expected)
    assert (again.calls, again.seen) == (plain.calls, plain.seen) == (2, [1, 2])
    assert torch.equal(again.auxiliary, plain.auxiliary)


def test_hooks_of_the_block_fire_once() -> None:
    counts = {"before": 0, "backward": 0}
    block = nn.Sequential(nn.Linear(32, 32), nn.Tanh())

    def before(module: nn.Module, args: Any) -> Any:
        counts["before"] += 1
        return (args[0] * 2,)

    def backward(module: nn.Module, given: Any, taken: Any) -> None:
        counts["backward"] += 1

    block.register_forward_pre_hook(before)
    block.register_full_backward_hook(backward)
    expected = outcome([block], None)
    counts.update(before=0, backward=0)
    assert equal(outcome([block], extension("full", {"blocks.0"})), expected)
    assert counts == {"before": 1, "backward": 1}


def test_tt1117_automodel3325_random_routing() -> None:
    """Sizes depend on the routing, which chance decides."""

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(32, 4)
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            tokens = x.flatten(0, 1)
            weights = self.gate(tokens).softmax(-1)
            chosen = torch.multinomial(weights, 1)[:, 0]
            y = torch.zeros_like(tokens)
            for index, expert in enumerate(self.experts):
                (where,) = (chosen == index).nonzero(as_tuple=True)
                y = y.index_add(0, where, expert(tokens[where]) * weights[where, index, None])
            return y.view_as(x)

    torch.manual_seed(0)
    blocks: list[nn.Module] = [Routed(), Routed()]
    assert equal(outcome(blocks, extension("full", names(blocks))), outcome(blocks, None))


def test_a_block_that_differs_is_named() -> None:
    class Fickle(nn.Module):
        runs = 0

        def forward(self, x: Tensor) -> Tensor:
            type(self).runs += 1
            return torch.exp(torch.tanh(x[: type(self).runs]))

    with pytest.raises(StepError, match=r"Recomputing 'blocks.0' .*does not compute the same twice"):
        outcome([Fickle()], extension("full", {"blocks.0"}))


def test_an_argument_that_was_changed_is_an_error() -> None:
    block = nn.Sequential(nn.ReLU(), nn.Linear(32, 32))
    x = torch.randn(4, 12, 32, requires_grad=True) * 1
    y = through([block], extension("full", {"blocks.0"}), x)
    x += 1
    with pytest.raises(RuntimeError, match="modified by an in-place operation"):
        y.sum().backward()


# ------------------------------------------------------------------------------------------------ segments


class Small(nn.Module):
    """Keeps little compared with what it is given, passes a tuple on and reads a value from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(32, 32), nn.Dropout(0.1)

    def forward(self, given: Any) -> Any:
        x, outside = given
        return self.drop(torch.tanh(self.layer(x))) + outside, outside


@pytest.mark.parametrize("between", ["nothing", "new value", "in place"])
def test_blocks_in_a_row_are_recomputed_together(between: str) -> None:
    """What lies between checkpoints is not kept; glue between blocks begins a new one, also where it hides."""
    torch.manual_seed(0)
    blocks = [Small() for _ in range(6)]

    def kept(made: StepExtension | None) -> tuple[int, list[Tensor]]:
        for block in blocks:
            block.zero_grad()
        x, outside = torch.randn(4, 12, 32).requires_grad_(), torch.ones(32)
        x.data.fill_(0.3)
        given = (x * 1, outside)
        with saved_bytes([x, outside, *(p for block in blocks for p in block.parameters())]) as counted:
            for index, block in enumerate(blocks):

                def body(*args: Any, block: nn.Module = block, index: int = index) -> Any:
                    reseed(index, CPU)
                    return block(*args)

                call = Call(index, f"blocks.{index}", f"blocks.{index}", random=True, given_bytes=9, saved_bytes=6)
                given = made.call(UnitRun(0, 0, call, block), body, (given,), {}) if made else body(given)
                if index == 0 and between == "new value":
                    given = (given[0] * 1, outside)
                if index == 0 and between == "in place":
                    given[0].mul_(2)
        given[0].square().sum().backward()
        gradients = [p.grad for block in blocks for p in block.parameters() if p.grad is not None]
        return counted.total, [given[0].detach(), *gradients]  # type: ignore[list-item]

    value = 4 * 12 * 32 * 4
    _, expected = kept(None)
    bytes_kept, found = kept(extension("full", names(list(blocks)), {0: 6}))
    assert segment_length(6, 9, 6) == 3
    assert equal(found, expected)
    assert bytes_kept == (3 if between != "nothing" else 2) * value


# ------------------------------------------------------------------------------------------------ left alone


@contextmanager
def grad_off() -> Iterator[None]:
    with torch.no_grad():
        yield


def test_only_where_it_helps(caplog: pytest.LogCaptureFixture) -> None:
    """Not in evaluation, without gradients, or where the user recomputes already, which is said once."""
    block, runs = nn.Sequential(nn.Linear(32, 32), nn.Tanh()), []
    block[0].register_forward_hook(lambda *_: runs.append(1))
    x = torch.randn(4, 12, 32, requires_grad=True)
    made = extension("full", {"blocks.0"})
    made.begin(1, training=False)
    through([block], made, x).sum().backward()
    made.finish()
    made.begin(1, training=True)
    with grad_off():
        through([block], made, x)
    through([block], made, x, checkpoints=True).sum().backward()
    checkpoint(lambda x: through([block], made, x, region=0), x, use_reentrant=False).sum().backward()
    assert len(runs) == 5  # each once, the user's own checkpoint twice
    through([block], made, x, in_place=True).sum().backward()
    made.finish()
    assert len(runs) == 6
    texts = [record.message for record in caplog.records]
    assert len(texts) == 2 and "recomputes 'blocks.0' itself" in texts[0] and "in place" in texts[1]
    through([block], extension("full", {"blocks.0"}), x).sum().backward()
    assert len(runs) == 8


def test_nothing_to_recompute_is_said(caplog: pytest.LogCaptureFixture) -> None:
    made = extension("selective", {"blocks.0"})
    through([nn.Linear(32, 32)], made, torch.randn(4, 12, 32, requires_grad=True))
    made.finish()
    made.begin(1, training=True)
    made.finish()
    (record,) = caplog.records
    assert record.message.startswith("`recompute='selective'` found no attention")


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_torch_func_is_refused(kind: str) -> None:
    class Derivative(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.func.grad(lambda given: super(Derivative, self).forward(given).tanh().sum())(x)

    with pytest.raises(StepError, match="torch.autograd.grad"):
        outcome([Derivative(32, 32)], extension(kind, {"blocks.0"}))
