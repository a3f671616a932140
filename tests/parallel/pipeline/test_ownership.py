"""Which stages hold what."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.pipeline.ownership import Ownership, find_ownership
from lnn_lightning.parallel.step.trace import Call, Trace
from lnn_lightning.parallel.step.units import find_units


class Net(nn.Module):
    """Embedding, four blocks, a norm that is never called, a head; some tensors of its own."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("mask", torch.ones(2))
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(4)])
        self.unused = nn.LayerNorm(4)
        self.head = nn.Linear(4, 8, bias=False)
        if tied:
            self.head.weight = self.embed.weight


UNITS = ["embed", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"]


def trace_of(net: nn.Module, units: Sequence[str], glue: dict[int, set[str]] | None = None, **rest: object) -> Trace:
    names = {id(p): name for name, p in net.named_parameters()}
    calls = []
    for index, unit in enumerate(units):
        own = {names[id(p)] for p in net.get_submodule(unit).parameters()}
        extra = frozenset((glue or {}).get(index, set()))
        calls.append(Call(index, unit, unit, parameters=frozenset(own) | extra, glue_parameters=extra))
    return Trace(calls, **rest)  # type: ignore[arg-type]


def own(net: nn.Module, trace: Trace, stage_of: Sequence[int], num_stages: int) -> Ownership:
    return find_ownership(net, find_units(net), trace, stage_of, num_stages)


def stages(ownership: Ownership, *names: str) -> list[list[int]]:
    return [sorted(ownership.tensors[name]) for name in names]


def test_units_and_their_tensors_live_where_they_are_called() -> None:
    net = Net()
    ownership = own(net, trace_of(net, UNITS), (0, 0, 0, 1, 1, 2), 3)
    assert {name: sorted(found) for name, found in ownership.units.items()} == {
        "embed": [0],
        "blocks.0": [0],
        "blocks.1": [0],
        "blocks.2": [1],
        "blocks.3": [1],
        "unused": [1],
        "head": [2],
    }
    assert stages(ownership, "embed.weight", "blocks.1.0.weight", "blocks.2.0.bias", "head.weight") == [
        [0],
        [0],
        [1],
        [2],
    ]
    assert stages(ownership, "blocks.0.1.running_mean", "blocks.3.1.num_batches_tracked") == [[0], [1]]
    assert stages(ownership, "unused.weight") == [[1]], "a unit that is never called lives where the one before it does"
    assert set(ownership.tensors) == {name for name, _ in [*net.named_parameters(), *net.named_buffers()]}


class Averaged(nn.Module):
    """A model and a copy of it that follows its weights and is never called."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        for name in (first, second):
            part = nn.Module()
            part.embed = nn.Linear(2, 2)
            part.layers = nn.ModuleList([nn.Sequential(nn.Linear(2, 2)) for _ in range(4)])
            self.add_module(name, part)


@pytest.mark.parametrize(("called", "names"), [("model", ("model", "ema")), ("student", ("teacher", "student"))])
def test_a_copy_lives_with_its_original(called: str, names: tuple[str, str]) -> None:
    net = Averaged(*names)
    (copy,) = set(names) - {called}
    trace = trace_of(net, [f"{called}.embed", *[f"{called}.layers.{i}" for i in range(4)]])
    ownership = own(net, trace, (0, 0, 0, 1, 1), 2)
    for unit, stage in [("embed", 0), ("layers.0", 0), ("layers.1", 0), ("layers.2", 1), ("layers.3", 1)]:
        assert sorted(ownership.units[f"{called}.{unit}"]) == [stage]
        assert sorted(ownership.units[f"{copy}.{unit}"]) == [stage], unit


def test_units_before_the_first_called_one_are_on_the_first_stage() -> None:
    net = Net()
    ownership = own(net, trace_of(net, ["blocks.1", "blocks.2", "head"]), (0, 1, 1), 2)
    assert [sorted(ownership.units[name]) for name in ("embed", "blocks.0", "blocks.3")] == [[0], [0], [1]]


def test_a_tied_parameter_lives_on_both_stages_under_its_first_name() -> None:
    net = Net(tied=True)
    ownership = own(net, trace_of(net, UNITS), (0, 0, 0, 1, 1, 1), 2)
    assert stages(ownership, "embed.weight") == [[0, 1]]
    assert "head.weight" not in ownership.tensors


def test_a_unit_called_on_several_stages_lives_on_each() -> None:
    net = Net()
    ownership = own(net, trace_of(net, ["embed", "blocks.0", "blocks.1", "blocks.0", "head"]), (0, 0, 1, 1, 1), 2)
    assert sorted(ownership.units["blocks.0"]) == [0, 1]
    assert stages(ownership, "blocks.0.0.weight", "blocks.0.1.running_var") == [[0, 1], [0, 1]]


def test_parameters_of_glue_live_where_it_needs_them() -> None:
    net = Net()
    in_the_middle = trace_of(net, UNITS, glue={3: {"scale"}})
    assert stages(own(net, in_the_middle, (0, 0, 0, 1, 1, 2), 3), "scale") == [[1]]
    at_the_end = trace_of(net, UNITS, tail_parameters=frozenset({"scale"}))
    assert stages(own(net, at_the_end, (0, 0, 0, 1, 1, 2), 3), "scale") == [[2]]
    both = trace_of(net, UNITS, glue={0: {"scale"}}, tail_parameters=frozenset({"scale", "embed.weight"}))
    assert stages(own(net, both, (0, 0, 0, 1, 1, 2), 3), "scale", "embed.weight") == [[0, 2], [0, 2]]
    everywhere = trace_of(net, UNITS, everywhere=frozenset({"scale"}))
    assert stages(own(net, everywhere, (0, 0, 0, 1, 1, 2), 3), "scale") == [[0, 1, 2]]


def test_tensors_of_the_modules_around_the_units() -> None:
    """A parameter nobody uses is on the last stage; a buffer is anybody's."""
    net = Net()
    ownership = own(net, trace_of(net, UNITS), (0, 0, 0, 1, 1, 2), 3)
    assert stages(ownership, "scale", "mask") == [[2], [0, 1, 2]]


def test_one_stage_has_all() -> None:
    net = Net(tied=True)
    ownership = own(net, trace_of(net, UNITS), (0,) * 6, 1)
    assert {tuple(found) for found in ownership.tensors.values()} == {(0,)}
    twice = own(net, trace_of(net, [*UNITS[:-1], *UNITS]), (0,) * 11, 1)
    assert {tuple(found) for found in twice.tensors.values()} == {(0,)}


def test_two_passes_through_the_blocks_are_refused() -> None:
    net = Net()
    twice = trace_of(net, [*UNITS, *UNITS])
    with pytest.raises(StepError) as caught:
        own(net, twice, (0,) * 6 + (1,) * 6, 2)
    text = str(caught.value)
    assert "of the parameters would have to live on several pipeline stages" in text
    assert "goes through its blocks more than once" in text
    assert "concatenate" in text


def test_a_penalty_over_all_parameters_is_refused() -> None:
    net = Net()
    every = frozenset(name for name, _ in net.named_parameters())
    with pytest.raises(StepError) as caught:
        own(net, trace_of(net, UNITS, tail_parameters=every), (0, 0, 0, 1, 1, 2), 3)
    text = str(caught.value)
    assert "reads them outside of their modules" in text
    assert "`weight_decay`" in text
    assert "  " not in text, "line breaks of the source do not show"


def test_a_little_sharing_is_not() -> None:
    net = Net()
    few = frozenset({"embed.weight", "scale"})
    ownership = own(net, trace_of(net, UNITS, tail_parameters=few), (0, 0, 0, 1, 1, 1), 2)
    assert stages(ownership, "embed.weight") == [[0, 1]]
