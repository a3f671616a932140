"""Loops over experts, shared out and whole: the same results, gradients, attributes, buffers and random states."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.expert.axis import ExpertAxis
from lnn_lightning.parallel.expert.loop import run_loop
from lnn_lightning.parallel.expert.recording import Unsuited
from lnn_lightning.parallel.step.remember import checkpoints_remember
from lnn_lightning.parallel.step.standin import is_stand_in, replace_tensors, stand_in_for
from lnn_lightning.parallel.step.tree import tree_tensors
from tests.helpers.ranks import RanksFailed, run_ranks
from tests.zoo.experts import BLOCKS, BalancedMoE, FeedForward, LLaMAMoE, Routed, SkippingMoE
from tests.zoo.language import WIDTH

EXACT = [name for name in BLOCKS if name != "moe_dropout"]


def axis_of(rank: int, size: int) -> ExpertAxis:
    return ExpertAxis(size, rank, dist.group.WORLD, 1 / size)


def divide(block: nn.Module, axis: ExpertAxis, **options: Any) -> nn.Module:
    """A copy with stand-ins for the experts of other ranks."""
    block = copy.deepcopy(block)
    experts = list(block.experts.children())
    for place, expert in enumerate(experts):
        if place not in axis.span(len(experts)):
            replace_tensors(expert, lambda _, tensor: stand_in_for(tensor))
    forward = block.forward
    block.__dict__["forward"] = lambda *args, **kwargs: run_loop(
        block, forward, experts, axis, args, kwargs, name="the block", **options
    )
    return block


def build(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    return make().to(dtype)


def tokens_of(rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Each rank has another number of them."""
    return torch.randn(1 + rank, 5, WIDTH, dtype=dtype, generator=torch.Generator().manual_seed(rank))


def run(block: nn.Module, x: Tensor, weights: Callable[[Tensor], Tensor] | None = None) -> dict[str, Any]:
    """What a block gives and leaves behind, after forward and backward."""
    torch.manual_seed(11)
    x = x.clone().requires_grad_()
    outputs = [each for each in tree_tensors(block(x * 1))]
    random = torch.get_rng_state()
    loss = sum((each * torch.linspace(-1, 1, each.numel(), dtype=each.dtype).view_as(each)).sum() for each in outputs)
    if (auxiliary := getattr(block, "aux_loss", None)) is not None:
        loss = loss + 0.1 * auxiliary
    if loss.requires_grad:  # not so of a whole block that is given no tokens
        loss.backward()
    return {
        "outputs": [each.detach() for each in outputs],
        "input": x.grad,
        "gradients": {name: each.grad for name, each in block.named_parameters()},
        "buffers": dict(block.named_buffers()),
        "random": random,
        "calls": getattr(block, "calls", None),
        "auxiliary": None if auxiliary is None else auxiliary.detach(),
    }


def differences(block: nn.Module, axis: ExpertAxis, x: Tensor, tolerance: float = 1e-12) -> list[str]:
    whole, divided = copy.deepcopy(block), divide(block, axis)
    want, got = run(whole, x), run(divided, x)
    found = []

    def compare(what: str, a: Tensor | None, b: Tensor | None) -> None:
        if (a is None) != (b is None):
            found.append(f"{what}: {'no' if b is None else 'a'} value")
        elif a is not None and (a.shape != b.shape or a.dtype != b.dtype):
            found.append(f"{what}: {b.shape}, {b.dtype}")
        elif a is not None and a.numel() and not (a - b).abs().max() <= tolerance * a.abs().max().clamp(min=1e-3):
            found.append(f"{what}: {(a - b).abs().max():.1e}")

    for index, (a, b) in enumerate(zip(want["outputs"], got["outputs"], strict=True)):
        compare(f"output {index}", a, b)
    compare("input", want["input"], got["input"])
    compare("auxiliary", want["auxiliary"], got["auxiliary"])
    experts = list(dict(block.experts.named_children()))
    here = [experts[place] for place in axis.span(len(experts))]
    for name, gradient in want["gradients"].items():
        if not name.startswith("experts."):
            compare(name, gradient, got["gradients"][name])
            continue
        everyones: list[Any] = [None] * axis.size
        dist.all_gather_object(everyones, gradient)
        known = [each for each in everyones if each is not None]
        if name.split(".")[1] in here:
            compare(name, sum(known) * axis.scale if known else None, got["gradients"][name])
        elif got["gradients"][name] is not None or not is_stand_in(dict(divided.named_parameters())[name]):
            found.append(f"{name} is elsewhere")
    for name, buffer in want["buffers"].items():
        compare(name, buffer, got["buffers"][name])
    if not torch.equal(want["random"], got["random"]):
        found.append("random state")
    if want["calls"] != got["calls"]:
        found.append(f"calls: {got['calls']}")
    return found


def compare_blocks(rank: int, world_size: int, names: list[str]) -> dict[str, list[str]]:
    axis = axis_of(rank, world_size)
    blocks = {name: build(BLOCKS[name]) for name in names}
    return {name: differences(block, axis, tokens_of(rank)) for name, block in blocks.items()}


