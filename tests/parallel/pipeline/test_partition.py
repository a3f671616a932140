"""Calls cut into contiguous stages of even cost, with little to send."""

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import nn

from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.pipeline.partition import call_costs, live_bytes, live_values, partition
from lnn_lightning.parallel.pipeline.plans import PlanBook
from lnn_lightning.parallel.step.observer import StepObserver
from lnn_lightning.parallel.step.trace import HIDDEN, Call, Key, TensorInfo, Trace
from lnn_lightning.parallel.step.units import find_units
from tests.zoo import ZOO


def chain(
    flops: Sequence[int],
    names: Sequence[str] | None = None,
    groups: Sequence[str] | None = None,
    widths: Sequence[int] | None = None,
    parameters: Sequence[set[str]] | None = None,
    tail: set[Key] | None = None,
    extra: dict[int, set[Key]] | None = None,
) -> Trace:
    """Calls that each need the one before; outputs of `widths` float32 values; `extra` needs."""
    count = len(flops)
    names = names or [f"blocks.{index}" for index in range(count)]
    calls = []
    for index in range(count):
        width = widths[index] if widths else 4
        needs = {(index - 1, 0)} if index else set()
        calls.append(
            Call(
                index,
                names[index],
                (groups or names)[index],
                outputs=[TensorInfo((2, width), torch.float32, True)],
                needs=frozenset(needs | (extra or {}).get(index, set())),
                parameters=frozenset(parameters[index] if parameters else {f"{names[index]}.weight"}),
                flops=flops[index],
            )
        )
    return Trace(calls, tail=frozenset(tail if tail is not None else {(count - 1, 0)}))


def sizes_of(trace: Trace, size: int = 1) -> dict[str, int]:
    return {name: size for call in trace.calls for name in call.parameters}


def bounds_of(stages: Sequence[int]) -> list[int]:
    return [index for index in range(1, len(stages)) if stages[index] != stages[index - 1]]


# ------------------------------------------------------------------------------------------------ balance


@pytest.mark.parametrize(
    ("flops", "num_stages", "expected"),
    [
        ([1, 1, 1, 1], 1, (0, 0, 0, 0)),
        ([1, 1, 1, 1], 2, (0, 0, 1, 1)),
        ([1, 1, 1, 1], 4, (0, 1, 2, 3)),
        ([4, 1, 1, 1, 1], 2, (0, 1, 1, 1, 1)),
        ([1, 1, 1, 1, 4], 2, (0, 0, 0, 0, 1)),
        ([3, 3, 3, 3, 3, 3, 9], 3, (0, 0, 0, 1, 1, 1, 2)),
        ([8, 1, 1, 1, 1, 1, 1, 8], 3, (0, 1, 1, 1, 1, 1, 1, 2)),
    ],
)
def test_even_work(flops: list[int], num_stages: int, expected: tuple[int, ...]) -> None:
    trace = chain([flop * 1000 for flop in flops])
    assert partition(trace, sizes_of(trace, 0), num_stages) == expected


@pytest.mark.parametrize("seed", range(5))
def test_no_cut_is_better_balanced(seed: int) -> None:
    """Against all cuts there are; within the 5 % given away for less traffic."""
    rng = torch.Generator().manual_seed(seed)
    flops = torch.randint(1, 100, (9,), generator=rng).tolist()
    trace = chain(flops)
    sizes = sizes_of(trace, 0)
    costs = call_costs(trace, sizes)
    for num_stages in (2, 3, 4):
        best = min(
            max(sum(costs[a:b]) for a, b in zip([0, *cut], [*cut, 9], strict=True))
            for cut in combinations(range(1, 9), num_stages - 1)
        )
        stages = partition(trace, sizes, num_stages)
        assert sorted(set(stages)) == list(range(num_stages))
        heaviest = max(sum(c for c, s in zip(costs, stages, strict=True) if s == stage) for stage in range(num_stages))
        assert heaviest <= best * 1.05 + 1e-12


def test_costs() -> None:
    trace = chain([30, 10, 60], parameters=[{"a"}, {"b"}, {"a", "c"}])
    costs = call_costs(trace, {"a": 50, "b": 30, "c": 20})
    assert costs == pytest.approx([0.3 + 0.1 * 0.5, 0.1 + 0.1 * 0.3, 0.6 + 0.1 * 0.2]), "a shared parameter counts once"
    assert call_costs(chain([0, 0], parameters=[{"a"}, {"b"}]), {"a": 3, "b": 1}) == pytest.approx([0.75, 0.25])
    assert call_costs(chain([0, 0], parameters=[set(), set()]), {}) == [0.0, 0.0]


