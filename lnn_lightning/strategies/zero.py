"""The optimizers of a strategy whose ranks hold parts of the module: which parameters stay in their groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lnn_lightning.optim.cuts import KnowsCuts
from lnn_lightning.optim.elementwise import not_elementwise
from lnn_lightning.optim.masters import Masters, masters_of
from lnn_lightning.optim.shares import OptimizerShare
from lnn_lightning.parallel.data.settings import ZeroSettings
from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.layout import EXPERT_DATA
from lnn_lightning.parallel.pipeline.train_step import TRAINING
from lnn_lightning.parallel.step.randomness import seed_of
from lnn_lightning.parallel.watch import doing
from lnn_lightning.precision import MeshHalfPrecision
from lnn_lightning.strategies.checkpoints import CheckpointHooks
from lnn_lightning.strategies.cuts import bind_cuts
from lnn_lightning.strategies.manual import SEVERAL_OPTIMIZERS

_CHECK_EVERY = 100
"""Optimizer steps between comparisons of what all tensor ranks hold: code that treats them differently must show."""
_ROUNDING = 2
"""Takes the place of a phase in the seed of stochastic rounding."""


def refuse_unsplittable(optimizer: Optimizer, way_out: str) -> None:
    """Pieces of parameters can be updated by optimizers alone that treat each element by itself.

    Args:
        optimizer: the user's.
        way_out: what to do.

    Raises:
        StepError: it is not one of them.
    """
    if "adafactor" in type(optimizer).__name__.lower():
        way_out += " `lnn_lightning.Adafactor` can: it is right on parts too."
    if (reason := not_elementwise(optimizer)) is not None:
        raise StepError(f"{type(optimizer).__name__} cannot update parts of parameters: {reason} {way_out}")


def _warn_of_low_precision_state(optimizer: Optimizer) -> None:
    low = {p.dtype for group in optimizer.param_groups for p in group["params"]} & {torch.float16, torch.bfloat16}
    if low and any("betas" in group for group in optimizer.param_groups):
        dtype = str(low.pop()).removeprefix("torch.")
        rank_zero_warn(
            f"{type(optimizer).__name__} keeps its moments in {dtype}, as the parameters are: small changes of them "
            "are rounded away. `plugins=[MeshHalfPrecision(..., master_weights=True)]` of `lnn_lightning.precision` "
            "gives the optimizer fp32 copies; `precision='bf16-mixed'` keeps everything in fp32 and computes in bf16."
        )


def _parent_of(owner: Any) -> type:
    return pl.LightningModule if isinstance(owner, pl.LightningModule) else pl.Callback


class ZeroHooks(CheckpointHooks):
    """Optimizer part of a strategy: the user's optimizers, with what this rank updates in their groups."""

    if TYPE_CHECKING:
        _zero: ZeroSettings
        _check_replicas: bool

    _shares: list[OptimizerShare]
    _masters: Sequence[Masters] = ()
    _optimizer_steps = 0

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        assert self.lightning_module is not None
        if not self.lightning_module.automatic_optimization and len(self.optimizers) > 1:
            raise StepError(SEVERAL_OPTIMIZERS)
        if any(isinstance(optimizer, LBFGS) for optimizer in self.optimizers):
            raise StepError("LBFGS needs all parameters in one place; use an optimizer that updates each by itself.")
        sharding = self.engine.sharding
        if sharding is not None:
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, BaseFinetuning):
                    raise StepError(
                        f"{type(callback).__name__} looks for the optimizer's parameters in the module, which holds "
                        f"sharded ones with `zero_stage={self._zero.stage}`. Use `zero_stage=1`."
                    )
        for optimizer in self.optimizers:
            if isinstance(optimizer, KnowsCuts):
                bind_cuts(optimizer, self.engine.residence)
            elif sharding is not None:
                way_out = "Use `zero_stage=1`, which shares out whole parameters and is right for every optimizer."
                refuse_unsplittable(optimizer, way_out)
            elif self._has_divided(optimizer):
                axis = "tensor_parallel_size" if self.engine.residence.tensor is not None else "expert_parallel_size"
                way_out = f"Use another optimizer, or a pipeline or ZeRO 1 instead of `{axis}`."
                refuse_unsplittable(optimizer, way_out)
        dealt, layout = self._zero.stage > 0, self.mesh.layout
        group = self.mesh.shard_group if dealt and layout.shard_size > 1 else None
        residence = self.engine.residence
        apart = {id(p) for name, p in self.lightning_module.named_parameters() if residence.is_expert(name)}
        experts = self.mesh.experts if dealt and layout.expert_data_size > 1 else None
        apart_group = experts.get_group(EXPERT_DATA) if experts is not None else None
        self._group_names = [[] for _ in self.optimizers]
        self._make_masters(trainer)
        self._shares = [
            OptimizerShare(
                optimizer,
                group,
                sharding.local if sharding is not None else None,
                (lambda parameter: id(parameter) in apart, apart_group),
            )
            for optimizer in self.optimizers
        ]
        self._keep_own_parameters()
        for optimizer in self.optimizers:
            _warn_of_low_precision_state(optimizer)
        self.optimizers = self.optimizers  # Lightning's wrappers copy the attributes of what they wrap

    def _has_divided(self, optimizer: Optimizer) -> bool:
        """Whether tensor or expert ranks hold parts of any of its parameters."""
        assert self.lightning_module is not None
        residence = self.engine.residence
        names = {id(p): name for name, p in self.lightning_module.named_parameters()}
        return any(
            residence.is_divided(names.get(id(p), "")) for group in optimizer.param_groups for p in group["params"]
        )

    def _keep_own_parameters(self) -> None:
        """Takes what lives elsewhere out of the optimizers' new groups, which stay, also when they become empty."""
        assert self.lightning_module is not None
        for share, known in zip(self._shares, self._group_names, strict=True):
            groups = share.optimizer.param_groups
            if len(groups) == len(known):
                continue
            names = {id(p): name for name, p in self.lightning_module.named_parameters()}
            known += [[names.get(id(parameter), "") for parameter in group["params"]] for group in groups[len(known) :]]
            share.adopt()
            if (masters := masters_of(share.optimizer)) is not None:
                residence = self.engine.residence
                masters.adopt(residence.names_by_id(), {id(piece): whole for whole, piece in share.sharded})
                residence.optimized_as([pair for each in self._masters for pair in each.copies])

    def _make_masters(self, trainer: pl.Trainer) -> None:
        """fp32 copies for the optimizers, if the precision plugin asks for them."""
        plugin = self.precision_plugin
        self._masters = []
        self.engine.residence.optimized_as([])
        if not isinstance(plugin, MeshHalfPrecision) or not plugin.has_copies:
            return
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, BaseFinetuning):
                raise StepError(
                    f"{type(callback).__name__} looks for the module's parameters in the optimizer, which has fp32 "
                    "copies of them with `master_weights` or `stochastic_rounding`. Leave these out."
                )
        if plugin.scaler is not None:
            for owner in (self.lightning_module, *trainer.callbacks):  # type: ignore[attr-defined]
                if is_overridden("on_before_optimizer_step", owner, _parent_of(owner)):
                    rank_zero_warn(
                        f"{type(owner).__name__}.on_before_optimizer_step sees no gradients in the module's "
                        "parameters: they are unscaled in fp32, in `optimizer.param_groups`. To clip them use "
                        "`gradient_clip_val` of the Trainer."
                    )
        seed = self._rounding_seed if plugin.stochastic_rounding else None
        self._masters = [Masters(optimizer, seed) for optimizer in self.optimizers]

    def _rounding_seed(self) -> int:
        return seed_of(self.engine.seed, _ROUNDING, self.engine.steps_done[TRAINING])

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        self._keep_own_parameters()  # a callback may have added groups
        result = super().optimizer_step(*args, **kwargs)
        doing("hooks behind the optimizer step")
        self._optimizer_steps += 1
        if self._replicas_are_due():
            self.engine.residence.check_replicas()
        return result

    def _replicas_are_due(self, ahead: int = 0) -> bool:
        """Whether what tensor ranks hold is compared now, or behind so many steps more."""
        steps = self._optimizer_steps + ahead
        return self._check_replicas or steps <= 2 or steps % _CHECK_EVERY == 0

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self._keep_own_parameters()
        return super().optimizer_state(optimizer)
