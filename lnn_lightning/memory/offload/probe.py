"""What an optimizer's step does, found out on small parameters: whether it can be done bit by bit, what it keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from lnn_lightning.memory.offload.settings import OffloadError
from lnn_lightning.memory.offload.shadow import Snapshot, snapshot, step_on
from lnn_lightning.optim.elementwise import LARGE, SHAPE, not_elementwise
from lnn_lightning.parallel.step.randomness import preserved_rng

_STEPS = 3


@dataclass(frozen=True)
class Behaviour:
    """What an optimizer's step does.

    Attributes:
        elementwise: it updates each element by itself, so that a parameter can be updated in parts.
        counts: it changes numbers in its groups or attributes, besides parameters and their state.
    """

    elementwise: bool
    counts: bool


def behaviour_of(optimizer: Optimizer) -> Behaviour:
    """Tries an optimizer that is about to be offloaded; it is not changed.

    Raises:
        OffloadError: its step cannot be done parameter by parameter.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, LBFGS):
        raise OffloadError(f"The state of {name} cannot be offloaded: it is about all parameters at once. {_WAY_OUT}")
    for attribute, value in vars(optimizer).items():
        if isinstance(value, Optimizer) or (isinstance(value, Tensor) and value.numel() > LARGE):
            raise OffloadError(
                f"The state of {name} cannot be offloaded: it keeps state in its attribute `{attribute}`, not by "
                f"parameter. {_WAY_OUT}"
            )
    now, counts = snapshot(optimizer), False
    for number, group in enumerate(optimizer.param_groups):
        dims = [min(max(p.dim(), 1), len(SHAPE)) for p in group["params"][:1]] or [2]
        shapes = [(2 * SHAPE[0], *SHAPE[1 : dims[0]]), SHAPE[: dims[0]]]
        try:
            with preserved_rng(torch.device("cpu")):
                together, counted = _trained(now, number, shapes, (0, 1))
                alone = [_trained(now, number, shapes, (index,))[0][0] for index in (0, 1)]
        except Exception as error:  # noqa: BLE001 - whatever it raises on parameters it was not made for
            raise OffloadError(
                f"The state of {name} cannot be offloaded: its step could not be tried on small parameters "
                f"({type(error).__name__}: {error}). {_WAY_OUT}"
            ) from error
        counts |= counted
        for both, one in zip(together, alone, strict=True):
            if not torch.allclose(both, one, rtol=1e-9, atol=0):
                raise OffloadError(
                    f"The state of {name} cannot be offloaded: it moves a parameter differently when there are others, "
                    f"so its step cannot be done parameter by parameter. {_WAY_OUT}"
                )
    return Behaviour(not_elementwise(optimizer) is None, counts)


_WAY_OUT = "Use an optimizer that updates each parameter by itself, or leave 'optimizer' out of `Offload(what=...)`."


def leaves_of(now: Snapshot, group: int, parameter: Tensor) -> Mapping[str, torch.dtype]:
    """State of a parameter that has its shape, by name: what its first step will make; empty if that is not known."""
    shape = SHAPE[: min(max(parameter.dim(), 1), len(SHAPE))]
    try:
        with preserved_rng(torch.device("cpu")):
            state: dict[str, object] = {}
            step_on(now, group, [_parameter(torch.zeros(shape, dtype=parameter.dtype), 1.0)], [state])
    except Exception:  # noqa: BLE001 - it will be known after the first step
        return {}
    return {k: v.dtype for k, v in state.items() if isinstance(v, Tensor) and tuple(v.shape) == shape}


def _trained(
    now: Snapshot, group: int, shapes: list[tuple[int, ...]], which: tuple[int, ...]
) -> tuple[list[Tensor], bool]:
    """Where some of two parameters move to, and whether numbers outside of their state changed."""
    random, counted = torch.Generator().manual_seed(0), False
    values = [torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes]
    parameters = [_parameter(values[index], 1.0) for index in which]
    states: list[dict[str, object]] = [{} for _ in which]
    for step in range(_STEPS):
        for parameter, index in zip(parameters, which, strict=True):
            parameter.grad = torch.sin(values[index] * (step + 1)) * 10.0**index
        counted |= bool(step_on(now, group, parameters, states))
    return [parameter.detach() for parameter in parameters], counted


def _parameter(value: Tensor, slope: float) -> nn.Parameter:
    parameter = nn.Parameter(value.clone())
    parameter.grad = torch.full_like(value, slope)
    return parameter
