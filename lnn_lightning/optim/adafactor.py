"""Adafactor (Shazeer and Stern 2018, arXiv:1804.04235), right also on parts of parameters.

In place of Adam's second moment of each element it keeps the means of each row and column: n + m numbers of a matrix,
not n m. What it takes from whole parameters (means of rows and columns, the root mean square of the parameter and of
the update) is added up over the ranks that divide them, for all parameters at once: three all-reduces a step and group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from lnn_lightning.optim.cuts import Cut, Describe, add_up
from lnn_lightning.parallel.tensor.axis import reduced_shape

_RELATIVE = 1e-2
"""The paper's largest relative step."""
_WARM_UP = 1e-6
"""By how much a relative step grows from step to step while it warms up."""
_ROW, _COLUMN = "row_var", "col_var"
"""Leaves of the state: means along the last dimension and the one before it, which they have with one element."""


class Adafactor(Optimizer):
    """Adafactor, with the names and the meaning of the options in ``transformers``.

    Under tensor parallelism and ZeRO 2 and 3 it gives the numbers of one process; ``torch.optim.Adafactor`` and
    ``transformers``' do not (and are refused there). Its state is in fp32, also for parameters in bf16 or fp16.

    Where those two differ:

    * ``eps[0]`` is added to squared gradients, as in the paper and in ``transformers``. ``torch`` bounds estimates from
      below by it, by default at 1e-7.
    * ``lr`` bounds relative steps, as in ``torch``, so that a learning rate scheduler moves the bound. ``transformers``
      takes none with ``relative_step=True`` and has 0.01.
    * Weight decay is multiplied by the step that is taken, as in ``transformers``; in ``torch`` by ``lr``.

    Parameters of three and more dimensions are factored along the last two, as in both.

    Args:
        params: parameters or groups of them.
        lr: the largest relative step; the step itself with ``relative_step=False``. None: 0.01.
        eps: what is added to squared gradients; least root mean square that a parameter is taken to have.
        clip_threshold: root mean square above which an update is scaled down (the paper's d).
        decay_rate: the second moment decays by ``1 - step**decay_rate``.
        beta1: decay of the average of updates that is applied in place of them (which costs a number an element);
            None: no momentum.
        weight_decay: share of the step by which a parameter shrinks.
        scale_parameter: steps are multiplied by the root mean square of the parameter.
        relative_step: steps are at most one over the square root of their number.
        warmup_init: relative steps grow from 1e-6.
        maximize: climb instead of descend.

    Raises:
        ValueError: an option that cannot be, or a complex parameter.
    """

    _describe: Describe | None = None
    _order: Sequence[ProcessGroup] = ()

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor | None = None,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool = True,
        warmup_init: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "eps": tuple(eps),
            "clip_threshold": clip_threshold,
            "decay_rate": decay_rate,
            "beta1": beta1,
            "weight_decay": weight_decay,
            "scale_parameter": scale_parameter,
            "relative_step": relative_step,
            "warmup_init": warmup_init,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters with options of their own.

        Raises:
            ValueError: an option that cannot be, or a complex parameter.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["lr"] is None:
            group["lr"] = _RELATIVE
        try:
            _check(group)
        except ValueError:
            self.param_groups.pop()
            raise

    def bind_cuts(self, describe: Describe, groups: Sequence[ProcessGroup]) -> None:
        """Tells which part of a parameter is here (:class:`~lnn_lightning.optim.cuts.KnowsCuts`)."""
        self._describe, self._order = describe, tuple(groups)

    def reduced_dims(self, leaf: str, ndim: int) -> tuple[int, ...]:
        """Along which dimension a mean is one element."""
        return {_ROW: (ndim - 1,), _COLUMN: (ndim - 2,)}.get(leaf, ())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes the state and the options of another; the state stays in fp32, which torch would round."""
        super().load_state_dict(dict(state_dict))
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            dtype = _wide(parameter.dtype)
            for leaf, value in state_dict["state"].get(number, {}).items() if dtype != parameter.dtype else ():
                if isinstance(value, Tensor):
                    self.state[parameter][leaf] = value.to(parameter.device, dtype)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step. Where parameters are cut: collective over the ranks that divide them.

        Args:
            closure: computes the loss and the gradients.

        Returns:
            The closure's loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parts: list[_Part] = []
        for group in self.param_groups:
            for parameter in group["params"]:
                cut = self._describe(parameter) if self._describe is not None else None
                if cut is not None:
                    parts.append((cut, _update(parameter, group, self.state, cut)))
                elif parameter.grad is not None:
                    for _ in _update(parameter, group, self.state, None):
                        pass
        while parts:  # stage by stage
            sums = [(cut, update, next(update, None)) for cut, update in parts]
            add_up(((each, cut.across(*dims)) for cut, _, new in sums for each, dims in new or ()), self._order)
            parts = [(cut, update) for cut, update, new in sums if new is not None]
        return loss


_Sums = list[tuple[Tensor, tuple[int, ...]]]
"""Sums over elements, and the dimensions along which (none: all)."""
_Part = tuple[Cut, Iterator[_Sums]]


def _update(parameter: Tensor, group: Mapping[str, Any], states: Any, cut: Cut | None) -> Iterator[_Sums]:
    """One step of a parameter, in stages: each yields sums, which its caller completes where other ranks have more.

    A part has its share in them also without a gradient here, for the others; it ends if none of them has one.
    """
    whole, last = tuple(parameter.shape) if cut is None else cut.whole, parameter.ndim - 1
    dtype, factored = _wide(parameter.dtype), parameter.ndim >= 2
    if parameter.grad is not None and parameter.grad.is_sparse:
        raise RuntimeError(
            f"Adafactor needs dense gradients; that of a parameter of shape {whole} is sparse. Leave `sparse=True` out "
            "of the embedding."
        )

    def size(value: Tensor) -> Tensor:
        return torch.linalg.vector_norm(value, dtype=dtype).square()

    def gradient() -> Tensor:
        return _real(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad, cut)

    of_value = size(_real(parameter, cut))
    learns = torch.full_like(of_value, parameter.grad is not None)
    sums: _Sums = [(of_value, ()), (learns, ())]
    if factored:
        squares = gradient().to(dtype).square()
        rows, columns = squares.sum(last, keepdim=True), squares.sum(last - 1, keepdim=True)
        del squares
        sums += [(rows, (last,)), (columns, (last - 1,))]
    yield sums

    if cut is not None and not learns.item():
        return
    state = states[parameter]
    if not state:
        state |= _new_state(parameter, dtype, group)
    state["step"] += 1
    fresh = state["step"] ** group["decay_rate"]
    if factored:
        row, column = _real(state[_ROW], cut, last), _real(state[_COLUMN], cut, last - 1)
        row.lerp_(rows / whole[last] + group["eps"][0], fresh)
        column.lerp_(columns / whole[last - 1] + group["eps"][0], fresh)
        mean = row.sum(last - 1, keepdim=True)
        yield [(mean, (last - 1,))]
        mean /= whole[last - 1]
    else:
        variance = _real(state["variance"], cut)
        variance.lerp_(gradient().to(dtype).square().add_(group["eps"][0]), fresh)
        yield []

    def direction() -> Tensor:
        if factored:
            return (gradient() * (row / mean).rsqrt()).mul_(column.rsqrt())
        return gradient() * variance.rsqrt()

    update = direction()
    of_update, count = size(update), math.prod(whole)
    if cut is not None:
        del update  # made again: the updates of all parts at once would take as much memory as the parameters
    yield [(of_update, ())]

    if cut is not None:
        update = direction()
    step = torch.full_like(of_value, _step_size(group, state["step"]))
    if group["scale_parameter"]:
        step *= (of_value / count).sqrt().clamp(min=group["eps"][1])
    update *= step / ((of_update / count).sqrt() / group["clip_threshold"]).clamp(min=1.0)
    if group["beta1"] is not None:
        update = _real(state["exp_avg"], cut).lerp_(update, 1.0 - group["beta1"])
    held = _real(parameter, cut)
    value = held.to(dtype)  # itself, unless it is in low precision
    if group["weight_decay"]:
        value *= 1.0 - group["weight_decay"] * step
    value.add_(update, alpha=1.0 if group["maximize"] else -1.0)
    if value is not held:
        held.copy_(value)


def _new_state(parameter: Tensor, dtype: torch.dtype, group: Mapping[str, Any]) -> dict[str, Any]:
    shape = tuple(parameter.shape)
    state: dict[str, Any] = {"step": 0}
    if group["beta1"] is not None:
        state["exp_avg"] = torch.zeros_like(parameter, dtype=dtype)
    if len(shape) < 2:
        return {**state, "variance": torch.zeros_like(parameter, dtype=dtype)}
    for leaf, dim in ((_ROW, len(shape) - 1), (_COLUMN, len(shape) - 2)):
        state[leaf] = parameter.new_zeros(reduced_shape(shape, [dim]), dtype=dtype)
    return state


def _real(value: Tensor, cut: Cut | None, reduced: int | None = None) -> Tensor:
    """What is of the whole of a tensor that lies as the parameter does, but for a dimension of one element."""
    for dim, size in enumerate(cut.real if cut is not None else ()):
        if dim != reduced and size != value.shape[dim]:
            value = value.narrow(dim, 0, size)
    return value


def _step_size(group: Mapping[str, Any], number: int) -> float:
    """Of a step, before it is multiplied by the size of the parameter."""
    size = float(group["lr"])
    if group["relative_step"]:
        size = min(size, 1.0 / math.sqrt(number))
    return min(size, _WARM_UP * number) if group["warmup_init"] else size


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Of the state and of what is computed."""
    return torch.promote_types(dtype, torch.float32)


