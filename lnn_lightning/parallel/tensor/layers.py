"""What a linear layer or an embedding does in each role (Shoeybi et al. 2019, section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lnn_lightning.parallel.tensor import rules_cut as rules_cut  # registers its rules, as the next does
from lnn_lightning.parallel.tensor import rules_loss as rules_loss
from lnn_lightning.parallel.tensor.axis import (
    Spec,
    TensorAxis,
    enter,
    gather_for_partial,
    reduce,
    reduce_scatter,
    scatter,
)
from lnn_lightning.parallel.tensor.region import cached, current_region
from lnn_lightning.parallel.tensor.rules_math import elementwise
from lnn_lightning.parallel.tensor.sharded import book_wholes, is_sharded, spec_of, whole, wrap
from lnn_lightning.parallel.tensor.vocabulary import embedding_partial, vocabulary_part

Kind = Literal["column", "row", "replicate", "vocabulary"]


@dataclass(frozen=True)
class Role:
    """What a weight does under tensor parallelism.

    Attributes:
        kind: ``column``: outputs are divided; ``row``: inputs are; ``vocabulary``: rows of an embedding are;
            ``replicate``: every rank has all of it.
        sections: sections of the divided dimension (:class:`~lnn_lightning.parallel.tensor.axis.Spec`).
    """

    kind: Kind
    sections: tuple[int, ...] = ()

    def weight_spec(self, transposed: bool) -> Spec | None:
        """Part of the weight that a rank has: of ``(out, in)``, or of ``(in, out)`` if transposed."""
        if self.kind == "replicate":
            return None
        if self.kind == "vocabulary":
            return Spec(0, self.sections)
        return Spec(int((self.kind == "column") == transposed), self.sections)

    @property
    def bias_spec(self) -> Spec | None:
        """Part of the bias that a rank has."""
        return Spec(0, self.sections) if self.kind == "column" else None

    def __str__(self) -> str:
        parts = f" in {len(self.sections)} sections" if len(self.sections) > 1 else ""
        return self.kind + parts


REPLICATE = Role("replicate")


def run_linear(
    value: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    role: Role,
    axis: TensorAxis,
    transposed: bool = False,
    origins: frozenset[str] = frozenset(),
    tokens: int | None = None,
) -> Tensor:
    """``value @ weight.T + bias`` with a rank's part of the weight.

    Args:
        value: whole or sharded, of shape (..., in).
        weight: this rank's part of (out, in), or of (in, out) if ``transposed``.
        bias: this rank's part for a column layer, the whole for a row layer.
        role: column or row.
        axis: tensor ranks.
        transposed: the weight is stored as transformers' ``Conv1D`` does.
        origins: names of layers that a planner should blame for the result.
        tokens: the token dimension along which results stay sharded, if no region tells.

    Returns:
        Features sharded (column), or whole, or sharded along the region's token dimension (row).
    """
    with torch._C.DisableTorchFunctionSubclass():
        if role.kind == "column":
            out = _product(_for_partial(value, axis), weight, bias, transposed)
            return wrap(out, Spec(out.ndim - 1, role.sections), axis, origins)
        out = _product(_features(value, role, axis), weight, None, transposed)
        bias = bias if bias is None else bias.to(out.dtype)
        region = current_region()
        dim = region.sequence if region is not None else tokens
        if dim is None or out.ndim <= dim + 1 or out.shape[dim] % axis.size:
            out = reduce(out, axis)
            return out if bias is None else out + bias
        spec = Spec(dim, (out.shape[dim],), sequence=True)
        out = wrap(reduce_scatter(out, axis, spec), spec, axis, origins)
        return out if bias is None else elementwise(torch.add, (out, bias), {})


def run_embedding(ids: Tensor, rows: Tensor, options: Sequence[Any], role: Role, axis: TensorAxis) -> Tensor:
    """Looks up a table whose rows are divided.

    Args:
        ids: row numbers of the whole table.
        rows: this rank's part of the table.
        options: ``padding_idx``, ``max_norm``, ``norm_type``, ``scale_grad_by_freq``, ``sparse`` of ``F.embedding``.
        role: which part that is.
        axis: tensor ranks.
    """
    with torch._C.DisableTorchFunctionSubclass():
        if axis.group is None:
            return reduce(F.embedding(ids, rows), axis)
        return reduce(embedding_partial(ids, rows, vocabulary_part(role.sections[0], axis.group), *options), axis)


def _product(value: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    if not transposed:
        return F.linear(value, weight, bias)
    out = torch.matmul(value, weight)
    return out if bias is None else out + bias


def _for_partial(value: Tensor, axis: TensorAxis) -> Tensor:
    if not is_sharded(value):
        return cached("enter", value, lambda: enter(value, axis))
    return cached("gather", value, lambda: gather_for_partial(value, axis, spec_of(value)))


def _features(value: Tensor, role: Role, axis: TensorAxis) -> Tensor:
    spec = Spec(value.ndim - 1, role.sections)
    if is_sharded(value):
        if (spec_of(value).dim, spec_of(value).sections) == (spec.dim, spec.sections):
            return value
        book_wholes("linear", (value,), {})
        value = whole(value)
    return cached(("scatter", spec), value, lambda: scatter(value, axis, spec))
