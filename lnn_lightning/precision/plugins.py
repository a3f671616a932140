"""Lightning's precision plugins, made to agree over the mesh and to keep stand-ins without memory."""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
from lightning.fabric.plugins.precision import Precision as FabricPrecision
from lightning.pytorch.core.hooks import CheckpointHooks
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lnn_lightning.optim.clipping import clip_grad_by_mesh_norm
from lnn_lightning.parallel.step.standin import convert_module
from lnn_lightning.precision.agreement import MeshAgreement
from lnn_lightning.precision.scaler import MeshGradScaler


class MeshPrecision(Precision):
    """Single precision (``32-true``), and what all plugins here add to Lightning's."""

    _agreement: MeshAgreement = MeshAgreement()

    @property
    def agreement(self) -> MeshAgreement:
        """Whom to ask; set by the strategy."""
        return self._agreement

    @agreement.setter
    def agreement(self, agreement: MeshAgreement) -> None:
        self._agreement = agreement
        if isinstance(scaler := getattr(self, "scaler", None), MeshGradScaler):
            scaler.agreement = agreement

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_grad_by_mesh_norm(
            self.main_params(optimizer), float(clip_val), self.agreement.groups, self.agreement.counted
        )


class MeshDoublePrecision(MeshPrecision, DoublePrecision):
    """Double precision (``64-true``)."""

    @override
    def convert_module(self, module: Module) -> Module:
        return convert_module(module, dtype=torch.float64)


class MeshHalfPrecision(MeshPrecision, HalfPrecision):
    """Half precision without a copy in fp32 (``bf16-true``, ``16-true``).

    Args:
        precision: which.
    """

    def __init__(self, precision: Literal["bf16-true", "16-true"] = "16-true") -> None:
        super().__init__(precision)

    @override
    def convert_module(self, module: Module) -> Module:
        return convert_module(module, dtype=self._desired_input_dtype)


class MeshMixedPrecision(MeshPrecision, MixedPrecision):
    """Mixed precision (``bf16-mixed``, ``16-mixed``).

    Lightning turns ``Trainer(precision="16-mixed", accelerator="cpu")`` into bf16; for fp16 on CPU pass
    ``plugins=[MeshMixedPrecision("16-mixed", device="cpu")]``.

    Args:
        precision: which.
        device: type of the device that autocast works on.
        scaler: loss scaler for fp16; an ordinary one is turned into a :class:`MeshGradScaler` with its settings.

    Raises:
        MisconfigurationException: the scaler is of a kind that cannot be turned into one that agrees over the mesh.
    """

    scaler: MeshGradScaler | None

    def __init__(
        self,
        precision: Literal["16-mixed", "bf16-mixed"],
        device: str = "cuda",
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        if scaler is not None:
            scaler = _mesh_scaler(scaler)
        elif precision == "16-mixed":
            scaler = MeshGradScaler(device)
        super().__init__(precision, device, scaler)


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
