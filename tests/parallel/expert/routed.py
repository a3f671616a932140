"""What the tests of dispatch share: expert axes on a mesh, some routed tokens, and the plain loop over them."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from lnn_lightning.parallel.expert.axis import ExpertAxis
from lnn_lightning.parallel.layout import Layout, Mesh
from lnn_lightning.parallel.tensor.axis import TensorAxis

WIDTH, HIDDEN, OUT = 6, 8, 5


@dataclass
class Place:
    """Where a rank is: its data rank, its axis, and the ranks that hold the same experts."""

    data: int
    axis: ExpertAxis
    same: dist.ProcessGroup
    layout: Layout


def place_of(layout: Layout) -> Place:
    """This rank's place; collective over all ranks."""
    mesh = Mesh.create(layout, "cpu")
    size = layout.tensor_parallel_size
    tensor = TensorAxis(size, mesh.rank("tensor_parallel"), mesh.group("tensor_parallel")) if size > 1 else None
    axis = ExpertAxis(
        layout.expert_parallel_size,
        mesh.experts.get_local_rank("expert_parallel"),
        mesh.experts.get_group("expert_parallel"),
        layout.expert_data_size / layout.data_parallel_size,
        tensor,
        layout.divides_experts,
    )
    return Place(mesh.rank("data_parallel"), axis, mesh.experts.get_group("expert_data"), layout)


@dataclass
class Case:
    """Routed tokens of some data ranks, two weights of each expert, and what the loss weighs results with."""

    values: list[Tensor]
    expert: list[Tensor]
    first: Tensor
    second: Tensor
    weights: list[Tensor]

    @property
    def experts(self) -> int:
        return len(self.first)

    def fresh(self) -> "Case":
        """The same as new leaves."""
        values = [each.clone().requires_grad_() for each in self.values]
        return replace(
            self,
            values=values,
            first=self.first.clone().requires_grad_(),
            second=self.second.clone().requires_grad_(),
        )


def make_case(tokens: list[int], experts: int, choices: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> Case:
    """Tokens with random experts, some of which do not exist."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)

    return Case(
        [normal(each, WIDTH) for each in tokens],
        [torch.randint(-1, experts + 1, (each * choices,), generator=random) for each in tokens],
        normal(experts, WIDTH, HIDDEN),
        normal(experts, HIDDEN, OUT),
        [normal(each * choices, OUT) for each in tokens],
    )


def looped(case: Case) -> tuple[list[Tensor], Case]:
    """Results of each data rank and, as leaves with gradients of the mean loss, what they come from."""
    leaves = case.fresh()
    results = []
    for values, expert in zip(leaves.values, leaves.expert, strict=True):
        choices = len(expert) // max(len(values), 1)
        rows = [
            (values[row // choices] @ leaves.first[each]).tanh() @ leaves.second[each]
            if 0 <= each < case.experts
            else values.new_zeros(OUT)
            for row, each in enumerate(expert.tolist())
        ]
        results.append(torch.stack(rows) if rows else values.new_zeros((0, OUT)))
    losses = [(result * weights).sum() for result, weights in zip(results, case.weights, strict=True)]
    touched = [each.sum() * 0 for each in (*leaves.values, leaves.first, leaves.second)]  # zeros, not None
    (torch.stack(losses).mean() + torch.stack(touched).sum()).backward()
    return results, leaves


def local_experts(case: Case, axis: ExpertAxis) -> tuple[list[Tensor], Callable[[Tensor, list[int]], Tensor]]:
    """This rank's (parts of) weights, and the loop over its experts."""
    span = axis.span(case.experts)
    first, second = case.first[span.start : span.stop], case.second[span.start : span.stop]
    if axis.divides_experts:
        first = first.chunk(axis.tensor.size, 2)[axis.tensor.rank]
        second = second.chunk(axis.tensor.size, 1)[axis.tensor.rank]
    first, second = first.clone().requires_grad_(), second.clone().requires_grad_()

    def compute(rows: Tensor, counts: list[int]) -> Tensor:
        assert len(counts) == len(span)
        assert rows.shape == (sum(counts), WIDTH)
        parts = [(part @ first[each]).tanh() @ second[each] for each, part in enumerate(rows.split(counts))]
        return torch.cat([rows.new_zeros((0, OUT)), *parts])

    return [first, second], compute


def wanted_part(whole: Tensor, axis: ExpertAxis, dim: int) -> Tensor:
    """This rank's part of something of all experts."""
    span = axis.span(len(whole))
    part = whole[span.start : span.stop]
    return part.chunk(axis.tensor.size, dim)[axis.tensor.rank] if axis.divides_experts else part
