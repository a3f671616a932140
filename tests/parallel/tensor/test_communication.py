"""What is sent: collectives counted on real ranks, against Megatron's numbers and the planner's."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from lnn_lightning.parallel.layout import Mesh, resolve_layout
from lnn_lightning.parallel.pipeline.engine import PipelineEngine, PipelineSettings
from lnn_lightning.parallel.pipeline.schedules import place
from lnn_lightning.parallel.pipeline.stage import WatchedStage
from lnn_lightning.parallel.step.observer import StepObserver
from tests.helpers.ranks import run_ranks
from tests.zoo.language import LENGTH, VOCABULARY, WIDTH, Block
from tests.zoo.tensor import Decoder, GPTJBlock, LitGPTAttention, NeoXBlock, PreNorm

BATCH = 4


class HuggingFaceLlama(nn.Module):
    """Grouped queries, rotary values made once outside of the blocks."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
        )
        self.model = LlamaForCausalLM(config)

    def forward(self, idx: Tensor) -> Tensor:
        return self.model(idx).logits


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "fused qkv": lambda layers: Decoder(Block, layers=layers, width=WIDTH),
    "query groups": lambda layers: Decoder(lambda: PreNorm(LitGPTAttention()), layers=layers),
    "tied": lambda layers: Decoder(lambda: PreNorm(LitGPTAttention()), layers=layers, tied=True),
    "parallel residual": lambda layers: Decoder(NeoXBlock, layers=layers),
    "parallel residual, one norm": lambda layers: Decoder(GPTJBlock, layers=layers),
    "transformers' Llama": HuggingFaceLlama,
}


@dataclass
class Traffic:
    """What one step sent from this rank.

    `calls`: (collective, in the backward) -> sizes in elements of the whole value. `points`: bytes to other stages.
    """

    calls: dict[tuple[str, bool], list[int]] = field(default_factory=dict)
    points: int = 0
    planned: tuple[int, int] = (0, 0)

    def count(self, what: str, backward: bool) -> int:
        return len(self.calls.get((what, backward), []))

    def ring(self, backward: bool, size: int) -> float:
        """Elements that a rank sends in a ring."""
        share = {"all_reduce": 2.0, "all_gather_single": 1.0, "reduce_scatter_single": 1.0}
        return sum(
            share[what] * sum(sizes) * (size - 1) / size
            for (what, when), sizes in self.calls.items()
            if when == backward
        )


