"""The optimizers of a strategy whose state is offloaded, and whether their work may go on beside other things."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lnn_lightning.memory.offload.optimizer import OffloadedOptimizer
from lnn_lightning.memory.offload.overlap import UpdateWaits, names_within
from lnn_lightning.memory.offload.settings import Offload, OffloadError
from lnn_lightning.memory.offload.store import Store, check_bandwidth, open_store
from lnn_lightning.optim.cuts import KnowsCuts
from lnn_lightning.parallel.exchange import all_or_none
from lnn_lightning.parallel.layout import DATA, TENSOR
from lnn_lightning.precision import (
    MeshDoublePrecision,
    MeshHalfPrecision,
    MeshMixedPrecision,
    MeshPrecision,
    loss_scale,
)
from lnn_lightning.strategies.between import AROUND_STEPS, IN_STEP, SettledFirst, unseen, watchers
from lnn_lightning.strategies.leaves import plain_optimizer
from lnn_lightning.strategies.running import StepHooks

_PLAIN = (MeshPrecision, MeshDoublePrecision, MeshMixedPrecision, MeshHalfPrecision)
"""Precision plugins that leave gradients as they are, without a scaler."""


class OffloadHooks(StepHooks):
    """Optimizer state of a strategy in host memory or in files."""

    _offload: Offload | None = None
    _state_store: Store | None = None
    _waits: UpdateWaits | None = None
    _overlaps = False
    _early = False
    _undo: Sequence[Callable[[], Any]] = ()
    _keeps_values = False

    def offload_optimizers(self, trainer: pl.Trainer) -> None:
        """Moves the state of the optimizers to where the settings say. Collective.

        Raises:
            OffloadError: an optimizer's state cannot be split, or the folder does not take it (on any rank).
        """
        self._end_offload()
        settings = self._offload
        if settings is None or not settings.has("optimizer"):
            return
        pin = self.root_device.type != "cpu" if settings.pin_memory == "auto" else settings.pin_memory

        def make() -> list[OffloadedOptimizer]:
            self._state_store = store = open_store(settings, pin)
            if settings.minimum_bandwidth is not None:
                check_bandwidth(store, settings.minimum_bandwidth)
            self._refuse_collective()
            made = [OffloadedOptimizer(plain_optimizer(each), store, settings) for each in self.optimizers]
            self._keep_masters(made)
            return made

        made = all_or_none(make, dist.group.WORLD, self.root_device)
        if settings.in_file or self.root_device.type != "cpu":  # else it stays where it is
            self._attach(trainer, settings, made)
        self.optimizers = self.optimizers  # Lightning's wrappers copy the attributes of what they wrap

    def _refuse_collective(self) -> None:
        divided = self.engine.sharding is not None or self.engine.residence.tensor is not None
        for each in map(plain_optimizer, self.optimizers):
            if divided and isinstance(each, KnowsCuts):
                raise OffloadError(
                    f"{type(each).__name__} adds up its statistics over the ranks that share parameters, all at once, "
                    "and its state is small. Leave 'optimizer' out of `Offload(what=...)`."
                )

    def _keep_masters(self, offloaded: list[OffloadedOptimizer]) -> None:
        """What an optimizer has that is no parameter of the module (fp32 master weights) is offloaded as well."""
        assert self.lightning_module is not None
        own = {id(self._held(parameter)) for parameter in self.lightning_module.parameters()}
        self._keeps_values = False
        for each in offloaded:
            for _, parameter in each.parameters():
                if id(parameter) not in own and parameter.untyped_storage().nbytes():
                    self._keeps_values |= each.keep_values(parameter)

    def _held(self, parameter: nn.Parameter) -> Tensor:
        """What optimizers have in place of a parameter of the module."""
        return parameter if self.engine.sharding is None else self.engine.sharding.local(parameter)

    def _attach(self, trainer: pl.Trainer, settings: Offload, offloaded: list[OffloadedOptimizer]) -> None:
        engine, module = self.engine, self.lightning_module
        assert module is not None
        held = {name: self._held(parameter) for name, parameter in module.named_parameters()}
        units = names_within(module, engine.book.units.names)
        self._waits = UpdateWaits(held, units, self._may_be_early, self._may_read_ahead)
        self._waits.optimizers = offloaded
        engine.extensions.insert(0, self._waits)
        for each in offloaded:
            each.order, each.may_go_on = self._waits.order, self._may_go_on
        hook = module.register_state_dict_pre_hook(lambda *_: self.settle_updates())
        watched = watchers(trainer, AROUND_STEPS)
        guard = SettledFirst(self.settle_updates, bool(watched))
        trainer.callbacks.insert(0, guard)  # type: ignore[attr-defined]
        self._undo = [hook.remove, lambda: trainer.callbacks.remove(guard)]  # type: ignore[attr-defined]
        reasons = self._against_overlap(trainer, settings) if settings.overlap else []
        self._overlaps = settings.overlap and not reasons
        if reasons := reasons or (watched if self._overlaps else []):
            rank_zero_info(
                f"The offloaded optimizer ends its step before anything else runs, not beside the next forward, as "
                f"{', '.join(dict.fromkeys(reasons))} could see parameters in between."
            )
        self._early = self._may_begin_in_backward(trainer, offloaded)
        if self._early:
            residence = engine.residence
            self._waits.arm([p for name, p in module.named_parameters() if residence.ranks_of(name) == (engine.rank,)])

    def _against_overlap(self, trainer: pl.Trainer, settings: Offload) -> list[str]:
        """Why parameters may not be updated behind a step."""
        reasons = unseen(trainer)
        assert self.lightning_module is not None
        if not self.lightning_module.automatic_optimization:
            reasons.append("manual optimization")
        if settings.has("parameters") or settings.has("gradients"):
            reasons.append("offloaded parameters or gradients")
        if any(share.sends for share in self._shares):
            reasons.append("ZeRO, which sends new values to other ranks,")
        return reasons

    def _may_begin_in_backward(self, trainer: pl.Trainer, offloaded: list[OffloadedOptimizer]) -> bool:
        """Whether nothing looks at a gradient, or changes it, between backward and the optimizer's step."""
        plugin, mesh = self.precision_plugin, self.mesh
        return (
            self._overlaps
            and not watchers(trainer, IN_STEP)
            and not trainer.gradient_clip_val
            and type(plugin) in _PLAIN
            and not any(getattr(plugin, each, None) for each in ("scaler", "gradient_scales"))
            and mesh.size(DATA) == mesh.size(TENSOR) == 1
            and not any(each.behaviour.counts or each.optimizer._optimizer_step_pre_hooks for each in offloaded)
        )

    # ---------------------------------------------------------------- while it trains

    def settle_updates(self) -> None:
        """Waits until all parameters and all optimizer state are those behind the last step."""
        if self._waits is not None:
            self._waits.settle()

    def _may_go_on(self) -> bool:
        return self._overlaps and not (self.engine.residence.tensor is not None and self._replicas_are_due(1))

    def _may_be_early(self) -> bool:
        assert self.lightning_module is not None
        return self._early and self.lightning_module.trainer.accumulate_grad_batches == 1

    def _may_read_ahead(self) -> bool:
        return self._sync_gradients and loss_scale(self.precision_plugin) == 1.0

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(*args, **kwargs)
        if self._waits is not None:
            self._waits.watch()
            if self._keeps_values:
                self._release()
        return result

    def _release(self) -> None:
        if self._state_store is not None:
            self._state_store.release()

    # ---------------------------------------------------------------- whoever looks

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self.settle_updates()
        return super().optimizer_state(optimizer)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, filepath, storage_options)
        self._release()

    @override
    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        for each in self._waits.optimizers if self._waits is not None else ():
            each.reserve()
            each.expose()
        super().load_optimizer_state_dict(checkpoint)
        for each in self._waits.optimizers if self._waits is not None else ():
            each.conceal()
        self._release()

    def _end_offload(self) -> None:
        """Ends what an earlier run of the Trainer began, when its work is done."""
        if self._waits is None:
            return
        waits, self._waits = self._waits, None
        if waits in self.engine.extensions:
            self.engine.extensions.remove(waits)
        try:
            waits.settle()
        finally:
            waits.close()
            for undo in self._undo:
                undo()
            for each in waits.optimizers:
                each.close()
            if self._state_store is not None:
                self._state_store.close()
                self._state_store = None

    @override
    def teardown(self) -> None:
        if sys.exc_info()[0] is None:
            self._end_offload()
        else:
            with suppress(Exception):  # the error that ends the run is what the user needs to know
                self._end_offload()
        super().teardown()
