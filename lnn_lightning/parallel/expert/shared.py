"""The shared expert of a block runs while the block's tokens are on their way to the others.

The user's code calls it when the experts have answered. So its body runs *ahead*: the block is followed once, and a
sibling of the experts that is called behind them, on an object that was there before them, runs from then on while the
tokens travel, and its result lies ready when it is called. It is given out only where it must be the result of that
call: the very same object, not changed in place since, in the same mode. What is not taken is computed as always, and
that sibling is never run ahead again.

Nothing but the time is different. Autograd has the same nodes, and takes them in the same order: behind the rows' way
there, before their way back. Results live as long as the call of the block that they belong to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.expert.layer import MoELayer
from lnn_lightning.parallel.expert.seam import seam_of
from lnn_lightning.parallel.step.remember import checkpoints_are_remembered, in_second_run, remembered
from lnn_lightning.parallel.step.run import in_glue
from lnn_lightning.parallel.tensor.modules import Forward, has_forward, is_suspended, own_forward, take_forward
from lnn_lightning.parallel.tensor.sharded import is_sharded
from lnn_lightning.parallel.tensor.units import unit_forward

Place = tuple[str, int | str]
"""Where a block has an object when it calls its experts: among its arguments, or in what it gives to the experts."""

_DIFFERS = (
    "A block that runs again in backward does not call {name!r} as in its first run, beside the experts of {seam!r}: "
    "it does not compute the same twice. Leave it out of recomputation (`recompute=None`, no gradient checkpointing)."
)


class _Object(NamedTuple):
    value: Tensor
    version: int

    def is_given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether it is all that a call was given, as it was."""
        return len(args) == 1 and not kwargs and args[0] is self.value and self.value._version == self.version


@dataclass(eq=False)
class Beside:
    """What is known of a block whose experts are shared out.

    Attributes:
        seam: name of the experts within it.
        siblings: names of what may run beside them.
        known: whether the block is training -> what its call of then showed: siblings that can run ahead, in the order
            of their calls, and what each is called with.
        never: siblings that ran ahead in vain.
    """

    seam: str
    siblings: tuple[str, ...]
    known: dict[bool, dict[str, Place]] = field(default_factory=dict)
    never: set[str] = field(default_factory=set)


def prepare_beside(root: nn.Module, name: str) -> bool:
    """Takes over the ``forward`` of the block around fused experts, and of what may run beside them.

    Returns:
        Whether there is anything: the experts must then call :func:`beside`.
    """
    around, _, seam = name.rpartition(".")
    if not name or "lnn_beside" in vars(block := root.get_submodule(around)) or has_forward(block, unit_forward):
        return False
    siblings = tuple(key for key, each in block._modules.items() if each is not None and _is_candidate(block, each))
    if not siblings or type(block).forward is nn.Module.forward or isinstance(block, torch.jit.ScriptModule):
        return False
    vars(block)["lnn_beside"] = Beside(seam, siblings)
    take_forward(block, _block_forward)
    for sibling in map(block.get_submodule, siblings):
        if not has_forward(sibling, _sibling_forward):  # of two blocks
            vars(sibling)["lnn_before"] = vars(sibling).get("forward")
            take_forward(sibling, _sibling_forward)
    return True


def beside(experts: nn.Module, tokens: Tensor) -> Callable[[], None]:
    """What runs while the tokens of experts travel. Asked once in each call of them, in recomputations too."""
    if not seam_of(experts).beside:
        return lambda: None
    frame = _frames.stack[-1] if _frames.stack else None
    if frame is not None and frame.block._modules.get(frame.state.seam) is not experts:
        frame = None
    if frame is not None:
        frame.begin(tokens)
    # a recomputation must save the same tensors in the same order
    choice = int(remembered(lambda: torch.tensor(0 if frame is None else frame.choice(), device="cpu")))
    if not choice:
        return lambda: None
    if frame is None:
        raise StepError(_DIFFERS.format(name="its shared expert", seam=seam_of(experts).name))
    return partial(frame.run_ahead, choice)


