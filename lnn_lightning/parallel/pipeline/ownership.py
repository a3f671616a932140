"""Which stages hold which parameters and units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.step.standin import named_tensors
from lnn_lightning.parallel.step.trace import Trace
from lnn_lightning.parallel.step.units import Units


@dataclass(frozen=True)
class Ownership:
    """Stages of every unit, and of every parameter and buffer by its first name.

    A tensor on several stages is used by each of them; a tensor on all stages belongs to the glue.
    """

    units: Mapping[str, frozenset[int]]
    tensors: Mapping[str, frozenset[int]]


def find_ownership(root: nn.Module, units: Units, trace: Trace, stage_of: Sequence[int], num_stages: int) -> Ownership:
    """Where units and tensors live, given the stage of each call.

    A unit the traced step does not call lives with its original, if it is a copy (an average of the weights, say), else
    where the one registered before it does. A parameter that only glue uses
    lives where the glue's value is needed.

    Raises:
        StepError: nearly all parameters would have to live on several stages.
    """
    last = num_stages - 1
    of_unit: dict[str, set[int]] = {name: set() for name in units.names}
    of_tensor: dict[str, set[int]] = {name: set() for name, _ in named_tensors(root)}
    for call in trace.calls:
        of_unit[call.group].add(stage_of[call.index])
        for name in call.parameters:
            of_tensor[name].add(stage_of[call.index])
    for name in trace.tail_parameters:
        of_tensor[name].add(last)
    for name in trace.everywhere:
        of_tensor[name] |= set(range(num_stages))
    previous = 0
    called = [name for name in units.names if of_unit[name]]
    for name in units.names:
        if not of_unit[name]:
            twin = original_of(name, called)
            of_unit[name] = set(of_unit[twin]) if twin is not None else {previous}
        previous = max(of_unit[name])
    inside: dict[int, set[int]] = {}
    for name in units.names:
        for _, tensor in named_tensors(root.get_submodule(name)):
            inside.setdefault(id(tensor), set()).update(of_unit[name])
    parameters = dict(root.named_parameters())
    for name, tensor in named_tensors(root):
        if not of_tensor[name]:
            glue = {last} if name in parameters else set(range(num_stages))
            of_tensor[name] = inside.get(id(tensor), glue)
    ownership = Ownership(
        {name: frozenset(stages) for name, stages in of_unit.items()},
        {name: frozenset(stages) for name, stages in of_tensor.items()},
    )
    _check_gain(ownership, trace, {name: parameter.numel() for name, parameter in parameters.items()}, num_stages)
    return ownership


def original_of(name: str, called: Sequence[str]) -> str | None:
    """The called unit of the same name in another place: ``model.layers.1`` for ``ema.layers.1``."""
    _, _, rest = name.partition(".")
    twins = [other for other in called if rest and other.partition(".")[2] == rest]
    twins += [other for other in called if rest and (other == rest or other.endswith("." + rest))]
    return twins[0] if twins else None


def _check_gain(ownership: Ownership, trace: Trace, sizes: Mapping[str, int], num_stages: int) -> None:
    total = sum(sizes.values())
    shared = sum(size for name, size in sizes.items() if len(ownership.tensors[name]) > 1)
    if num_stages == 1 or len(set(trace.names)) < num_stages or shared <= total / 2:
        return
    twice = len(trace.names) > len(set(trace.names))
    raise StepError(
        f"{shared / total:.0%} of the parameters would have to live on several pipeline stages: "
        + (
            "the step goes through its blocks more than once. Put both inputs through in one pass (concatenate them "
            "along the batch), or train without a pipeline (pipeline_parallel_size=1)."
            if twice
            else "the step reads them outside of their modules (for example a penalty over `self.parameters()`). "
            "Use the optimizer's `weight_decay` for it, or train without a pipeline (pipeline_parallel_size=1)."
        )
    )
