"""Experts are found by structure, and nothing else is taken for experts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lnn_lightning.parallel.expert.find import find_seams
from tests.parallel.expert.families import FAMILIES, LLaMAMoE, family, switch
from tests.zoo import ZOO
from tests.zoo.experts import BLOCKS

HAVE_EXPERTS = {"hf_mixtral", "moe"}


def test_families_of_transformers() -> None:
    for name in FAMILIES:
        seams = find_seams(family(name))
        assert len(seams) >= 1, name
        for seam in seams:
            assert (seam.kind, seam.experts) == ("fused", 4), (name, seam)
            assert seam.name.endswith(".experts") and len(seam.parameters) in (2, 4), (name, seam)
        with torch.device("meta"):
            assert find_seams(family(name)) == seams, name


def test_loops() -> None:
    seams = find_seams(switch())
    assert [seam.name for seam in seams] == [
        "encoder.block.1.layer.1.mlp.experts",
        "decoder.block.1.layer.2.mlp.experts",
    ]
    assert all(seam.kind == "loop" and seam.container == seam.name for seam in seams)
    (seam,) = find_seams(nn.Sequential(LLaMAMoE()))
    assert (seam.name, seam.container, seam.experts) == ("0", "0.experts", 4)
    assert seam.members == tuple(f"0.experts.{index}" for index in range(4))
    for name, make in BLOCKS.items():
        block = make()
        before = {key: value.clone() for key, value in block.state_dict().items()}
        random = torch.get_rng_state()
        assert [each.kind for each in find_seams(block)] == ["loop"], name
        assert torch.equal(random, torch.get_rng_state())
        assert all(torch.equal(before[key], value) for key, value in block.state_dict().items()), name


@pytest.mark.parametrize("part", range(2))
def test_nothing_else_is_taken_for_experts(part: int) -> None:
    for case in list(ZOO.values())[part::2]:
        if case.name in HAVE_EXPERTS or case.name.startswith("moe_"):
            continue
        torch.manual_seed(0)
        assert find_seams(case.build()) == [], case.name


class Trunk(nn.Module):
    """As many classes as layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Tasks(nn.Module):
    """As many tasks as classes."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(8, 3) for _ in range(4))
        self.kind = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.kind(x), *[head(x) for head in self.heads]], -1)


class Stack(nn.Module):
    """Stacked weights and three arguments, but no experts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return torch.einsum("nd,edf->nf", x, self.weight) * weights.sum(-1, keepdim=True)


@pytest.mark.parametrize("module", [Trunk(), Tasks(), Stack()], ids=lambda module: type(module).__name__)
def test_look_alikes(module: nn.Module) -> None:
    assert find_seams(module) == []