def test_embedding_and_head_count() -> None:
    """A head with a big vocabulary is worth some blocks; an embedding only its parameters."""
    names = ["embed", *[f"blocks.{i}" for i in range(8)], "head"]
    trace = chain([0, *[100] * 8, 400], names)
    sizes = {"embed.weight": 1000, "head.weight": 1000, **{f"blocks.{i}.weight": 100 for i in range(8)}}
    assert bounds_of(partition(trace, sizes, 2)) == [7]
    light = chain([0, *[100] * 8, 0], names)
    assert bounds_of(partition(light, {**sizes, "head.weight": 0}, 2)) == [5]


def traced(name: str) -> tuple[Trace, dict[str, int], nn.Module]:
    case = ZOO[name]
    torch.manual_seed(0)
    module = case.build()
    module.log = module.log_dict = lambda *args, **kwargs: None  # type: ignore[method-assign]
    book = PlanBook(module, find_units(module), 2, StepObserver())
    trace = book.trace(lambda batch: module.training_step(batch, 0), case.batches(1, 4, torch.float32)[0])
    return trace, {parameter: p.numel() for parameter, p in module.named_parameters()}, module


@pytest.mark.parametrize(
    ("name", "first_of_second"),
    [
        ("gpt_untied", "model.transformer.h.2"),
        ("gpt_deep", "model.transformer.h.4"),
        ("torch_encoder", "encoder.layers.2"),
        ("module_dict_trunk", "layers.2.norm"),
    ],
)
def test_real_models_are_cut_in_the_middle(name: str, first_of_second: str) -> None:
    trace, sizes, _ = traced(name)
    stages = partition(trace, sizes, 2)
    assert trace.names[stages.index(1)] == first_of_second


# ------------------------------------------------------------------------------------------------ traffic


def test_the_fewest_bytes_among_even_cuts() -> None:
    """Downsampling between blocks of the same cost: cut where little goes over."""
    trace = chain([1000, 20, 1000], widths=[64, 8, 8])
    assert partition(trace, sizes_of(trace, 0), 2) == (0, 0, 1)
    trace = chain([1000, 20, 1000], widths=[8, 64, 64])
    assert partition(trace, sizes_of(trace, 0), 2) == (0, 1, 1)
    trace = chain([1000, 200, 1000], widths=[8, 64, 64])
    assert partition(trace, sizes_of(trace, 0), 2) == (0, 1, 1)


def test_traffic_never_costs_more_than_a_little_balance() -> None:
    trace = chain([1000, 1000, 1000, 1000], widths=[1, 1000, 1, 1])
    assert partition(trace, sizes_of(trace, 0), 2) == (0, 0, 1, 1)


def test_live_values_of_a_chain_and_of_skips() -> None:
    trace = chain([1] * 5, extra={3: {(0, 0)}, 4: {(1, 0)}}, tail={(4, 0), (2, 0)})
    assert live_values(trace, (0, 0, 1, 1, 2), 3) == (((0, 0), (1, 0)), ((1, 0), (2, 0), (3, 0)))
    assert live_values(trace, (0,) * 5, 1) == ()
    assert live_values(trace, (0, 0, 0, 0, 0), 2) == (((2, 0), (4, 0)),), "the tail is on the last stage"


def test_live_bytes() -> None:
    trace = chain([1, 1, 1], widths=[4, 16, 1])
    trace.calls[1].outputs += [TensorInfo((2, 3), torch.float16, False), "text", TensorInfo((), torch.int64, False)]
    keys: list[Key] = [(0, 0), (1, 0), (1, 1), (1, 3)]
    assert live_bytes(trace, keys) == 2 * 4 * 4 + 2 * 16 * 4 + 6 * 2 + 8
    assert live_bytes(trace, []) == 0


# ------------------------------------------------------------------------------------------------ groups


def test_groups_are_kept_together() -> None:
    """Four pieces of two blocks each; the even cut by pieces would go through a block."""
    groups = ["a"] * 4 + ["b"] * 4 + ["c"] * 4
    names = [f"{group}.{index}" for index, group in enumerate(groups)]
    trace = chain([100] * 12, names, groups)
    stages = partition(trace, sizes_of(trace, 0), 2)
    assert bounds_of(stages) in ([4], [8])


def test_groups_are_cut_where_there_are_too_few() -> None:
    groups = ["a"] * 4 + ["b"] * 4
    names = [f"{group}.{index}" for index, group in enumerate(groups)]
    trace = chain([100] * 8, names, groups)
    assert partition(trace, sizes_of(trace, 0), 4) == (0, 0, 1, 1, 2, 2, 3, 3)


# ------------------------------------------------------------------------------------------------ refusals


