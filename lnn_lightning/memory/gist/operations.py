"""The operations of a step whose savings are known, found while the step runs: whatever module or function calls them.

A function mode sees every call of a torch function. It runs the very same operation, whose own backward is used; only
what the operation saves is packed by someone who knows what the backward asks of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lnn_lightning.memory.gist.masks import BooleanEncoder, ReluMask
from lnn_lightning.memory.gist.pools import Windows, max_pool_packer, mean_pool_packer
from lnn_lightning.memory.gist.precision import PrecisionEncoder
from lnn_lightning.memory.gist.rebuild import ELEMENTWISE, RECIPES, Rebuilding
from lnn_lightning.memory.gist.settings import Gist
from lnn_lightning.memory.report import Report
from lnn_lightning.memory.saved_tensors import Encoder, SavedTensors
from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.step.extension import StepExtension

_RELUS = {F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_}
_MAX_POOLS = {F.max_pool2d, torch.max_pool2d}
_MEAN_POOLS = {F.avg_pool2d, F.adaptive_avg_pool2d}
_SAVES_INPUT = {F.conv1d, F.conv2d, F.conv3d, F.linear, torch.matmul, Tensor.matmul}
_CHANGES_NOTHING = {Tensor.size, Tensor.dim, Tensor.view, Tensor.reshape, Tensor.flatten, torch.flatten}
_PLAIN = {Tensor, nn.Parameter, nn.Buffer}
_NOT_THE_USERS = ("torch.utils.checkpoint", "torch._", "lnn_lightning.")
"""Modules whose saved-tensor hooks may come and go inside the step: what they see is recomputed, not kept."""


class GistOperations(StepExtension):
    """Packs what ReLUs, pools and what follows them save. Goes behind its :class:`SavedTensors`.

    Args:
        settings: what to do.
        tell: gets the bytes of the first training step, once.
    """

    def __init__(self, settings: Gist, tell: Callable[[Report], None] | None = None) -> None:
        self._settings, self._tell = settings, tell
        self._rebuilding = Rebuilding()
        self.saved: SavedTensors
        self.report: Report | None = None
        """Bytes of the first micro-batch of the first training step in all stages of this rank."""
        self._finished = False

    def encoders(self) -> Sequence[Encoder]:
        """What the saved tensors are to be encoded with."""
        made: list[Encoder] = [self._rebuilding] if self._settings.rebuild else []
        made += [BooleanEncoder()] if self._settings.binarize else []
        return [*made, *([PrecisionEncoder(self._settings.dpr)] if self._settings.dpr is not None else [])]

    def attach(self, saved: SavedTensors) -> None:
        """Names what was made with :meth:`encoders`."""
        self.saved = self._rebuilding.saved = saved

    @override
    def begin(self, parts: int, training: bool) -> None:
        if training and self.report is None:
            self.report = Report()

    @override
    def finish(self) -> None:
        if self.report is not None and not self._finished and self.report.by_encoding:
            self._finished = True
            if self._tell is not None:
                self._tell(self.report)

    @override
    @contextmanager
    def forward(self, stage: int, index: int) -> Iterator[None]:
        mode = _Operations(self._settings, self.saved, self._rebuilding)
        self.saved.report = self.report if index == 0 and not self._finished else None
        try:
            with mode:
                yield
        finally:
            mode.settle()
            self._rebuilding.clear()
            self.saved.report = None


class _Operations(TorchFunctionMode):
    def __init__(self, settings: Gist, saved: SavedTensors, rebuilding: Rebuilding) -> None:
        super().__init__()
        self._settings, self._saved, self._rebuilding = settings, saved, rebuilding
        self._mask: ReluMask | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        mask = self._mask
        if mask is not None and func not in _CHANGES_NOTHING and getattr(func, "__name__", "") != "__get__":
            if func in _SAVES_INPUT:
                result = self._run(func, types, args, kwargs)
                self.settle()
                return result
            self.settle()
        return self._run(func, types, args, kwargs)

    def settle(self) -> None:
        """The output of the last ReLU is not held any more."""
        mask, self._mask = self._mask, None
        if mask is not None:
            mask.settle()

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if not self._saved.active():
            _refuse_hooks()
            return func(*args, **kwargs)
        value = args[0] if args else kwargs.get("input")
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            return func(*args, **kwargs)
        if func in _RELUS and self._settings.binarize:
            return self._relu(func, args, kwargs)
        if not _PLAIN.issuperset(types) and func not in ELEMENTWISE:
            return func(*args, **kwargs)  # a subclass, as of tensor parallelism, may do anything else
        if self._settings.binarize:
            if func in _MAX_POOLS and (windows := _windows(*args, **kwargs)) is not None:
                with self._saved.packing(max_pool_packer(self._saved, value, windows)):
                    return func(*args, **kwargs)
            if func in _MEAN_POOLS:
                with self._saved.packing(mean_pool_packer(self._saved, value)):
                    return func(*args, **kwargs)
        return self._remembered(func, args, kwargs)

    def _remembered(self, func: Any, args: Any, kwargs: Any) -> Any:
        again = RECIPES.get(func) if self._settings.rebuild else None
        if again is None or "out" in kwargs:
            return func(*args, **kwargs)
        return self._rebuilding.run(func, again, args, kwargs)

    def _relu(self, func: Any, args: Any, kwargs: Any) -> Any:
        made: list[ReluMask] = []

        def pack(tensor: Tensor) -> Any:
            node = tensor.grad_fn
            bytes_of = tensor.numel() * tensor.element_size()
            if made or type(node).__name__ != "ReluBackward0" or bytes_of < self._saved.smallest:
                return None
            if tensor.untyped_storage().nbytes() != bytes_of:
                return None
            made.append(ReluMask(self._saved, tensor))
            return made[0]

        with self._saved.packing(pack):
            result = self._remembered(func, args, kwargs)
        self._mask = made[0] if made else None
        return result


def _windows(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Windows | None:
    """The windows of a max-pool's arguments; None if its indices are wanted or do not fit a byte."""
    if return_indices:
        return None
    kernel = _pair(kernel_size)
    strides = kernel if stride is None or stride == [] else _pair(stride)
    height, width = input.shape[-2:]
    windows = Windows((height, width), kernel, strides, _pair(padding), _pair(dilation))
    return windows if windows.fits else None


def _pair(value: Any) -> tuple[int, int]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return (values[0], values[-1])


def _refuse_hooks() -> None:
    top: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if top is None:
        return
    origin = getattr(top[0], "__module__", None) or type(top[0]).__module__
    if not origin.startswith(_NOT_THE_USERS):
        name = getattr(top[0], "__qualname__", type(top[0]).__qualname__)
        raise StepError(
            f"The step enters `saved_tensors_hooks` of its own ({origin}.{name}): torch gives saved tensors to the "
            "innermost hooks only, so `activation_compression` never sees them. Remove the hooks (`save_on_cpu` or "
            "others) from the model, or leave out `activation_compression`."
        )
