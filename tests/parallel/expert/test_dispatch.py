"""Dispatch against a plain loop over tokens and experts in one process."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.expert.axis import ExpertAxis
from lnn_lightning.parallel.expert.capacity import within_capacity
from lnn_lightning.parallel.expert.dispatch import _flags, run_experts, run_experts_beside
from lnn_lightning.parallel.expert.exchange import counting
from lnn_lightning.parallel.layout import Layout
from tests.helpers.ranks import run_ranks
from tests.parallel.expert.routed import (
    OUT,
    WIDTH,
    Case,
    Place,
    local_experts,
    looped,
    make_case,
    place_of,
    wanted_part,
)

LAYOUTS = [
    Layout(1, 4, expert_parallel_size=4),
    Layout(1, 4, expert_parallel_size=2),
    Layout(1, 2, 2, expert_parallel_size=2),
    Layout(1, 2, 2, expert_parallel_size=4),
    Layout(1, 2, 2, expert_parallel_size=2, divides_experts=True),
    Layout(1, 2, 2, expert_parallel_size=1, divides_experts=True),
]
CASES = [([7, 0, 4, 1], 5, 2), ([3, 5, 2, 8], 4, 1), ([0, 6, 0, 1], 4, 3), ([0, 0, 0, 0], 4, 2)]
"""Tokens of each data rank, experts, choices."""
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def _once(case: Case, place: Place) -> list[Tensor]:
    """The result of this rank's tokens, their gradient, and those of its experts (averaged as the strategy does)."""
    weights, compute = local_experts(case, place.axis)
    values = case.values[place.data].clone().requires_grad_()
    result = run_experts(values, case.expert[place.data], case.experts, place.axis, compute)
    (result * case.weights[place.data]).sum().backward()
    for each in weights:
        dist.all_reduce(each.grad, group=place.same)
        each.grad /= place.layout.expert_data_size
    # The gradient of a rank's tokens is that of its own loss; of the mean it is its share.
    return [result.detach(), values.grad / place.layout.data_parallel_size, *(each.grad for each in weights)]


def _every_layout(rank: int, world_size: int) -> None:
    for layout in LAYOUTS:
        place = place_of(layout)
        for tokens, experts, choices in CASES:
            case = make_case(tokens[: layout.data_parallel_size], experts, choices)
            results, leaves = looped(case)
            wanted = [
                results[place.data].detach(),
                leaves.values[place.data].grad,
                wanted_part(leaves.first.grad, place.axis, 2),
                wanted_part(leaves.second.grad, place.axis, 1),
            ]
            got = _once(case, place)
            for name, one, other in zip(("result", "values", "first", "second"), got, wanted, strict=True):
                where = f"{name} of {tokens} on {layout}"
                torch.testing.assert_close(one, other, **EXACT, msg=lambda text, where=where: f"{where}: {text}")
            for one, again in zip(got, _once(case, place), strict=True):
                assert torch.equal(one, again)


def test_every_layout_equals_the_loop_and_itself_bit_for_bit() -> None:
    run_ranks(_every_layout, 4)


@pytest.mark.parametrize("choices", [1, 2])
def test_one_rank(choices: int) -> None:
    case = make_case([7], 3, choices)
    results, leaves = looped(case)
    weights, compute = local_experts(case, ExpertAxis())
    values = case.values[0].clone().requires_grad_()

    def in_place(rows: Tensor, counts: list[int]) -> Tensor:
        return compute(rows.mul_(1), counts)

    result = run_experts(values, case.expert[0].int(), 3, ExpertAxis(), in_place)
    (result * case.weights[0]).sum().backward()
    torch.testing.assert_close(result, results[0], **EXACT)
    for one, other in zip([values, *weights], [leaves.values[0], leaves.first, leaves.second], strict=True):
        torch.testing.assert_close(one.grad, other.grad, **EXACT)


