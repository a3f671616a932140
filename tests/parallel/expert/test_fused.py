"""Stacked experts shared out over ranks: the numbers of one process."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.expert.axis import ExpertAxis
from lnn_lightning.parallel.expert.install import ExpertSharding, prepare_seams
from lnn_lightning.parallel.tensor.axis import TensorAxis
from tests.helpers.ranks import run_ranks
from tests.parallel.expert.families import FAMILIES, family


def tokens(rank: int, step: int = 0, width: int = 16) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(2, 5 + 2 * rank, width, generator=generator, dtype=torch.float64)


def out_of(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


def everyones(block: nn.Module, ranks: int, steps: int = 1) -> tuple[list[list[Tensor]], dict[str, Tensor | None]]:
    """Outputs by rank and step, and gradients of the mean over the ranks of their losses, on one process."""
    outputs: list[list[Tensor]] = []
    for rank in range(ranks):
        outputs.append([])
        for step in range(steps):
            value = tokens(rank, step).requires_grad_()
            out = out_of(block(value))
            (out.square().mean() / ranks).backward()
            outputs[-1] += [out.detach(), value.grad * ranks]
    return outputs, {name: each.grad for name, each in block.named_parameters()}


def compare(block: nn.Module, reference: nn.Module, sharding: ExpertSharding, tensor: int = 1) -> float:
    """The largest difference of outputs and gradients; ``tensor`` neighbours have the same tokens."""
    ranks, rank = dist.get_world_size() // tensor, dist.get_rank() // tensor
    wanted, gradients = everyones(reference, ranks, steps=2)
    worst, got = 0.0, []
    for step in range(2):
        value = tokens(rank, step).requires_grad_()
        out = out_of(block(value))
        out.square().mean().backward()
        got += [out.detach(), value.grad]
    for a, b in zip(got, wanted[rank], strict=True):
        worst = max(worst, float((a - b).abs().max()))
    for name, parameter in block.named_parameters():
        wanted_gradient, gradient = gradients[name], parameter.grad
        if not sharding.lives_here(name):
            continue
        assert (gradient is None) == (wanted_gradient is None), name
        if gradient is None or wanted_gradient is None:
            continue
        if name in sharding.names:
            assert gradient.shape == sharding.local_shape(name)
            wanted_gradient = sharding.local(name, wanted_gradient)
        else:
            dist.all_reduce(gradient)
            gradient /= ranks * tensor
        worst = max(worst, float((gradient - wanted_gradient).abs().max()))
    return worst


def shared_out(block: nn.Module, axis: ExpertAxis, **options: Any) -> ExpertSharding:
    sharding = ExpertSharding(block, prepare_seams(block), axis, **options)
    sharding.install()
    assert sharding.seams and not sharding.left, sharding.left
    return sharding


def block_of(name: str, experts: int, implementation: str) -> nn.Module:
    model = family(name, experts, implementation)
    layer = model.model.layers[0]  # type: ignore[union-attr,index]
    return next(each for each in layer.children() if hasattr(each, "experts")).double()


def _equal(rank: int, size: int, cases: list[tuple[str, int, str]]) -> dict[str, float]:
    found = {}
    for name, experts, implementation in cases:
        reference = block_of(name, experts, implementation).train(name != "phimoe")  # which samples in training
        block = copy.deepcopy(reference)
        sharding = shared_out(block, ExpertAxis(size, rank, dist.group.WORLD, 1 / size))
        axis = sharding.axis
        rows = [parameter.shape[0] for each, parameter in block.named_parameters() if each in sharding.names]
        assert set(rows) == {len(axis.span(experts))}
        found[f"{name} {experts} {implementation}"] = compare(block, reference, sharding)
    return found


def test_two_ranks_equal_one_process() -> None:
    """pytorch#160285, DeepSpeed#6545: gradients of experts as on one process, not twice that. All families."""
    cases = [(name, 4, "eager") for name in FAMILIES] + [("mixtral", 6, "batched_mm")]
    for found in run_ranks(_equal, 2, cases):
        assert max(found.values()) < 1e-12, found