def _check(group: Mapping[str, Any]) -> None:
    lr, beta1 = float(group["lr"]), group["beta1"]
    if not lr >= 0.0:
        raise ValueError(f"Adafactor's `lr` must not be negative, got {lr}.")
    if len(group["eps"]) != 2 or not all(each >= 0.0 for each in group["eps"]):
        raise ValueError(f"Adafactor's `eps` must be two numbers that are not negative, got {group['eps']}.")
    if not group["clip_threshold"] > 0.0:
        raise ValueError(f"Adafactor's `clip_threshold` must be positive, got {group['clip_threshold']}.")
    if not group["decay_rate"] <= 0.0:
        raise ValueError(f"Adafactor's `decay_rate` must not be positive, got {group['decay_rate']}.")
    if beta1 is not None and not 0.0 <= beta1 < 1.0:
        raise ValueError(f"Adafactor's `beta1` must be at least 0 and below 1, or None, got {beta1}.")
    if not group["weight_decay"] >= 0.0:
        raise ValueError(f"Adafactor's `weight_decay` must not be negative, got {group['weight_decay']}.")
    if group["warmup_init"] and not group["relative_step"]:
        raise ValueError("Adafactor's `warmup_init=True` is a way to choose relative steps: leave `relative_step` on.")
    if any(parameter.is_complex() for parameter in group["params"]):
        raise ValueError("Adafactor has no rule for complex parameters. Hold them as `torch.view_as_real`.")