def test_experts_that_return_what_they_were_given_keep_their_graph() -> None:
    values = torch.ones(2, 3, requires_grad=True)
    seen = []

    def compute(rows: Tensor, counts: list[int]) -> Tensor:
        seen.append(rows * 3)
        return seen[-1]

    result = run_experts(values, torch.tensor([0, 0]), 1, ExpertAxis(), compute)
    (result.sum() + seen[0].sum()).backward()  # an auxiliary loss on what the experts gave
    assert torch.equal(values.grad, torch.full((2, 3), 6.0))


def _unlike_ranks(rank: int, world_size: int) -> None:
    """Ranks without rows, experts, parameters or gradients of their own still do their part of every exchange."""
    axis = ExpertAxis(world_size, rank, dist.group.WORLD)
    tokens, choices = [4, 0, 3], 2
    random = torch.Generator().manual_seed(0)
    inputs = [torch.randn(each, WIDTH, generator=random) for each in tokens]
    for experts in (1, 2, 3):
        for trained in ((True, False, False), (False, False, True), (False, False, False)):
            for recomputed in (False, True):
                values = inputs[rank].clone().requires_grad_(trained[rank])
                weight = torch.full((WIDTH, OUT), 2.0, requires_grad=experts == 2)

                def compute(rows: Tensor, counts: list[int], weight: Tensor = weight) -> Tensor:
                    return rows @ weight if len(rows) else rows.new_zeros((0, OUT))

                def block(values: Tensor, experts: int = experts, compute: Any = compute) -> Tensor:
                    # All rows go to the last expert.
                    expert = torch.full((len(values) * choices,), experts - 1)
                    return run_experts(values, expert, experts, axis, compute)

                result = checkpoint(block, values, use_reentrant=False) if recomputed else block(values)
                torch.testing.assert_close(result, (inputs[rank] @ weight).repeat_interleave(choices, 0))
                result.sum().backward()
                if values.requires_grad:
                    assert torch.equal(values.grad, torch.full_like(values, 2.0 * choices * OUT))
                owner = rank == next(each for each in range(world_size) if experts - 1 in axis.span(experts, each))
                if weight.requires_grad and owner:
                    torch.testing.assert_close(weight.grad[:, 0], choices * torch.cat(inputs).sum(0))
                else:
                    assert weight.grad is None
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            result = run_experts(inputs[rank], torch.zeros(tokens[rank], dtype=torch.long), 3, axis, lambda r, c: r * 2)
            assert torch.equal(result, inputs[rank] * 2) and not result.requires_grad


def test_ranks_that_have_nothing_of_their_own() -> None:
    run_ranks(_unlike_ranks, 3)


