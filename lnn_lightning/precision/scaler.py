"""Loss scaling with one scale: an overflow on any rank skips the step on all."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lnn_lightning.optim.block_scales import BlockScales
from lnn_lightning.precision.agreement import MeshAgreement


class MeshGradScaler(torch.amp.GradScaler):
    """A ``GradScaler`` whose overflow check is agreed on over the mesh, so the scale stays the same everywhere.

    Unscaling is collective: every rank of the agreement's groups unscales its optimizers in the same order, also when
    they hold no parameter or no gradient here. Takes the arguments of :class:`torch.amp.GradScaler`.
    """

    agreement: MeshAgreement = MeshAgreement()
    blocks: BlockScales | None = None
    """Scales of blocks besides this one; set by the strategy."""

    @classmethod
    def like(cls, scaler: torch.amp.GradScaler) -> MeshGradScaler:
        """A scaler with the settings and the state of another."""
        made = cls(device=scaler._device, enabled=scaler.is_enabled())
        if scaler.is_enabled():
            made.load_state_dict(scaler.state_dict())
        return made

    # Both ways to check for overflows, `unscale_` and `_check_inf_per_device` (fused optimizers), come through here.
    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        groups = (*self.agreement.groups, *self.agreement.with_own_gradients)
        if not groups and self.blocks is None:
            return found or {found_inf.device: found_inf}
        anywhere = torch.zeros((), device=self.agreement.device)
        for value in found.values():
            anywhere = torch.maximum(anywhere, value.to(anywhere.device))
        for group in groups:
            dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=group)
        if self.blocks is not None:
            anywhere = self.blocks.agree(anywhere).to(anywhere.device)
        return {device: anywhere.to(device) for device in (found or {found_inf.device: found_inf})}

    @override
    def update(self, new_scale: float | Tensor | None = None) -> None:
        if self.blocks is not None and self.blocks.update() and new_scale is None:
            new_scale = self.get_scale()  # blocks have lowered their own
        super().update(new_scale)

    @override
    def state_dict(self) -> dict[str, Any]:
        blocks = {} if self.blocks is None else {"blocks": self.blocks.state_dict()}
        return {**super().state_dict(), **blocks}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self.blocks is not None:
            self.blocks.load_state_dict(state_dict.get("blocks", {}))

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in super().__getstate__().items() if key not in ("agreement", "blocks")}