def test_equal_to_the_whole_block() -> None:
    for found in run_ranks(compare_blocks, 2, EXACT):
        assert found == {name: [] for name in EXACT}


def test_four_ranks() -> None:
    names = ["moe_litgpt", "moe_sorted", "moe_swiglu", "moe_noisy"]
    for found in run_ranks(compare_blocks, 4, names):
        assert found == {name: [] for name in names}


class LeavesTrails(Routed):
    """Attributes of many kinds, in-place operations on what experts return, slices and indices, other arguments."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.losses: list[Tensor] = []
        self.counts = {"calls": 0}
        self.generator = torch.Generator().manual_seed(5)
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    @property
    def aux_loss(self) -> Tensor:
        return sum(self.losses)  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        x += 0.5  # the caller's
        logits = self.router(flat)
        logits = logits + torch.rand(logits.shape, generator=self.generator, dtype=x.dtype)
        weights, chosen = (logits + torch.rand_like(logits)).softmax(dim=-1).topk(2, dim=-1)
        self.losses.append(weights.square().mean())
        self.counts["calls"] += 1
        self.calls += self.counts["calls"]
        self.seen = self.seen + 1
        out = torch.zeros_like(flat)
        last = self.experts[-1](flat[0])  # one token
        for index, expert in [*enumerate(self.experts[:2]), (2, self.experts[2]), (-1, self.experts[-1])]:
            assert isinstance(expert, FeedForward) and len(self.experts) == 4
            token, choice = torch.where(chosen == index % 4)
            result = expert(flat[token])
            result *= weights[token, choice, None]
            out.index_add_(0, token, result)
        return (out + last).view_as(x)


class TwoArguments(FeedForward):
    def forward(self, x: Tensor, factor: float = 1.0, *, add: bool = False) -> Tensor:
        return super().forward(x) * factor + add


class CallsWithArguments(Routed):
    def __init__(self, **options: Any) -> None:
        super().__init__(expert=TwoArguments, **options)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.route(x)
        parts = [
            (weights * (chosen == i)).sum(-1, keepdim=True) * e(x, 0.5, add=True) for i, e in enumerate(self.experts)
        ]
        return sum(parts)  # type: ignore[return-value]


def compare_odd(rank: int, world_size: int) -> dict[str, list[str]]:
    axis = axis_of(rank, world_size)
    x = tokens_of(rank)
    found = {each.__name__: differences(build(each), axis, x) for each in (LeavesTrails, CallsWithArguments)}
    for make in (SkippingMoE, LLaMAMoE):
        block = build(make)
        nothing = x[:0] if rank == 1 else x
        found[f"{make.__name__} without tokens"] = differences(block, axis, nothing)
        gate = block.gate if make is LLaMAMoE else block.router
        with torch.no_grad():
            gate.weight *= torch.tensor([[1.0], [1], [0], [0]])
            if make is SkippingMoE:
                gate.bias += torch.tensor([9.0, 9, -9, -9])
            else:
                gate.weight[:2] = 9  # all sums of x are positive below
        found[f"{make.__name__} with idle experts"] = differences(block, axis, x.abs())
    block = build(SkippingMoE)
    whole, divided = copy.deepcopy(block), divide(block, axis)
    for one in (whole, divided):
        one.eval()
    with torch.no_grad():
        found["no gradients"] = [] if torch.allclose(whole(x), divided(x), rtol=0, atol=1e-12) else ["output"]
    with torch.inference_mode():
        found["inference"] = [] if torch.allclose(whole(x), divided(x), rtol=0, atol=1e-12) else ["output"]
    block = build(LLaMAMoE, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found["autocast"] = differences(block, axis, tokens_of(rank, torch.float32), 1e-2)
    return found


def test_odd_loops_and_loads() -> None:
    for found in run_ranks(compare_odd, 2):
        assert found == dict.fromkeys(found, [])
        assert len(found) == 9


def count_hooks(rank: int, world_size: int) -> list[int]:
    """Calls of each expert's hook, and of its forward's code."""
    block = build(SkippingMoE)
    calls = [0] * 4
    divided = divide(block, axis_of(rank, world_size))
    with torch.no_grad():
        divided(tokens_of(rank))  # learns
        for index, expert in enumerate(divided.experts):
            expert.register_forward_hook(lambda *_, index=index: calls.__setitem__(index, calls[index] + 1))
        divided(tokens_of(rank))
    return calls


def test_hooks_run_on_the_owner_only() -> None:
    assert run_ranks(count_hooks, 2) == [[1, 1, 0, 0], [0, 0, 1, 1]]


class Recomputed(nn.Module):
    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, x: Tensor) -> Tensor:
        out = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return out[0] if isinstance(out, tuple) else out


def compare_recomputed(rank: int, world_size: int) -> list[float]:
    axis, x = axis_of(rank, world_size), tokens_of(rank)
    found = []
    for make in (partial(BalancedMoE, noise=0.5), LLaMAMoE):
        block = build(make)
        for reentrant in (True, False):
            plain, recomputed = divide(block, axis), divide(block, axis)
            want = run(plain, x)
            with checkpoints_remember():
                got = run(Recomputed(recomputed, reentrant), x)
            for name, gradient in want["gradients"].items():
                other = got["gradients"][f"block.{name}"]
                if name.startswith("router") and "noise" not in name and isinstance(block, BalancedMoE):
                    continue  # its loss and its logits are not part of what is recomputed
                assert (gradient is None) == (other is None), name
                if gradient is not None:
                    found.append(float((gradient - other).abs().max()))
    return found


def test_recomputed_by_the_user() -> None:
    for found in run_ranks(compare_recomputed, 2):
        assert found and max(found) < 1e-12


class Unsteady(SkippingMoE):
    """Draws from a generator that nobody knows of."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.router.bias.copy_(10 * torch.randn(4, generator=_hidden, dtype=x.dtype))
        return super().forward(x)


