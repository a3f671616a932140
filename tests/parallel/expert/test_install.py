"""Seams of all kinds: checked, shared out, or left alone with a reason."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lnn_lightning.parallel.errors import LayoutError
from lnn_lightning.parallel.expert.axis import ExpertAxis
from lnn_lightning.parallel.expert.install import ExpertSharding, prepare_seams
from lnn_lightning.parallel.step.standin import is_stand_in
from lnn_lightning.parallel.tensor.axis import TensorAxis
from tests.helpers.ranks import run_ranks
from tests.parallel.expert.families import LLaMAMoE, switch
from tests.parallel.expert.test_fused import block_of, compare, shared_out


def loop(name: str) -> nn.Module:
    torch.manual_seed(0)
    return LLaMAMoE().double() if name == "litgpt" else switch().encoder.block[1].layer[1].mlp.double()


def _loops(rank: int, size: int) -> dict[str, float]:
    found = {}
    for name in ("litgpt", "switch"):
        reference = loop(name)
        block = copy.deepcopy(reference)
        sharding = shared_out(block, ExpertAxis(size, rank, dist.group.WORLD, 1 / size))
        for each, parameter in block.named_parameters():
            assert is_stand_in(parameter) == (not sharding.lives_here(each))
            assert (each in sharding.names) == (".experts." in f".{each}")
            if each in sharding.names:
                assert torch.equal(sharding.whole(each, parameter), reference.get_parameter(each))
        found[name] = compare(block, reference, sharding)
    return found


def test_loops() -> None:
    for found in run_ranks(_loops, 2):
        assert max(found.values()) < 1e-12, found


def _divided_loops(rank: int, size: int) -> dict[str, float]:
    found = {}
    for name in ("litgpt", "switch"):
        reference = loop(name)
        block = copy.deepcopy(reference)
        sharding = shared_out(block, ExpertAxis(tensor=TensorAxis(2, rank, dist.group.WORLD), divides_experts=True))
        for each in sharding.names:
            assert block.get_parameter(each).numel() * 2 == reference.get_parameter(each).numel()
            assert torch.equal(sharding.whole(each, block.get_parameter(each)), reference.get_parameter(each))
            with sharding.whole_shapes():
                assert block.get_parameter(each).shape == sharding.whole_shape(each)
        found[name] = compare(block, reference, sharding, tensor=2)
    return found


def test_each_expert_over_tensor_ranks() -> None:
    for found in run_ranks(_divided_loops, 2):
        assert max(found.values()) < 1e-12, found


class Secretive(nn.Module):
    """Knows the number of experts from elsewhere: its code does not run on a part of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 16, 16, dtype=torch.float64))

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(4):
            token, place = torch.where(index == expert)
            out = out.index_add(0, token, weights[token, place, None] * (x[token] @ self.weight[expert]))
        return out


def _left_alone(rank: int, size: int) -> None:
    axis = ExpertAxis(size, rank, dist.group.WORLD, 1 / size)
    random = torch.get_rng_state()
    block = nn.ModuleList([Secretive(), block_of("mixtral", 4, "eager"), block_of("mixtral", 4, "eager")])
    block[1].experts.down_proj = block[2].experts.down_proj
    random = torch.get_rng_state()
    sharding = ExpertSharding(block, prepare_seams(block), axis)
    with pytest.warns(UserWarning, match="not shared out") if rank == 0 else pytest.MonkeyPatch.context():
        sharding.install()
    assert set(sharding.left) == {"0", "1.experts", "2.experts"} and not sharding.names and not sharding.seams
    assert "IndexError" in sharding.left["0"], sharding.left
    assert "more than one place" in sharding.left["1.experts"]
    assert torch.equal(random, torch.get_rng_state())
    assert block[0].weight.shape[0] == 4 and block[0].weight.grad is None
    x, index = torch.randn(3, 16, dtype=torch.float64), torch.tensor([[0], [1], [3]])
    assert block[0](x, index, torch.ones(3, 1)).shape == x.shape

    normed = LLaMAMoE().double()
    for expert in normed.experts:
        expert.proj = nn.Sequential(expert.proj, nn.BatchNorm1d(expert.proj.out_features, dtype=torch.float64))
    sharding = ExpertSharding(normed, prepare_seams(normed), axis)
    with pytest.warns(UserWarning, match="BatchNorm") if rank == 0 else pytest.MonkeyPatch.context():
        sharding.install()
    assert not sharding.names

    small = block_of("mixtral", 4, "eager")
    with pytest.raises(LayoutError, match=r"4 experts, too few for 8 expert ranks.*at most 4"):
        ExpertSharding(small, prepare_seams(small), ExpertAxis(8, 0, dist.group.WORLD))
    odd = LLaMAMoE(width=15).double()
    tensor = TensorAxis(4, 0, dist.group.WORLD)
    for name, each in odd.named_modules():
        if name.endswith(("fc_1", "fc_2", "proj")):
            each.weight.data = each.weight.data[:29] if "fc" in name else each.weight.data[:, :29]
    with pytest.raises(LayoutError, match=r"cannot be divided over 4 tensor ranks.*divide_experts=False"):
        ExpertSharding(odd, prepare_seams(odd), ExpertAxis(tensor=tensor, divides_experts=True)).install()


def test_left_alone() -> None:
    run_ranks(_left_alone, 2)


def _parts(rank: int, size: int) -> None:
    block = block_of("mixtral", 6, "eager")
    whole = {name: each.detach().clone() for name, each in block.named_parameters()}
    objects = dict(block.named_parameters())
    sharding: Any = shared_out(block, ExpertAxis(size, rank, dist.group.WORLD, 1 / size))
    counts = [2, 2, 1, 1]
    for name in sharding.names:
        parameter = block.get_parameter(name)
        assert parameter is objects[name] and parameter.shape[0] == counts[rank]
        assert sharding.spans(name) == [(0, [(0, sum(counts[:rank]), counts[rank])])]
        assert torch.equal(sharding.whole(name, parameter), whole[name])
        assert torch.equal(sharding.local(name, whole[name]), parameter)
        with sharding.whole_shapes():
            assert block.get_parameter(name).shape == whole[name].shape
        assert block.get_parameter(name) is parameter


def test_experts_that_do_not_divide_evenly() -> None:
    run_ranks(_parts, 4)
