"""Layers of the units divided over the tensor ranks: planned before what lives elsewhere is dropped, done behind it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from lnn_lightning.parallel.layout import TENSOR, Mesh
from lnn_lightning.parallel.pipeline.ownership import original_of
from lnn_lightning.parallel.step.trace import Trace
from lnn_lightning.parallel.step.units import Units
from lnn_lightning.parallel.tensor.axis import TensorAxis
from lnn_lightning.parallel.tensor.check import agreed_failures, check_units
from lnn_lightning.parallel.tensor.functions import give_functions_wholes
from lnn_lightning.parallel.tensor.install import TensorSharding
from lnn_lightning.parallel.tensor.plan import TensorPlan, plan_module, refuse_compiled


def plan_tensor(
    root: nn.Module,
    trace: Trace,
    units: Units,
    size: int,
    sequence: bool,
    given: Mapping[str, str] | None,
    vetoed: Mapping[str, str] | None = None,
) -> TensorPlan | None:
    """The tensor-parallel plan of a module, the same on all ranks; None on one tensor rank.

    Args:
        root: the module, whole.
        trace: the traced step.
        units: its units.
        size: number of tensor ranks.
        sequence: keep values between units divided along their tokens.
        given: glob of layer names -> role, from the user.
        vetoed: units that must not be divided, with the reason.

    Raises:
        StepError: what the user gave does not fit, or a module is compiled.
    """
    if size == 1:
        return None
    refuse_compiled(root)
    give_functions_wholes()
    called = list(dict.fromkeys(trace.names))
    found = {name: original_of(name, called) for name in units.names if name not in called}
    twins = {name: twin for name, twin in found.items() if twin is not None}
    return plan_module(root, trace, size, sequence, twins, given, vetoed)


def divide(
    root: nn.Module,
    plan: TensorPlan,
    trace: Trace,
    mesh: Mesh,
    device: torch.device,
    again: Callable[[Mapping[str, str]], TensorPlan | None],
) -> TensorSharding:
    """Checks a plan and cuts the parameters on this rank by it. Collective over all ranks.

    Args:
        root: the module; what lives on other stages is gone.
        plan: its plan.
        trace: the traced step.
        mesh: this process's place.
        device: where to compute the check.
        again: makes a plan without the units it is given.
    """
    axis = TensorAxis(mesh.size(TENSOR), mesh.rank(TENSOR), mesh.group(TENSOR))
    vetoed: dict[str, str] = {}
    while failed := agreed_failures(check_units(root, plan, trace, axis, device)):
        vetoed |= failed
        for problem in dict.fromkeys(failed.values()):
            names = [name for name, each in failed.items() if each == problem]
            warn_once(f"{', '.join(names)}: not divided over the tensor ranks: {problem}.")
        new = again(vetoed)
        assert new is not None
        plan = new
    if not plan.units:
        cause = f" The step could not be followed ({trace.tail_error})." if trace.tail_error is not None else ""
        warn_once(
            f"No layer is divided over the {axis.size} tensor ranks: all of them do the same work.{cause} Use "
            "`tensor_parallel_size=1` and more data or pipeline ranks."
        )
    sharding = TensorSharding(root, plan, axis)
    sharding.install()
    return sharding


def warn_once(message: str) -> None:
    """Warns on rank 0 alone."""
    if dist.get_rank() == 0:
        warnings.warn(message, stacklevel=4)