@contextmanager
def counted(traffic: Traffic) -> Iterator[None]:
    names = ("all_reduce", "all_gather_single", "reduce_scatter_single")
    saved = {name: getattr(dist, name) for name in names}
    get_sends = {name: getattr(WatchedStage, name) for name in ("get_fwd_send_ops", "get_bwd_send_ops")}

    def counting(name: str) -> Callable[..., Any]:
        def run(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            backward = torch._C._current_graph_task_id() != -1
            whole = args[0] if name == "reduce_scatter_single" else tensor
            traffic.calls.setdefault((name, backward), []).append(whole.numel())
            return saved[name](tensor, *args, **kwargs)

        return run

    def sending(name: str) -> Callable[..., Any]:
        def run(self: Any, index: int) -> Any:
            operations = get_sends[name](self, index)
            traffic.points += sum(each.tensor.numel() * each.tensor.element_size() for each in operations)
            return operations

        return run

    for name in names:
        setattr(dist, name, counting(name))
    for name in get_sends:
        setattr(WatchedStage, name, sending(name))
    try:
        yield
    finally:
        for name, function in saved.items():
            setattr(dist, name, function)
        for name, function in get_sends.items():
            setattr(WatchedStage, name, function)


def one_step(
    rank: int, world_size: int, model: str, layers: int, sequence: bool, microbatches: int = 1, pipeline: int = 1
) -> Traffic:
    """The traffic of the second step (the first one may set things up)."""
    torch.manual_seed(0)
    net = MODELS[model](layers)
    mesh = Mesh.create(resolve_layout(world_size, pipeline, 1, world_size // pipeline), "cpu")
    settings = PipelineSettings(place("1f1b", pipeline, 1), microbatches, sequence_parallel=sequence)
    engine = PipelineEngine(net, settings, mesh, StepObserver())
    x = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    batch = (x, (3 * x + 1) % VOCABULARY)

    def step(part: Any) -> Tensor:
        logits = net(part[0])
        return F.cross_entropy(logits.view(-1, logits.size(-1)), part[1].view(-1))

    engine.prepare("step", step, batch, training=True)
    engine.find_loss_form(step, batch)
    engine.setup_training()
    engine.train_step("step", step, batch, torch.device("cpu"), 1.0, sync=True)
    traffic = Traffic()
    with counted(traffic):
        engine.train_step("step", step, batch, torch.device("cpu"), 1.0, sync=True)
    assert engine.residence.tensor is not None
    plans = engine.residence.tensor.plan.units
    blocks = [plan for name, plan in plans.items() if name.rpartition(".")[2].isdigit()]
    assert len(blocks) == layers
    traffic.planned = blocks[-1].bytes
    return traffic


def per_block(model: str, sequence: bool) -> tuple[Counter, Traffic, Traffic]:
    """Collectives that one more block makes: (what, in the backward) -> how many; and the traffic of 2 and 3 blocks."""
    less, more = (run_ranks(one_step, 2, model, layers, sequence)[0] for layers in (2, 3))
    counts = Counter({key: len(sizes) for key, sizes in more.calls.items()})
    counts.subtract({key: len(sizes) for key, sizes in less.calls.items()})
    return Counter({key: count for key, count in counts.items() if count}), less, more


@pytest.mark.parametrize("model", MODELS)
def test_two_all_reduces_forward_and_two_backward(model: str) -> None:
    """A block of attention and MLP; one norm for both makes one entry, so one all-reduce less in the backward."""
    counts, less, more = per_block(model, sequence=False)
    entries = 1 if model == "parallel residual, one norm" else 2
    assert counts == {("all_reduce", False): 2, ("all_reduce", True): entries}


@pytest.mark.parametrize("model", MODELS)
def test_gathers_and_scatters_under_sequence_parallelism(model: str) -> None:
    """In place of an all-reduce there is one all-gather and one reduce-scatter (Korthikanti et al. 2022, fig. 5)."""
    counts, _, _ = per_block(model, sequence=True)
    entries = 1 if model == "parallel residual, one norm" else 2
    assert counts == {
        ("all_gather_single", False): entries,
        ("reduce_scatter_single", False): 2,
        ("all_gather_single", True): 2,
        ("reduce_scatter_single", True): entries,
    }


@pytest.mark.parametrize("sequence", [False, True])
def test_bytes_of_a_layer(sequence: bool) -> None:
    """8bsh(t-1)/t a layer (Narayanan et al. 2021, section 3.2), as planned and as counted."""
    _, less, more = per_block("fused qkv", sequence)
    hidden = WIDTH
    expected = 4 * BATCH * LENGTH * hidden * (2 - 1) / 2
    flat = (
        4 * hidden + 2 * hidden + 4 * hidden
    )  # gradients of norms and row biases, once a step and not in the backward
    for backward, planned in enumerate(more.planned):
        assert planned == expected * 4  # float32
        counted = more.ring(bool(backward), 2) - less.ring(bool(backward), 2)
        assert counted - expected == pytest.approx(0 if backward else 2 * flat / 2, abs=2 * flat)
        if backward:
            assert counted == expected


def test_what_is_not_a_block_sends() -> None:
    """Embedding: one forward. Head: one backward. Cross entropy: two forward, of a few numbers a token. Once: rest."""
    traffic = run_ranks(one_step, 2, "tied", 2, False)[0]
    forward, backward = traffic.calls["all_reduce", False], traffic.calls["all_reduce", True]
    hidden = BATCH * LENGTH * 32
    tokens = BATCH * LENGTH
    assert set(traffic.calls) == {("all_reduce", False), ("all_reduce", True)}
    assert sorted(forward[:-1]) == [tokens, 2 * tokens] + [hidden] * (1 + 2 * 2)
    assert forward[-1] < 2 * 10 * 32 + 100  # gradients of whole parameters, once a step
    assert backward == [hidden] * (1 + 2 * 2)


def test_once_a_step_is_once_a_step() -> None:
    """More micro-batches send more of the rest, not more of that."""
    one, two = (run_ranks(one_step, 2, "query groups", 2, False, microbatches)[0] for microbatches in (1, 2))
    assert two.count("all_reduce", True) == 2 * one.count("all_reduce", True)
    assert two.count("all_reduce", False) - 1 == 2 * (one.count("all_reduce", False) - 1)


@pytest.mark.slow
def test_stages_send_parts_of_tokens() -> None:
    """Under sequence parallelism a rank sends its tokens only to the next stage: 1/t of the bytes, both ways."""
    whole, part = (run_ranks(one_step, 4, "query groups", 3, sequence, 2, 2) for sequence in (False, True))
    for one, other in zip(whole, part, strict=True):
        assert one.points == BATCH * LENGTH * 32 * 4
        assert other.points * 2 == one.points
