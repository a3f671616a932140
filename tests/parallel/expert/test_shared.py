"""The shared expert runs while the tokens are on their way, with the numbers it has without that."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lnn_lightning import ExpertParallel
from lnn_lightning.memory.recompute_blocks import Segment
from lnn_lightning.parallel.expert import dispatch, shared
from lnn_lightning.parallel.expert.axis import ExpertAxis
from lnn_lightning.parallel.expert.seam import seam_of
from lnn_lightning.parallel.step.extension import UnitRun
from lnn_lightning.parallel.step.interception import replaced
from lnn_lightning.parallel.step.remember import checkpoints_remember
from lnn_lightning.parallel.step.trace import Call
from tests.helpers.ranks import launch_ranks, run_ranks
from tests.helpers.reference import Run, train_all
from tests.parallel.expert.test_fused import block_of, shared_out, tokens

AHEAD = ["send", "shared", "receive", "send", "receive"]
BEHIND = ["send", "receive", "send", "receive", "shared"]


def blocks(size: int, rank: int, block: Any) -> tuple[Any, Any]:
    """The same block twice, shared out; in the second nothing runs ahead."""
    if "lnn_seam" not in vars(block.experts):  # once is enough, copies do
        shared_out(block, ExpertAxis(size, rank, dist.group.WORLD, 1 / size))
    found, plain = copy.deepcopy(block), copy.deepcopy(block)
    assert seam_of(found.experts).beside and not vars(found)["lnn_beside"].known
    seam_of(plain.experts).beside = False
    return found, plain


@contextmanager
def noted(*experts: nn.Module) -> Iterator[list[str]]:
    """What starts and ends an exchange, and when a shared expert computes."""
    order: list[str] = []

    def noting(name: str) -> Callable[..., Any]:
        function = getattr(dispatch, name)
        return lambda *args: (order.append(name), function(*args))[1]

    handles = [each.register_forward_pre_hook(lambda *_: order.append("shared")) for each in experts]
    with replaced(dispatch, "send", noting("send")), replaced(dispatch, "receive", noting("receive")):
        yield order
    for handle in handles:
        handle.remove()


def run(block: Any, value: Tensor, call: Callable[[Any, Tensor], Tensor]) -> list[Tensor]:
    """Result and gradients."""
    block.zero_grad()
    value = value.clone().requires_grad_()
    out = call(block, value * 1)
    out.square().mean().backward()
    return [out.detach(), value.grad, *(each.grad for each in block.parameters())]  # type: ignore[list-item]


def as_it_is(block: Any, value: Tensor) -> Tensor:
    return block(value)


def checkpointed(block: Any, value: Tensor) -> Tensor:
    return checkpoint(block, value, use_reentrant=False)  # type: ignore[no-any-return]


def reentrant(block: Any, value: Tensor) -> Tensor:
    return checkpoint(block, value, use_reentrant=True)  # type: ignore[no-any-return]


def recomputed(block: Any, value: Tensor) -> Tensor:
    unit_run = UnitRun(0, 0, Call(0, "block", "block", random=False), block)
    return Segment().run(unit_run, block, (value,), {})  # type: ignore[no-any-return]


def of_a_view(block: Any, value: Tensor) -> Tensor:
    return block(value[:1])


WAYS = [as_it_is, recomputed, checkpointed, reentrant, of_a_view]


def _deepseek(rank: int, size: int) -> None:
    whole = _deepseek_block()
    for way in WAYS:
        block, plain = blocks(size, rank, whole)
        with checkpoints_remember(), noted(block.shared_experts.gate_proj) as order:
            for step in range(3):
                value = tokens(rank, step)
                order.clear()
                got = run(block, value, way)
                forwards = [order[:5], order[7:12]] if way in WAYS[1:4] else [order[:5]]
                # the way back is no call of these: what is left is the second run, if any
                assert forwards[0] == (BEHIND if step == 0 else AHEAD), (way, step, order)
                if way in WAYS[1:4]:
                    assert order[5:10] == forwards[0], (way, step, order)
                wanted = run(plain, value, way)
                assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)), (way, step)
            # several in flight, their backwards in another order
            block.zero_grad()
            values = [tokens(rank, step).requires_grad_() for step in range(3)]
            losses = [way(block, value * 1).square().mean() for value in values]
            for loss in (losses[1], losses[0], losses[2]):
                loss.backward()
            for value in values:
                plain.zero_grad()
                other = value.detach().clone().requires_grad_()
                way(plain, other * 1).square().mean().backward()
                assert torch.equal(value.grad, other.grad)  # type: ignore[arg-type]
        assert not vars(block)["lnn_beside"].never and not shared._frames.stack


def test_deepseek_beside_its_exchange() -> None:
    """From the second call on; bit for bit what it is without, where blocks run again too."""
    run_ranks(_deepseek, 2)


@cache
def _deepseek_block() -> Any:
    return block_of("deepseek_v3", 4, "eager")


class Custom(nn.Module):
    """Norm and experts in one block, which calls its shared expert in a way of its own."""

    def __init__(self, way: Callable[[Any, Tensor, Tensor], Tensor], sibling: nn.Module | None = None) -> None:
        super().__init__()
        inner = copy.deepcopy(_deepseek_block())
        self.gate, self.experts, self.norm = inner.gate, inner.experts, nn.LayerNorm(16)
        self.shared = sibling or inner.shared_experts
        self.way, self.odd = way, False
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        _, weights, index = self.gate(hidden)
        out = self.experts(hidden.view(-1, 16), index, weights).view(x.shape)
        return out + self.way(self, hidden, x)


def something_else(self: Any, hidden: Tensor, x: Tensor) -> Tensor:
    return self.shared(x * 2)


def detached(self: Any, hidden: Tensor, x: Tensor) -> Tensor:
    return self.shared(hidden.detach())


def changed_in_place(self: Any, hidden: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        hidden.add_(0 if self.odd else 1)
    return self.shared(hidden)


def without_gradients(self: Any, hidden: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        return self.shared(hidden)


def in_bfloat16(self: Any, hidden: Tensor, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return self.shared(hidden)


def checkpointed_alone(self: Any, hidden: Tensor, x: Tensor) -> Tensor:
    return checkpoint(self.shared, hidden, use_reentrant=False)  # type: ignore[no-any-return]


def twice(self: Any, hidden: Tensor, x: Tensor) -> Tensor:
    return self.shared(hidden) + self.shared(hidden)


def plainly(self: Any, hidden: Tensor, x: Tensor) -> Tensor:
    return self.shared(hidden)


def now_and_then(self: Any, hidden: Tensor, x: Tensor) -> Tensor:
    return self.shared(hidden.detach() if self.odd else hidden)


def skipped_later(self: Any, hidden: Tensor, x: Tensor) -> Tensor:
    return hidden if self.odd else self.shared(hidden)


def _ways(rank: int, size: int) -> None:
    ahead = {plainly, twice}
    custom = Custom(plainly)

    def blocks_that_call(way: Callable[[Any, Tensor, Tensor], Tensor]) -> tuple[Any, Any]:
        custom.way = way
        return blocks(size, rank, custom)

    for way in (something_else, detached, without_gradients, in_bfloat16, checkpointed_alone, plainly, twice):
        block, plain = blocks_that_call(way)
        with checkpoints_remember():
            for step in range(3):
                value = tokens(rank, step)
                with noted(block.shared.gate_proj) as order:
                    got = run(block, value, recomputed if step == 2 else as_it_is)
                assert (order[1] == "shared") == (way in ahead and step > 0), (way, step, order)
                got, wanted = [[e for e in each if e is not None] for each in (got, run(plain, value, as_it_is))]
                assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)), (way, step)
        assert not vars(block)["lnn_beside"].never
    for way in (now_and_then, skipped_later):
        block, plain = blocks_that_call(way)
        with checkpoints_remember():
            for step in range(5):
                value, block.odd = tokens(rank, step), step in (2, 3)
                plain.odd = block.odd
                with noted(block.shared.gate_proj) as order:
                    got = run(block, value, recomputed if step % 2 == 0 else as_it_is)
                assert (order[1] == "shared") == (step in (1, 2)), "in vain once, never again"
                got, wanted = [[e for e in each if e is not None] for each in (got, run(plain, value, as_it_is))]
                assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)), (way, step)
        assert vars(block)["lnn_beside"].never == {"shared"}
    block, _ = blocks_that_call(changed_in_place)
    with checkpoints_remember(), torch.no_grad():
        for step in range(2):
            with noted(block.shared.gate_proj) as order:
                block(tokens(rank, step))
            assert order == BEHIND


def test_calls_of_all_kinds() -> None:
    """Only the very object that was there, unchanged, in the same mode; else it is computed as always."""
    run_ranks(_ways, 2)


def _siblings(rank: int, size: int) -> None:
    linear = lambda: nn.Linear(16, 16)  # noqa: E731
    hooked = linear()
    hooked.register_forward_pre_hook(lambda module, args: None)
    cases: list[tuple[nn.Module, bool]] = [
        (linear(), True),
        (nn.Sequential(linear(), nn.Dropout(0.0)), True),
        (nn.Sequential(linear(), nn.Dropout(0.5)), False),
        (nn.Sequential(linear(), Noise()), False),
        (nn.Sequential(linear(), Counting()), False),
        (hooked, False),
    ]
    for sibling, expected in cases:
        torch.manual_seed(rank)
        block, plain = blocks(size, rank, Custom(plainly, sibling))
        layer = next(each for each in block.shared.modules() if isinstance(each, nn.Linear))
        calls: list[int] = []
        block.shared.register_forward_hook(lambda module, args, out, calls=calls: calls.append(len(calls)))
        with checkpoints_remember():
            for step in range(3):
                with noted(layer) if layer is not block.shared else noted() as order:
                    state = torch.get_rng_state()
                    got = run(block, tokens(rank, step), as_it_is)
                    torch.set_rng_state(state)
                if layer is not block.shared:
                    assert (order[1] == "shared") == (expected and step > 0), (sibling, step, order)
                wanted = run(plain, tokens(rank, step), as_it_is)
                assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)), (sibling, step)
        assert calls == [0, 1, 2]
    block, _ = blocks(size, rank, Custom(plainly))
    for step in range(3):  # nobody would know what a checkpoint did the first time
        with noted(block.shared.gate_proj) as order:
            run(block, tokens(rank, step), as_it_is)
        assert order == BEHIND
    with torch.inference_mode():
        block(tokens(rank))
    other = copy.deepcopy(block)
    with checkpoints_remember(), noted(other.shared.gate_proj) as order:
        run(other, tokens(rank), as_it_is)
        assert order == AHEAD, "what it learned is copied, and its own modules run"


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * self.count


def test_siblings_of_all_kinds() -> None:
    """None that draws random numbers or has buffers to change in training, and none with a hook before it."""
    run_ranks(_siblings, 2)


def _trained(rank: int, size: int, jobs: list[Any]) -> list[Any]:
    """Trainings with it and without, and how often a shared expert ran ahead in each."""
    found = []
    original = shared._Frame.run_ahead
    for is_off in (False, True):
        count = [0]

        def counted(frame: Any, choice: int, count: list[int] = count) -> None:
            count[0] += 1
            original(frame, choice)

        with (
            replaced(shared._Frame, "run_ahead", counted),
            replaced(shared._Frame, "choice", (lambda frame: 0) if is_off else shared._Frame.choice),
        ):
            found.append((train_all(rank, size, jobs), count[0]))
    return found


def check_trainings(world_size: int, layouts: list[dict[str, Any]]) -> None:
    jobs = [("moe_deepseek_v3", {"expert": ExpertParallel(2), **layout}, Run(n_steps=3)) for layout in layouts]
    results = launch_ranks(_trained, world_size, jobs, timeout=60 + 30 * len(jobs))
    assert all(on[1] > 0 and off[1] == 0 for on, off in results), [(on[1], off[1]) for on, off in results]
    for on, off in results:
        for index, (a, b) in enumerate(zip(on[0], off[0], strict=True)):
            assert a.losses == b.losses, layouts[index]
            assert all(torch.equal(a.state[name], b.state[name]) for name in b.state), layouts[index]


def test_trainings() -> None:
    """Recomputed, in several micro-batches: bit for bit as without."""
    check_trainings(2, [{"recompute": "full", "microbatches": 2}])


@pytest.mark.slow
def test_trainings_in_other_layouts() -> None:
    layouts: list[dict[str, Any]] = [
        {"pipeline_parallel_size": 2, "schedule": schedule, "microbatches": 2} for schedule in ("1f1b", "zero_bubble")
    ]
    layouts += [{"tensor_parallel_size": 2}, {"tensor_parallel_size": 2, "recompute": "full"}]
    layouts += [{"expert": ExpertParallel(2, divide_experts=True), "tensor_parallel_size": 2}]
    layouts += [{"zero_stage": 3, "recompute": "full", "microbatches": 2}]
    check_trainings(4, layouts)