_hidden = torch.Generator().manual_seed(2)


class ByTurns(SkippingMoE):
    """Remembers by a list that is no attribute: on the rank that has fewer tokens."""

    def forward(self, x: Tensor) -> Tensor:
        _turns.append(0)
        return super().forward(x[: len(x) - len(_turns) % 2] if len(x) > 1 else x)


_turns: list[int] = []


def run_divided(rank: int, world_size: int, make: Callable[[], nn.Module]) -> None:
    divide(build(make), axis_of(rank, world_size))(tokens_of(rank))


def recompute_otherwise(rank: int, world_size: int) -> None:
    """On rank 1 the second run routes otherwise."""
    block = divide(build(SkippingMoE), axis_of(rank, world_size))
    x = tokens_of(rank).requires_grad_()
    with checkpoints_remember():
        out = checkpoint(block, x, use_reentrant=False)
        if rank == 1:
            with torch.no_grad():
                block.router.weight.neg_()
        out.sum().backward()


class Inner(SkippingMoE):
    def forward(self, x: Tensor) -> Tensor:
        return self.experts[0].net(x) + super().forward(x)


class Tensors(SkippingMoE):
    def forward(self, x: Tensor) -> Tensor:
        return self.experts[0](x, x)


class Chained(SkippingMoE):
    def forward(self, x: Tensor) -> Tensor:
        return self.experts[1](self.experts[0](x)) + super().forward(x)


class Two(FeedForward):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


class Sequences(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        return super().forward(x)


class Mixed(CallsWithArguments):
    def forward(self, x: Tensor) -> Tensor:
        return sum(expert(x, float(index)) for index, expert in enumerate(self.experts))  # type: ignore[return-value]


class Rewrites(SkippingMoE):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        out = self.experts[0](x)
        x.zero_()
        return out + super().forward(x)


class OnOneRank(SkippingMoE):
    """Only rank 1, which has two sequences, does what cannot be recorded."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (self.experts[0](x, x) if len(x) > 1 else 0)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "inner": (Inner, "calls 'net' of an expert by itself"),
    "tensors": (Tensors, "calls an expert with 2 tensors"),
    "chained": (Chained, "calls an expert with what another one gave"),
    "two results": (partial(SkippingMoE, expert=Two), "do not return one row for one row"),
    "sequences": (partial(SkippingMoE, expert=Sequences), "cannot be called with rows"),
    "arguments": (Mixed, "different arguments"),
    "rewrites": (Rewrites, "changes in place what it has called an expert with"),
    "one rank": (OnOneRank, "calls an expert with 2 tensors"),
}


def refuse(rank: int, world_size: int) -> dict[str, tuple[str, str]]:
    found = {}
    for name, (make, _) in REFUSED.items():
        guard: list[str] = []
        try:
            divide(build(make), axis_of(rank, world_size), guard=guard)(tokens_of(rank))
            found[name] = "", "".join(guard)
        except StepError as error:
            found[name] = type(error).__name__, str(error)
    return found


def test_refused() -> None:
    for rank, found in enumerate(run_ranks(refuse, 2)):
        for name, (kind, text) in found.items():
            there = (name, rank) == ("one rank", 0)
            assert ("'the block' cannot run its experts" if there else REFUSED[name][1]) in text, (name, text)
            assert kind == ("" if name == "chained" else "StepError" if there else Unsuited.__name__)


@pytest.mark.parametrize("make", [Unsteady, ByTurns])
def test_not_deterministic(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(run_divided, 2, make)
    assert "'the block' holds experts" in str(caught.value) and "not deterministic" in str(caught.value)


def test_a_recomputation_that_routes_otherwise() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(recompute_otherwise, 2)
    assert "'the block' runs again in backward" in caught.value.tracebacks[1]
    assert "'the block' cannot run its experts" in caught.value.tracebacks[0]
    assert all("On rank 1: 'the block'" in text for text in caught.value.tracebacks.values())
