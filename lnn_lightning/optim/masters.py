"""fp32 copies of low-precision parameters for an optimizer: master weights, and stochastic rounding without them.

Parameters, gradients and computation stay in bf16 or fp16; the optimizer's groups hold copies in fp32 (Micikevicius et
al. 2018, arXiv 1710.03740), and so its moments are fp32 as well. Just before a step the gradients move into the copies,
one parameter at a time, and behind it the rounded values go back. The copies are ordinary parameters of the user's own
optimizer object: clipping, loss scaling, schedulers and sharding see nothing new.

Without master weights a copy exists during a step only and is rounded to bf16 by chance, up or down so that the mean
is right: changes too small for bf16 are not lost but happen rarely (Gupta et al. 2015, arXiv 1502.02551).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lnn_lightning.parallel.step.randomness import seed_of

LEAF = "master"
"""What a master weight is called among its parameter's optimizer state in a checkpoint."""
LOW = (torch.float16, torch.bfloat16)


class Masters:
    """fp32 copies in the groups of one optimizer.

    Args:
        optimizer: the user's; its groups are changed in place.
        rounding_seed: None: the copies are master weights, kept between steps. Otherwise they exist during a step only,
            which ends with stochastic rounding; gives the seed of the step, equal on all ranks.
    """

    def __init__(self, optimizer: Optimizer, rounding_seed: Callable[[], int] | None = None) -> None:
        self.optimizer, self._rounding_seed = optimizer, rounding_seed
        self.copies: list[tuple[nn.Parameter, nn.Parameter]] = []
        """Parameter (or this rank's piece of it), and its copy."""
        self._names: dict[int, str] = {}
        self._whole: dict[int, nn.Parameter] = {}
        self._filled = False
        self._zero_grad = optimizer.zero_grad
        optimizer.zero_grad = self._zero_all  # type: ignore[method-assign]
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._write_back)
        optimizer._masters = self  # type: ignore[attr-defined]

    @property
    def kept(self) -> bool:
        """Whether they are master weights, which are kept between steps and in checkpoints."""
        return self._rounding_seed is None

    @torch.no_grad()
    def adopt(self, names: Mapping[int, str], whole: Mapping[int, nn.Parameter]) -> None:
        """Puts copies into the groups in place of the low-precision parameters there.

        Args:
            names: ``id(parameter)`` -> its name.
            whole: ``id(piece)`` -> the sharded parameter that it is a piece of.
        """
        known = {id(low) for low, _ in self.copies}
        for group in self.optimizer.param_groups:
            # a callback that adds groups may not see that a copy stands for the parameter it looks for
            group["params"] = [p for p in group["params"] if id(p) not in known]
            for index, low in enumerate(group["params"]):
                if low.dtype not in LOW:
                    continue
                copy = nn.Parameter(low.detach().float(), requires_grad=low.requires_grad)
                group["params"][index] = copy
                self.copies.append((low, copy))
                self._names[id(low)] = names[id(low)]
                self._whole[id(low)] = whole.get(id(low), low)
                if low in self.optimizer.state:  # some optimizers make it when they are built
                    state = self.optimizer.state.pop(low)
                    self.optimizer.state[copy] = {key: _widened(value, low) for key, value in state.items()}
        if not self.kept and not self._filled:
            self._empty()

    # ---------------------------------------------------------------- a step

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Moves the parameters' gradients into the copies; adds to what is there. Nothing is left to move behind it."""
        if not self._filled:
            self._fill()
            self._filled = True
        for low, copy in self.copies:
            grad, low.grad = low.grad, None
            self._whole[id(low)].grad = None
            if grad is None:
                continue
            if copy.grad is None:
                copy.grad = grad.float()
            else:
                copy.grad.add_(grad)

    def drop_gradients(self) -> None:
        """Frees the copies' gradients: those of the parameters are made anew."""
        for _, copy in self.copies:
            copy.grad = None
        self.end_step()

    def end_step(self) -> None:
        """Behind a step, also one that was skipped."""
        if self._filled and not self.kept:
            self._empty()
        self._filled = False

    def _fill(self) -> None:
        """The copies have the parameters' values; a master weight stays where its rounded value is the parameter's."""
        if not self.kept:
            for low, copy in self.copies:
                copy.untyped_storage().resize_(copy.numel() * copy.element_size())
                copy.copy_(low)
            return
        # whatever changed a parameter (weights loaded, averages swapped in), also through `.data`, which has no version
        changed = [(low != copy.to(low.dtype)).any() for low, copy in self.copies]
        if not changed or not bool(torch.stack([flag.to(changed[0].device) for flag in changed]).any()):
            return
        for low, copy in self.copies:
            copy.copy_(torch.where(low == copy.to(low.dtype), copy, low.float()))

    def _empty(self) -> None:
        for _, copy in self.copies:
            copy.untyped_storage().resize_(0)

    def _before_step(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Gradients are taken where a closure has made them; without one they are here."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first one is the optimizer
        if closure is None:
            self.take_gradients()
            return None

        def taking() -> Any:
            result = closure()
            self.take_gradients()
            return result

        return ((args[0], taking, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": taking})

    @torch.no_grad()
    def _write_back(self, *_: Any) -> None:
        if not self._filled:  # the closure made nothing
            return
        for low, copy in self.copies:
            if self._rounding_seed is not None and low.dtype == torch.bfloat16:
                generator = torch.Generator(copy.device)
                generator.manual_seed(seed_of(self._rounding_seed(), zlib.crc32(self._names[id(low)].encode())))
                low.copy_(stochastically_rounded(copy, generator))
            else:
                low.copy_(copy)
        self.end_step()

    def _zero_all(self, *args: Any, **kwargs: Any) -> None:
        """The optimizer's ``zero_grad``, for the gradients that have not moved into the copies too."""
        self._zero_grad(*args, **kwargs)
        for low, _ in self.copies:
            low.grad = self._whole[id(low)].grad = None
        self.end_step()

    # ---------------------------------------------------------------- checkpoints

    @torch.no_grad()
    def load(self, names: Mapping[int, str], states: Mapping[str, dict[str, Any]]) -> list[str]:
        """Takes master weights out of optimizer states by parameter name.

        Args:
            names: ``id(copy)`` -> name of its parameter.
            states: parameter name -> leaves; loses its master weights.

        Returns:
            Names of the parameters whose master weight is not there.
        """
        missing = []
        for low, copy in self.copies:
            master = states.get(names[id(copy)], {}).pop(LEAF, None)
            if not self.kept:
                continue
            if master is None:
                missing.append(names[id(copy)])
            if master is None or master.data_ptr() != copy.data_ptr():
                copy.copy_(low if master is None else master)
        return missing


def masters_of(optimizer: Any) -> Masters | None:
    """The copies in an optimizer's groups, if it has any."""
    return getattr(optimizer, "_masters", None)


def states_of(optimizer: Optimizer) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """What an optimizer has of each parameter in its groups, master weights among it."""
    masters = masters_of(optimizer)
    copies = {copy for _, copy in masters.copies} if masters is not None and masters.kept else set()
    for parameter in dict.fromkeys([*optimizer.state, *copies]):
        own = {LEAF: parameter.detach()} if parameter in copies else {}
        yield parameter, {**optimizer.state.get(parameter, {}), **own}


def stochastically_rounded(value: Tensor, generator: torch.Generator) -> Tensor:
    """An fp32 tensor rounded to bf16, to one of the two neighbours by chance, so that the mean is the value.

    Args:
        value: values that bf16 has stay as they are, and so do infinities and NaN.
        generator: on the tensor's device.
    """
    bits = value.detach().contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator)
    # bf16 is the upper half of fp32: the lower half carries over with the probability it stands for
    rounded = noise.add_(bits).bitwise_and_(-(1 << 16)).view(torch.float32)
    return torch.where(value.isfinite(), rounded, value).to(torch.bfloat16)


def _widened(value: Any, low: Tensor) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in LOW and value.shape == low.shape else value