def test_four_ranks_equal_one_process() -> None:
    cases = [("mixtral", 4, "eager"), ("mixtral", 6, "batched_mm"), ("gpt_oss", 6, "eager"), ("qwen2_moe", 6, "eager")]
    for found in run_ranks(_equal, 4, cases):
        assert max(found.values()) < 1e-12, found


def _as_by_default(rank: int, size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        whole = block_of("mixtral", 4, "grouped_mm").experts.to(dtype)
        experts = copy.deepcopy(whole)
        shared_out(experts, ExpertAxis(size, rank, dist.group.WORLD, 1 / size))
        hidden, weights = torch.randn(9, 16, dtype=dtype), torch.rand(9, 2)
        index = torch.rand(9, 4).argsort(1)[:, :2]
        got, wanted = experts(hidden, index, weights), whole(hidden, index, weights)
        assert got.dtype == wanted.dtype == dtype
        torch.testing.assert_close(got, wanted)
        got.sum().backward()
        assert all(each.grad is not None and each.grad.dtype == dtype for each in experts.parameters())


def test_the_implementation_that_transformers_takes_by_default() -> None:
    run_ranks(_as_by_default, 2)


def literal(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Stacked experts of Mixtral, one row after the other."""
    out = torch.zeros_like(hidden)
    for token, choices in enumerate(index.tolist()):
        for place, expert in enumerate(choices):
            if 0 <= expert < 4:
                gate, up = (module.gate_up_proj[expert] @ hidden[token]).chunk(2)
                made = module.down_proj[expert] @ (nn.functional.silu(gate) * up)
                out[token] = out[token] + weights[token, place] * made
    return out


def _odd_calls(rank: int, size: int) -> None:
    whole = block_of("mixtral", 4, "eager").experts
    experts = copy.deepcopy(whole)
    calls = []
    handle = experts.register_forward_hook(lambda *given: calls.append(1))
    sharding = shared_out(experts, ExpertAxis(size, rank, dist.group.WORLD, 1 / size))
    assert type(experts) is type(whole) and experts.state_dict().keys() == whole.state_dict().keys()
    hidden = tokens(rank)[0]
    count = hidden.shape[0]
    weights = torch.rand(count, 2, dtype=torch.float64)

    for index in (torch.zeros(count, 2), torch.full((count, 2), 4), torch.randint(-1, 5, (count, 2))):
        index, before = index.long(), index.clone()
        got, value, factors = [], hidden.clone().requires_grad_(), weights.clone().requires_grad_()
        experts.zero_grad()
        got = experts(value, top_k_weights=factors, top_k_index=index)
        got.sum().backward()
        theirs, those = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
        wanted = literal(whole, theirs, index, those)
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
        if wanted.requires_grad and wanted.grad_fn is not None:
            wanted.sum().backward()
        for mine, other in ((value, theirs), (factors, those)):
            torch.testing.assert_close(mine.grad, torch.zeros_like(mine) if other.grad is None else other.grad)
        assert all(each.grad is not None for each in experts.parameters()), "no token came: zeros, not None"
        assert torch.equal(index, before)
    assert calls == [1, 1, 1]
    none = experts(hidden[:0], torch.zeros(0, 2).long(), weights[:0]) if rank == 0 else experts(hidden, index, weights)
    assert none.shape == (hidden[:0] if rank == 0 else hidden).shape

    load, dropped = sharding.loads()[""]
    assert load.shape == (4,) and int(dropped) == 0 and int(load[0]) >= 2 * count
    assert sharding.loads() == {}
    experts.eval()
    experts(hidden, index, weights)
    assert sharding.loads() == {}

    handle.remove()
    other = copy.deepcopy(experts)
    torch.testing.assert_close(other(hidden, index, weights), literal(whole, hidden, index, weights))
    with pytest.raises(StepError, match="Save `state_dict"):
        pickle.loads(pickle.dumps(experts))(hidden, index, weights)
    with pytest.raises(StepError, match="an expert and a weight for each choice"):
        experts(hidden, index, weights[:, :1])
    if rank == 1:
        weights[0, 0] = float("nan")
    with pytest.raises(StepError, match=r"rank 1: .*weights of experts that are not finite"):
        experts(hidden, index, weights)


def test_calls_that_are_odd() -> None:
    run_ranks(_odd_calls, 2)


def _capacity(rank: int, size: int) -> None:
    whole = block_of("mixtral", 4, "eager").experts
    experts = copy.deepcopy(whole)
    axis = ExpertAxis(size, rank, dist.group.WORLD if size > 1 else None, 1 / size)
    sharding = shared_out(experts, axis, capacity_factor=0.5)
    hidden = torch.randn(12, 16, dtype=torch.float64)
    index, weights = torch.rand(12, 4).argsort(1)[:, :2], torch.rand(12, 2, dtype=torch.float64)
    taken, kept = [0] * 4, index.clone()
    ranking = weights.argsort(1, descending=True)
    for choice in range(2):
        for token in range(12):
            place = int(ranking[token, choice])
            expert = int(index[token, place])
            taken[expert] += 1
            if taken[expert] > 3:  # 0.5 * 2 * 12 / 4
                kept[token, place] = -1
    torch.testing.assert_close(experts(hidden, index, weights), literal(whole, hidden, kept, weights))
    load, dropped = sharding.loads()[""]
    assert load.tolist() == index.flatten().bincount(minlength=4).tolist()
    assert int(dropped) == int((kept < 0).sum()) > 0


@pytest.mark.parametrize("size", [1, 2])
def test_capacity(size: int) -> None:
    run_ranks(_capacity, size)


def _with_tensor_ranks(rank: int, size: int) -> dict[str, float]:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    tensor = TensorAxis(2, rank % 2, pairs[rank // 2])
    axes = {
        "whole": ExpertAxis(4, rank, dist.group.WORLD, 1 / 2, tensor),
        "divided": ExpertAxis(2, rank // 2, columns[rank % 2], 1 / 2, tensor, divides_experts=True),
    }
    found = {}
    for layout, axis in axes.items():
        for name, experts in [("mixtral", 6), ("gpt_oss", 4)]:
            reference = block_of(name, experts, "eager")
            block = copy.deepcopy(reference)
            sharding = shared_out(block, axis)
            for each, parameter in block.named_parameters():
                wanted = reference.get_parameter(each)
                torch.testing.assert_close(sharding.whole(each, parameter), wanted) if each in sharding.names else None
                assert parameter.shape == (sharding.local_shape(each) if each in sharding.names else wanted.shape)
                for dim, runs in sharding.spans(each) if each in sharding.names else ():
                    assert sum(length for _, _, length in runs) == parameter.shape[dim]
            if layout == "divided":
                share = sum(each.numel() for each in block.parameters()) / sum(
                    e.numel() for e in reference.parameters()
                )
                assert share < 0.3
            found[f"{name} {layout}"] = compare(block, reference, sharding, tensor=2)
    return found


def test_tensor_ranks() -> None:
    for found in run_ranks(_with_tensor_ranks, 4):
        assert max(found.values()) < 1e-12, found


def test_without_data() -> None:
    """The step is traced on values without data: shapes, and work of the real size."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    experts = block_of("mixtral", 4, "eager").experts.float()
    prepare_seams(experts)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, FlopCounterMode(display=False) as flops:
        given = mode.from_tensor(torch.randn(5, 16, requires_grad=True))
        out = experts(given, mode.from_tensor(torch.zeros(5, 2).long()), mode.from_tensor(torch.rand(5, 2)))
    assert out.shape == (5, 16) and out.requires_grad
    assert flops.get_total_flops() == 2 * 5 * 2 * 3 * 16 * 32
