"""Lightning's precision plugins, made to agree over the mesh and to keep stand-ins without memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.precision import Precision as FabricPrecision
from lightning.pytorch.core.hooks import CheckpointHooks
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lnn_lightning.optim.block_scales import BlockScaling
from lnn_lightning.optim.clipping import clip_grad_by_mesh_norm
from lnn_lightning.optim.masters import masters_of
from lnn_lightning.parallel.step.standin import convert_module
from lnn_lightning.precision.agreement import MeshAgreement
from lnn_lightning.precision.scaler import MeshGradScaler

ReduceDtype = Literal["fp32", "bf16", "fp16"]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class MeshPrecision(Precision):
    """Single precision (``32-true``), and what all plugins here add to Lightning's.

    Args:
        reduce_dtype: in which ranks add up gradients: ``fp32``, ``bf16`` or ``fp16``. None: the gradients' own, but
            fp32 for half precision, which would lose small terms of the sum; that sends twice the bytes.

    Raises:
        MisconfigurationException: there is no such dtype.
    """

    reduce_dtype: ReduceDtype | None = None
    _agreement: MeshAgreement = MeshAgreement()

    def __init__(self, reduce_dtype: ReduceDtype | None = None) -> None:
        if reduce_dtype is not None and reduce_dtype not in _DTYPES:
            raise MisconfigurationException(
                f"`reduce_dtype` must be None or one of {', '.join(map(repr, _DTYPES))}, got {reduce_dtype!r}."
            )
        self.reduce_dtype = reduce_dtype

    @property
    def agreement(self) -> MeshAgreement:
        """Whom to ask; set by the strategy."""
        return self._agreement

    @agreement.setter
    def agreement(self, agreement: MeshAgreement) -> None:
        self._agreement = agreement
        self._agreed()
        if isinstance(scaler := getattr(self, "scaler", None), MeshGradScaler):
            scaler.agreement = agreement

    def _agreed(self) -> None:
        """Called when the agreement, and with it the device, is known."""

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        given = self.agreement
        clip_grad_by_mesh_norm(
            self.main_params(optimizer), float(clip_val), given.groups, given.counted, looked_at=given.looked_at
        )


class MeshDoublePrecision(MeshPrecision, DoublePrecision):
    """Double precision (``64-true``)."""

    @override
    def convert_module(self, module: Module) -> Module:
        return convert_module(module, dtype=torch.float64)


class MeshHalfPrecision(MeshPrecision, HalfPrecision):
    """Half precision (``bf16-true``, ``16-true``): parameters, gradients and computation.

    With ``master_weights`` the optimizer works on fp32 copies of what this rank updates, and so its own state is fp32
    too. Gradients are in ``parameter.grad`` until they are clipped or the optimizer steps (with a scaler, until they
    are unscaled); then they move into the copies, which are what the optimizer's groups hold: code of the user's own
    that clips or looks at ``parameter.grad`` does so before, or uses the groups.

    Args:
        precision: which.
        master_weights: the optimizer updates fp32 copies; rounded values go to the parameters.
        scaler: (``16-true`` with master weights) loss scaler; None: one with torch's defaults.
        stochastic_rounding: (``bf16-true``) the optimizer updates fp32 copies that exist during its step only, and the
            parameters get values rounded up or down by chance, which are right on average. Needs no memory between
            steps.
        reduce_dtype: as in :class:`MeshPrecision`.

    Raises:
        MisconfigurationException: settings that do not fit each other.
    """

    master_weights: bool = False
    stochastic_rounding: bool = False
    scaler: MeshGradScaler | None = None

    def __init__(
        self,
        precision: Literal["bf16-true", "16-true"] = "16-true",
        master_weights: bool = False,
        scaler: torch.amp.GradScaler | None = None,
        stochastic_rounding: bool = False,
        reduce_dtype: ReduceDtype | None = None,
    ) -> None:
        MeshPrecision.__init__(self, reduce_dtype)
        HalfPrecision.__init__(self, precision)
        if stochastic_rounding and (master_weights or precision != "bf16-true"):
            raise MisconfigurationException(
                "`stochastic_rounding=True` is for `bf16-true` without `master_weights`, which lose nothing."
            )
        if scaler is not None and (precision != "16-true" or not master_weights):
            raise MisconfigurationException(
                "A loss scaler needs `MeshHalfPrecision('16-true', master_weights=True)`: bf16 needs no scaling, and "
                "gradients in fp16 would underflow again when they are unscaled."
            )
        self.master_weights, self.stochastic_rounding = master_weights, stochastic_rounding
        self.scaler = _mesh_scaler(scaler) if scaler is not None else None

    @property
    def has_copies(self) -> bool:
        """Whether the optimizer works on fp32 copies."""
        return self.master_weights or self.stochastic_rounding

    @override
    def _agreed(self) -> None:
        if self.scaler is None and self.master_weights and self.precision == "16-true":
            self.scaler = MeshGradScaler(self.agreement.device.type)

    @override
    def convert_module(self, module: Module) -> Module:
        return convert_module(module, dtype=self._desired_input_dtype)

    @override
    def pre_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        return super().pre_backward(tensor if self.scaler is None else self.scaler.scale(tensor), module)

    @override
    def clip_gradients(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        if (masters := masters_of(optimizer)) is not None:
            masters.take_gradients()
        super().clip_gradients(optimizer, *args, **kwargs)

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        masters = masters_of(optimizer)
        if self.has_copies and masters is None:
            raise MisconfigurationException(
                "`master_weights` and `stochastic_rounding` of `MeshHalfPrecision` need `PTDPStrategy`, got "
                f"`{type(model.trainer.strategy).__name__}`, which gives the optimizer no fp32 copies."
            )
        if self.scaler is None or masters is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        result = closure()
        if result is None and model.automatic_optimization:  # the step had no loss
            self._after_closure(model, optimizer)
            return result
        masters.take_gradients()
        self.scaler.unscale_(optimizer)
        self._after_closure(model, optimizer)
        result = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        masters.end_step()
        return result

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.scaler.state_dict() if self.scaler is not None else {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.scaler is not None:
            self.scaler.load_state_dict(state_dict)


class MeshMixedPrecision(MeshPrecision, MixedPrecision):
    """Mixed precision (``bf16-mixed``, ``16-mixed``).

    Lightning turns ``Trainer(precision="16-mixed", accelerator="cpu")`` into bf16; for fp16 on CPU pass
    ``plugins=[MeshMixedPrecision("16-mixed", device="cpu")]``.

    Args:
        precision: which.
        device: type of the device that autocast works on.
        scaler: loss scaler for fp16; an ordinary one is turned into a :class:`MeshGradScaler` with its settings.
        reduce_dtype: as in :class:`MeshPrecision`.
        gradient_scales: (``16-mixed``) ``"per_block"``, or settings: each block of the module has a gradient scale of
            its own besides the loss scale, for models so deep that no single scale fits all blocks.

    Raises:
        MisconfigurationException: there is no such dtype, the precision has no scaler, or the scaler is of a kind that
            cannot be turned into one that agrees over the mesh.
    """

    scaler: MeshGradScaler | None
    gradient_scales: BlockScaling | None = None

    def __init__(
        self,
        precision: Literal["16-mixed", "bf16-mixed"],
        device: str = "cuda",
        scaler: torch.amp.GradScaler | None = None,
        reduce_dtype: ReduceDtype | None = None,
        gradient_scales: Literal["per_block"] | BlockScaling | None = None,
    ) -> None:
        MeshPrecision.__init__(self, reduce_dtype)
        if gradient_scales == "per_block":
            gradient_scales = BlockScaling()
        if gradient_scales is not None and not isinstance(gradient_scales, BlockScaling):
            raise MisconfigurationException(
                f"`gradient_scales` must be None, 'per_block' or a `BlockScaling`, got {gradient_scales!r}."
            )
        if gradient_scales is not None and (
            precision != "16-mixed" or (scaler is not None and not scaler.is_enabled())
        ):
            raise MisconfigurationException(
                "`gradient_scales` is for `16-mixed` with a scaler: other precisions have the range of fp32."
            )
        self.gradient_scales = gradient_scales
        if scaler is not None:
            scaler = _mesh_scaler(scaler)
        elif precision == "16-mixed":
            scaler = MeshGradScaler(device)
        MixedPrecision.__init__(self, precision, device, scaler)


_KINDS: dict[type[Precision], type[MeshPrecision]] = {
    MixedPrecision: MeshMixedPrecision,
    HalfPrecision: MeshHalfPrecision,
    DoublePrecision: MeshDoublePrecision,
    Precision: MeshPrecision,
}
# Where a plugin meets gradients, the loss or the parameters: what such code does is only known for one process.
_OURS = (
    *("clip_gradients", "clip_grad_by_norm", "main_params", "convert_module", "pre_backward", "backward"),
    *("post_backward", "optimizer_step", "_after_closure", "_wrap_closure", "_clip_gradients"),
)


def mesh_precision(plugin: Precision, agreement: MeshAgreement) -> Precision:
    """Turns the plugin that Lightning made, or the user gave, into one that agrees over the mesh.

    Args:
        plugin: it is not changed, unless it is one of this module's.
        agreement: whom to ask.

    Returns:
        A plugin with the same settings. For a subclass of one of Lightning's that leaves clipping, backward, the
        optimizer step and the conversion of the module alone: one that keeps what the subclass does.

    Raises:
        MisconfigurationException: the plugin does something of its own there.
    """
    if isinstance(plugin, MeshPrecision):
        plugin.agreement = agreement
        return plugin
    kind = type(plugin)
    base = next(known for known in _KINDS if isinstance(plugin, known))
    overridden = sorted(
        {name for owner in kind.__mro__ if owner not in _lightnings_own() for name in _OURS if name in vars(owner)}
    )
    if overridden:
        raise MisconfigurationException(
            f"The precision plugin `{kind.__qualname__}` has its own {', '.join(f'`{name}`' for name in overridden)}, "
            "which knows nothing of gradients and parameters on other ranks. Use one of the precisions 32-true, "
            "64-true, bf16-true, 16-true, bf16-mixed and 16-mixed, or write the plugin as a subclass of "
            f"`lnn_lightning.precision.{_KINDS[base].__name__}`."
        )
    result = copy.copy(plugin)
    ours = _KINDS[base]
    result.__class__ = ours if kind is base else type(f"Mesh{kind.__name__}", (kind, ours), {})
    if isinstance(result, MeshMixedPrecision) and result.scaler is not None:
        result.scaler = _mesh_scaler(result.scaler)
    assert isinstance(result, MeshPrecision)
    result.agreement = agreement
    return result


def loss_scale(plugin: FabricPrecision) -> float:
    """The factor by which the plugin's ``pre_backward`` multiplies the loss."""
    scaler = getattr(plugin, "scaler", None)
    return scaler.get_scale() if scaler is not None and scaler.is_enabled() else 1.0


def reduce_dtype_of(plugin: FabricPrecision) -> torch.dtype | None:
    """The dtype in which the plugin wants gradients to be added up; None: it leaves that open."""
    return _DTYPES.get(getattr(plugin, "reduce_dtype", None) or "")


def _lightnings_own() -> tuple[type, ...]:
    return (*_KINDS, FabricPrecision, CheckpointHooks, object)


def _mesh_scaler(scaler: Any) -> MeshGradScaler:
    if isinstance(scaler, MeshGradScaler):
        return scaler
    if type(scaler) not in (torch.amp.GradScaler, torch.cuda.amp.GradScaler, torch.cpu.amp.GradScaler):
        raise MisconfigurationException(
            f"The loss scaler `{type(scaler).__qualname__}` cannot agree with other ranks on overflows. Use "
            "`lnn_lightning.precision.MeshGradScaler`, or make yours a subclass of it."
        )
    return MeshGradScaler.like(scaler)
