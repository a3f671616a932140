"""An offloaded optimizer's work beside backward and the next forward.

Behind ``optimizer.step()`` parameters get their new values in the order in which the next forward needs them, and each
unit of it waits for its own. What code between units reads is watched operation by operation. A parameter whose
gradient is complete early in backward can be updated at once. None of this may be seen: whoever looks at parameters
elsewhere waits for all (:meth:`UpdateWaits.settle`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from lnn_lightning.memory.offload.optimizer import OffloadedOptimizer
from lnn_lightning.memory.offload.settings import OffloadError
from lnn_lightning.parallel.step.extension import Body, StepExtension, UnitRun
from lnn_lightning.parallel.step.glue import without_mode
from lnn_lightning.parallel.step.tree import tree_tensors


class UpdateWaits(StepExtension):
    """Makes steps wait for the parameters that they use, and begins updates when gradients are there.

    Args:
        held: name -> parameter as the optimizers have it.
        in_units: names of parameters that belong to units.
        early: whether the training step that begins may update parameters in its backward.
        ahead: whether state may be read ahead in the backward that begins.
    """

    def __init__(
        self,
        held: Mapping[str, Tensor],
        in_units: frozenset[str],
        early: Callable[[], bool],
        ahead: Callable[[], bool],
    ) -> None:
        self.optimizers: list[OffloadedOptimizer] = []
        self._ids = {name: id(parameter) for name, parameter in held.items()}
        self._outside = [id(parameter) for name, parameter in held.items() if name not in in_units]
        self._may_be_early, self._may_read_ahead = early, ahead
        self._early, self._parts = False, 0
        self._arrived: dict[int, int] = {}
        self._usual: set[int] = set()
        self._complete: dict[int, Tensor] = {}
        self._behind = False
        self._hook: Any = None
        self._mode: _Reads | None = None
        self._handles: list[Any] = []
        self.order: dict[int, int] = {}
        """``id`` of a parameter -> its place in the order in which forward uses them, as the first step did."""
        self._learned = False

    def arm(self, parameters: Sequence[Tensor]) -> None:
        """From now on parameters may be updated as soon as their gradients are complete."""
        self._handles += [
            parameter.register_post_accumulate_grad_hook(self._gradient)
            for parameter in parameters
            if parameter.requires_grad
        ]

    def close(self) -> None:
        """Takes away what it put on parameters."""
        self._unwatch()
        while self._handles:
            self._handles.pop().remove()

    @property
    def pending(self) -> bool:
        """Whether some parameters do not have their new values yet."""
        return any(optimizer.lane.pending for optimizer in self.optimizers)

    def settle(self) -> None:
        """Waits until all parameters and all state are those behind the last step."""
        self._unwatch()
        for optimizer in self.optimizers:
            optimizer.finish()

    def watch(self) -> None:
        """Behind a step whose work goes on: a module that is called outside of the engine's steps waits for all."""
        if self._hook is None and self.pending:
            self._hook = register_module_forward_pre_hook(lambda module, args: self.settle())

    def wait_for(self, parameters: Sequence[int]) -> None:
        """Waits for some parameters, by their ``id``."""
        for optimizer in self.optimizers:
            optimizer.wait_for(parameters)

    def _unwatch(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    # ---------------------------------------------------------------- steps

    def begin(self, parts: int, training: bool) -> None:
        """Before the first forward of a step."""
        if not training:
            self.settle()
            return
        self._unwatch()
        self._behind = True
        self.wait_for(self._outside)
        self._early, self._parts, self._arrived, self._complete = self._may_be_early(), parts, {}, {}

    def finish(self) -> None:
        """Behind a step."""
        self._learned |= bool(self.order)
        self._usual, self._early = {key for key, count in self._arrived.items() if count == self._parts}, False

    def forward(self, stage: int, index: int) -> AbstractContextManager[Any]:
        """Around a stage's forward of a micro-batch: watches the code between units."""
        return self._watching() if self.pending else nullcontext()

    @contextmanager
    def _watching(self) -> Iterator[None]:
        self._mode = _Reads(self)
        try:
            with self._mode:
                yield
        finally:
            self._mode = None

    def backward(self, stage: int, index: int) -> AbstractContextManager[Any]:
        """Around a stage's backward: what the step needs first is read ahead."""
        if self._behind:
            self._behind = False  # what no forward has used: its old gradient may be overwritten from here on
            for optimizer in self.optimizers:
                optimizer.wait_for([id(parameter) for _, parameter in optimizer.parameters()])
        if not self._early and self._may_read_ahead():
            for optimizer in self.optimizers:
                optimizer.read_ahead()
        return nullcontext()

    def call(self, run: UnitRun, body: Body, args: Any, kwargs: Any) -> Any:
        """Runs a unit, when its parameters have their new values."""
        if not self._learned:
            for name in run.call.parameters:
                if name in self._ids:
                    self.order.setdefault(self._ids[name], run.call.index)
        if not self.pending:
            return body(*args, **kwargs)
        self.wait_for([self._ids[name] for name in run.call.parameters if name in self._ids])
        with without_mode(self._mode) if self._mode is not None else nullcontext():
            return body(*args, **kwargs)

    def _gradient(self, parameter: Tensor) -> None:
        """Behind every accumulation: in the last one of the step the gradient is complete.

        Autograd goes back in the order in which forward came, so what units computed that came later than this
        parameter's is over by now, and nobody needs their old parameters any more.
        """
        if not self._early:
            return
        key = id(parameter)
        self._arrived[key] = count = self._arrived.get(key, 0) + 1
        if count > self._parts and any(optimizer.is_updated(parameter) for optimizer in self.optimizers):
            raise OffloadError(
                "A gradient arrived when its parameter had been updated already: it is made in several backwards. "
                "Set `Offload(overlap=False)`."
            )
        if count != self._parts or key not in self._usual or key not in self.order:
            return
        self._complete[key] = parameter
        for other in [each for each in self._complete if self.order[each] > self.order[key]]:
            ready = self._complete.pop(other)
            for optimizer in self.optimizers:
                if optimizer.can_update(ready):
                    optimizer.update_now(ready)


class _Reads(TorchDispatchMode):
    """Lets every operation on a parameter wait for its new values; steps aside in units, which wait as a whole."""

    def __init__(self, waits: UpdateWaits) -> None:
        super().__init__()
        self._waits = waits
        pending = [p for optimizer in waits.optimizers for _, p in optimizer.parameters() if optimizer.lane.has(id(p))]
        self._by_storage = {p.untyped_storage()._cdata: id(p) for p in pending}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._by_storage and self._waits.pending:
            for tensor in tree_tensors((args, kwargs)):
                key = self._by_storage.get(_storage(tensor))
                if key is not None:
                    self._waits.wait_for([key])
        return func(*args, **kwargs)


def _storage(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # absent values have none
        return 0


def names_within(root: nn.Module, modules: Sequence[str]) -> frozenset[str]:
    """First names of the parameters that belong to some sub-modules."""
    inside = {id(p) for name in modules for p in root.get_submodule(name).parameters()}
    return frozenset(name for name, p in root.named_parameters() if id(p) in inside)