def test_too_few_units_says_how_many() -> None:
    trace = chain([1, 1, 1], names=["embed", "block", "head"])
    with pytest.raises(StepError) as caught:
        partition(trace, sizes_of(trace), 4)
    text = str(caught.value)
    assert "calls 3 units (embed, block, head), too few for 4" in text
    assert "Use at most 3 stages" in text
    assert "split_points" in text


def test_hidden_values_leave_cuts_elsewhere() -> None:
    """The middle cannot be cut; a neighbour is taken."""
    trace = chain([100] * 4, extra={2: {(1, HIDDEN)}})
    assert bounds_of(partition(trace, sizes_of(trace, 0), 2)) in ([1], [3])
    trace = chain([100] * 4, extra={3: {(1, HIDDEN)}})
    assert bounds_of(partition(trace, sizes_of(trace, 0), 2)) == [1]


@pytest.mark.parametrize("reader", [{"extra": {3: {(0, HIDDEN)}}}, {"tail": {(3, 0), (0, HIDDEN)}}])
def test_a_hidden_value_over_every_cut_is_refused_by_name(reader: dict[str, Any]) -> None:
    trace = chain([100] * 4, **reader)
    with pytest.raises(StepError) as caught:
        partition(trace, sizes_of(trace, 0), 2)
    text = str(caught.value)
    assert "A value made inside 'blocks.0' is read outside" in text
    assert "Return the value from 'blocks.0'" in text


def test_one_checkpoint_over_several_units_is_not_cut() -> None:
    trace = chain([100] * 6)
    for call in trace.calls[1:5]:
        call.region = 0 if call.index < 4 else 1
    assert bounds_of(partition(trace, sizes_of(trace, 0), 2)) == [4], "not in the middle of the first"
    for call in trace.calls:
        call.region = 0
    with pytest.raises(StepError, match=r"inside one `torch.utils.checkpoint` cannot be divided.*at most 1 stages"):
        partition(trace, sizes_of(trace, 0), 2)


def test_a_step_that_could_not_be_followed_says_why() -> None:
    trace = chain([100, 100])
    trace.tail_error = ValueError("looks at data")
    with pytest.raises(StepError, match=r"not be followed further than 'blocks.1' \(looks at data\)"):
        partition(trace, sizes_of(trace, 0), 3)


# ------------------------------------------------------------------------------------------------ split points


@pytest.mark.parametrize(
    ("points", "num_stages", "expected"),
    [
        (["blocks.1"], 2, (0, 1, 1, 1)),
        (["blocks.3"], 2, (0, 0, 0, 1)),
        (["blocks.1", "blocks.2"], 3, (0, 1, 2, 2)),
        (["blocks.0", "blocks.1", "blocks.2"], 3, (0, 1, 2, 2)),
        (["blocks.0", "blocks.3"], 2, (0, 0, 0, 1)),
    ],
)
def test_split_points_begin_stages(points: list[str], num_stages: int, expected: tuple[int, ...]) -> None:
    trace = chain([1, 1, 1, 100])
    assert partition(trace, sizes_of(trace), num_stages, points) == expected


def test_a_split_point_that_is_not_called_itself() -> None:
    trace = chain([1] * 4, names=["embed", "layers.0.norm", "layers.0.up", "layers.10.norm"])
    assert partition(trace, sizes_of(trace), 2, ["layers.0"]) == (0, 1, 1, 1)
    with pytest.raises(StepError, match="'layers.1', which the step never calls"):
        partition(trace, sizes_of(trace), 2, ["layers.1"])


@pytest.mark.parametrize(
    ("points", "words"),
    [
        (["blocks.2", "blocks.1"], ["[2, 1]", "each beginning later"]),
        (["blocks.1", "blocks.1"], ["[1, 1]", "each beginning later"]),
        (["blocks.1"], ["begins 2 stages", "3 are needed", "pipeline_parallel_size x stages_per_rank"]),
        (["blocks.1", "blocks.2", "blocks.3"], ["begins 4 stages", "3 are needed"]),
        ([], ["begins 1 stages"]),
        (["blocks.1", "other"], ["'other', which the step never calls", "blocks.0, blocks.1, blocks.2, blocks.3"]),
    ],
)
def test_split_points_that_do_not_fit(points: list[str], words: list[str]) -> None:
    trace = chain([1] * 4)
    with pytest.raises(StepError) as caught:
        partition(trace, sizes_of(trace), 3, points)
    for word in words:
        assert word in str(caught.value)


def test_split_points_through_a_hidden_value() -> None:
    trace = chain([1] * 4, extra={2: {(1, HIDDEN)}})
    with pytest.raises(StepError, match="A value made inside 'blocks.1'"):
        partition(trace, sizes_of(trace), 2, ["blocks.2"])
    assert partition(trace, sizes_of(trace), 2, ["blocks.1"]) == (0, 1, 1, 1)