def _refusals(rank: int, world_size: int) -> list[str]:
    axis = ExpertAxis(world_size, rank, dist.group.WORLD)
    values, expert = torch.zeros(2, 3), torch.tensor([0, 1])
    said = []

    def tried(problem: Any = None, gradients: bool = True) -> None:
        with torch.set_grad_enabled(gradients), pytest.raises(StepError) as error:
            run_experts(values, expert, 2, axis, lambda rows, counts: rows, problem=problem)
        said.append(str(error.value))

    tried("the router is bad" if rank == 1 else None)
    router = torch.tensor([0.0, float("nan") if rank == 0 else 1.0])
    tried(("NaN in the router.", ~router.isfinite().all()))
    tried(gradients=rank == 0)
    run_experts(values, expert, 2, axis, lambda rows, counts: rows, problem=("x", torch.tensor(False)))
    with pytest.raises(StepError, match=r"shape \[1, 3\]"):
        run_experts(values, expert, 2, axis, lambda rows, counts: rows[:1])
    with pytest.raises(StepError, match=r"got \[2, 3\] and \[3\]"):
        run_experts(values, torch.tensor([0, 1, 1]), 2, axis, lambda rows, counts: rows)
    values = values.clone().requires_grad_()
    result = run_experts(values, expert, 2, axis, lambda rows, counts: rows * values.new_ones(()).requires_grad_())
    (gradient,) = torch.autograd.grad(result.sum(), values, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()
    return said


def test_problems_of_one_rank_are_raised_on_all() -> None:
    here, there = run_ranks(_refusals, 2)
    assert here[0] == "On rank 1: experts cannot be run, for the reason that is said there."
    assert there[0] == "On rank 1: the router is bad"
    assert here[1] == there[1] == "On rank 0: NaN in the router."
    assert here[2] == there[2]
    assert "without gradients (`torch.no_grad`) on rank 1" in here[2]


def _collectives(rank: int, world_size: int) -> dict[str, Any]:
    from torch.distributed.tensor.debug import CommDebugMode

    axis = ExpertAxis(world_size, rank, dist.group.WORLD)
    tokens, choices, experts = 6, 2, 4
    expert = torch.arange(tokens * choices) % experts  # balanced
    values = torch.randn(tokens, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    with counting() as sent, CommDebugMode() as seen:
        result = run_experts(values, expert, experts, axis, lambda rows, counts: rows * 2)
        forward = (sent.forward, sent.backward)
        result.sum().backward()
    with counting() as uneven:
        run_experts(values, torch.full_like(expert, experts - 1), experts, axis, lambda rows, counts: rows * 2)
    return {
        "forward": forward,
        "all": (sent.forward, sent.backward, sent.counts, sent.exchanges),
        "collectives": {str(name): count for name, count in seen.get_comm_counts().items()},
        "uneven": uneven.forward,
    }


def test_bytes_are_those_of_the_rows_that_live_elsewhere() -> None:
    each = 6 * 2 * WIDTH * 2 // 2  # tokens x choices x width x (ranks - 1) / ranks, in two bytes
    rows = 6 * 2 * WIDTH * 2
    for told in run_ranks(_collectives, 2):
        assert told["forward"] == (2 * each, 0)  # there and back
        assert told["all"] == (2 * each, 2 * each, 5 * 8, 4)  # two experts and three flags, in eight bytes
        assert sum(told["collectives"].values()) == 5, told["collectives"]
        assert all("alltoall" in name for name in told["collectives"])
        assert told["uneven"] == rows  # all go to rank 1: rank 0 sends its rows, rank 1 what comes of them


def _other_things(rank: int, world_size: int) -> None:
    place = place_of(Layout(1, 2, 2, expert_parallel_size=4))
    axis = place.axis

    # Rows may change their kind and width on the way; the shared expert runs beside.
    weight = torch.ones(WIDTH, 3)
    for dtype, autocast in ((torch.float32, True), (torch.bfloat16, False), (torch.float64, False)):
        values = torch.ones(5, WIDTH, dtype=dtype, requires_grad=True)
        context = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
        own = weight.to(dtype).requires_grad_()
        expert = torch.tensor([0, 1, 3, 5, 2])  # the last rank has none, the fourth token no expert
        with context:
            result, shared = run_experts_beside(
                values, expert, 4, axis, lambda rows, counts, own=own: rows @ own, lambda v=values: v * 3
            )
        assert result.dtype == (torch.bfloat16 if autocast else dtype)
        assert result[:, 0].tolist() == [WIDTH, WIDTH, WIDTH, 0, WIDTH]
        (result.sum() + shared.sum()).backward()
        assert values.grad.dtype == dtype
        assert values.grad[:, 0].tolist() == [6, 6, 6, 3, 6]

    # Random numbers: each rank's own within, the same ones afterwards.
    torch.manual_seed(3 + place.data)
    drawn = torch.zeros(())

    def noisy(rows: Tensor, counts: list[int]) -> Tensor:
        drawn.copy_(torch.rand(len(rows) + 1)[0])
        return torch.nn.functional.dropout(rows)

    run_experts(torch.ones(5, WIDTH), torch.tensor([0, 0, 0, 0, 1]), 4, axis, noisy)
    after = torch.rand(())
    everything: list[Any] = [None] * world_size
    dist.all_gather_object(everything, (place.data, drawn.item(), after.item()))
    assert len({drawn for _, drawn, _ in everything}) == world_size
    assert len({(data, after) for data, _, after in everything}) == 2


def test_kinds_autocast_work_beside_and_random_numbers() -> None:
    run_ranks(_other_things, 4)


def _beside(rank: int, world_size: int) -> list[str]:
    axis = ExpertAxis(world_size, rank, dist.group.WORLD)
    values, order = torch.ones(2, WIDTH, requires_grad=True), []

    def meanwhile() -> Tensor:
        order.append(f"shared, {sent.exchanges} sent")
        shared = values * 2
        shared.register_hook(lambda gradient: order.append(f"shared backward, {sent.exchanges} sent"))
        return shared

    def compute(rows: Tensor, counts: list[int]) -> Tensor:
        order.append("experts")
        rows = rows * 1
        rows.register_hook(lambda gradient: order.append(f"experts backward, {sent.exchanges} sent"))
        return rows

    with counting() as sent:
        result, shared = run_experts_beside(values, torch.tensor([0, 1]), 2, axis, compute, meanwhile)
        (result + shared).sum().backward()
    return order


def test_the_shared_expert_runs_while_tokens_and_their_gradients_travel() -> None:
    wanted = ["shared, 1 sent", "experts", "experts backward, 3 sent", "shared backward, 4 sent"]
    assert run_ranks(_beside, 2) == [wanted] * 2


def _against_fairscale(rank: int, world_size: int) -> None:
    from fairscale.nn.moe import MOELayer, Top2Gate
    from fairscale.nn.moe.top2gate import gumbel_rsample

    tokens, local = 24, 2
    experts = local * world_size
    torch.manual_seed(5)
    gate = Top2Gate(WIDTH, experts)
    everyone = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(experts)]
    torch.manual_seed(7 + rank)
    values, seed = torch.randn(tokens, WIDTH), 11 + rank
    axis = ExpertAxis(world_size, rank, dist.group.WORLD)
    mine = torch.nn.ModuleList(everyone[each] for each in axis.span(experts))
    layer = MOELayer(gate, mine)

    def theirs(values: Tensor) -> Tensor:
        torch.manual_seed(seed)
        return layer(values.view(4, -1, WIDTH)).view(tokens, WIDTH)

    def ours(values: Tensor) -> Tensor:
        torch.manual_seed(seed)
        logits = gate.wg(values)
        probabilities = logits.softmax(1)
        first = probabilities.argmax(1)
        second = (logits + gumbel_rsample(logits.shape, logits.device)).scatter(1, first[:, None], -torch.inf).argmax(1)
        expert = within_capacity(torch.stack([first, second], 1), None, experts, 2 * tokens // experts)
        assert (expert < 0).any()
        weights = probabilities.gather(1, expert.clamp_min(0)) * (expert >= 0)
        weights = weights / weights.sum(1, keepdim=True).clamp_min(torch.finfo(torch.float32).eps)

        def compute(rows: Tensor, counts: list[int]) -> Tensor:
            return torch.cat([own(part) for own, part in zip(mine, rows.split(counts), strict=True)])

        results = run_experts(values, expert.flatten(), experts, axis, compute)
        return (results.view(tokens, 2, WIDTH) * weights.unsqueeze(2)).sum(1)

    found = []
    for run in (theirs, ours):
        layer.zero_grad()
        leaf = values.clone().requires_grad_()
        result = run(leaf)
        result.square().sum().backward()
        found.append([result, leaf.grad, *(each.grad.clone() for each in layer.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_capacity_and_dispatch_equal_fairscale() -> None:
    pytest.importorskip("fairscale")
    run_ranks(_against_fairscale, 2)


def test_flags_go_to_the_device_of_the_counts() -> None:
    with FakeTensorMode():
        flags = _flags(torch.zeros(2, dtype=torch.long, device="cuda"), torch.tensor(True), False)
    assert flags.device.type == "cuda" and flags.shape == (2,)