class _Frame:
    """One call of a block."""

    def __init__(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.block, self.args, self.kwargs = block, args, kwargs
        self.state: Beside = vars(block)["lnn_beside"]
        self._is_cut = in_glue()  # the experts and their siblings are units of their own, which may live elsewhere
        self._seams = 0
        self._learning = False
        self._mode: tuple[Any, ...] = ()
        self._objects: dict[Place, _Object] = {}
        self._ready: dict[str, tuple[_Object, Any]] = {}
        self._seen: dict[str, Place | None] = {}

    def begin(self, tokens: Tensor) -> None:
        """The experts are called."""
        self._seams += 1
        self._objects = {}
        if self._seams > 1:
            self.state.never.update(self.state.siblings)
            return
        values: dict[Place, Any] = {("args", key): each for key, each in enumerate(self.args)}
        values |= {("kwargs", key): each for key, each in self.kwargs.items()}
        values |= {("experts", "tokens"): tokens, ("experts", "base"): tokens._base}
        for place, each in values.items():
            if isinstance(each, Tensor) and not is_sharded(each) and not each.is_inference():
                self._objects[place] = _Object(each, each._version)
        self._mode = _mode(tokens.device)
        self._learning = bool(self._objects) and self.block.training not in self.state.known and not in_second_run()

    def choice(self) -> int:
        """Which siblings run ahead, a bit each. It may be asked for without gradients, whatever the block computes."""
        if self._is_cut or not self._mode or (self._mode[0] and not checkpoints_are_remembered()):
            return 0  # with gradients: whoever runs this again would not know of it
        chosen = 0
        for name, place in self.state.known.get(self.block.training, {}).items():
            if name not in self.state.never and place in self._objects and _may_run_ahead(self.block._modules[name]):
                chosen |= 1 << self.state.siblings.index(name)
        return chosen

    def run_ahead(self, choice: int) -> None:
        """Runs the chosen ones."""
        chosen = [name for index, name in enumerate(self.state.siblings) if choice >> index & 1]
        known = self.state.known.get(self.block.training, {})
        for name in sorted(chosen, key=[*known, *chosen].index):
            sibling, given = self.block.get_submodule(name), None
            if (place := known.get(name)) is not None:
                given = self._objects.get(place)
            if given is None:
                raise StepError(_DIFFERS.format(name=name, seam=self.state.seam))
            self._ready[name] = given, own_forward(sibling, vars(sibling)["lnn_before"])(given.value)

    def call(self, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A sibling is called."""
        given, result = self._ready.pop(name, (None, None))
        if given is not None:
            if given.is_given(args, kwargs) and self._mode == _mode(given.value.device):
                return result
            if in_second_run() and name not in self.state.never:
                raise StepError(_DIFFERS.format(name=name, seam=self.state.seam))
            self.state.never.add(name)
        if not self._learning or name in self._seen:
            return forward(*args, **kwargs)
        place = next((place for place, each in self._objects.items() if each.is_given(args, kwargs)), None)
        if place is None or self._mode != _mode(args[0].device):
            self._seen[name] = None
            return forward(*args, **kwargs)
        before = _random_now(args[0].device)
        out = forward(*args, **kwargs)
        drew = any(not torch.equal(a, b) for a, b in zip(before, _random_now(args[0].device), strict=True))
        self._seen[name] = None if drew else place
        return out

    def end(self) -> None:
        """The block has returned."""
        if in_second_run():
            return
        self.state.never.update(self._ready)
        if self._learning:
            self.state.known[self.block.training] = {
                name: place for name, place in self._seen.items() if place is not None
            }


class _Frames(threading.local):  # backward has threads of its own
    def __init__(self) -> None:
        self.stack: list[_Frame] = []


_frames = _Frames()


def _block_forward(self: nn.Module, before: Forward, *args: Any, **kwargs: Any) -> Any:
    """``forward`` of a block around experts that are shared out."""
    forward = own_forward(self, before)
    if is_suspended() or torch.compiler.is_compiling():
        return forward(*args, **kwargs)
    frame = _Frame(self, args, kwargs)
    with _inside(frame):
        out = forward(*args, **kwargs)
    frame.end()
    return out


def _sibling_forward(self: nn.Module, before: Forward, *args: Any, **kwargs: Any) -> Any:
    """``forward`` of a sibling of experts that are shared out."""
    forward = own_forward(self, before)
    if is_suspended() or torch.compiler.is_compiling() or not _frames.stack:
        return forward(*args, **kwargs)
    frame = _frames.stack[-1]
    name = next((name for name in frame.state.siblings if frame.block._modules.get(name) is self), None)
    return forward(*args, **kwargs) if name is None else frame.call(name, forward, args, kwargs)


@contextmanager
def _inside(frame: _Frame) -> Iterator[None]:
    _frames.stack.append(frame)
    try:
        yield
    finally:
        _frames.stack.pop()


def _is_candidate(block: nn.Module, sibling: nn.Module) -> bool:
    """Whether a child of a block is a module that is called, and one without exchanges of its own."""
    return (
        next(sibling.parameters(), None) is not None
        and type(sibling).forward not in (nn.Module.forward, nn.ModuleList.forward, nn.ModuleDict.forward)
        and not isinstance(sibling, torch.jit.ScriptModule)
        and [each for each in block._modules.values() if each is sibling] == [sibling]
        and not any(isinstance(each, MoELayer) or "lnn_seam" in vars(each) for each in sibling.modules())
    )


def _may_run_ahead(sibling: nn.Module | None) -> bool:
    """Whether a sibling's body can be run by itself, and neither draws random numbers nor changes anything.

    A hook before it may prepare what its body reads.
    """
    if sibling is None or sibling._compiled_call_impl is not None or sibling._forward_pre_hooks:
        return False
    return not any(
        each.training
        and (any(buffer is not None for buffer in each._buffers.values()) or (isinstance(each, _DropoutNd) and each.p))
        for each in sibling.modules()
    )


def _mode(device: torch.device) -> tuple[Any, ...]:
    """What a computation depends on besides its arguments."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in {"cpu", device.type}),
        torch._C._is_torch_function_enabled(),
        *_get_current_function_mode_stack(),
        *_get_current_dispatch_mode_stack(),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        None if device.type == "cpu" else torch.get_device_module(device.type).current_stream(device),
    )


def _random_now(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return states if device.type == "cpu" else [*states, torch.get_device_module(device.type).get_rng_state(device)]
