"""Local SGD in a Trainer: parameters are averaged when it is time, and before anybody looks at them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, WeightAveraging
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from typing_extensions import override

from lnn_lightning.communication import Compressors
from lnn_lightning.communication.local import LocalSteps, of_optimizer
from lnn_lightning.parallel.errors import LayoutError, StepError
from lnn_lightning.parallel.layout import DATA

if TYPE_CHECKING:
    from lnn_lightning.parallel.pipeline.residence import Residence
    from lnn_lightning.strategies.compression import CompressionHooks

Parts = Sequence[Sequence[Tensor]]


def add_first(trainer: pl.Trainer, callback: Callback) -> None:
    """Puts a callback before those of the user, in the place of another of its kind."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    callbacks[:] = [callback, *(each for each in callbacks if type(each) is not type(callback))]


class LocalAveraging(Callback):
    """Averages parameters behind steps, before validation, checkpoints and the end; stands first among the callbacks.

    Args:
        steps: what counts steps and averages; None: this rank has nothing that learns.
        parts: the parameters, see :meth:`LocalSteps.settle`.
    """

    def __init__(self, steps: Callable[[], LocalSteps | None], parts: Callable[[], Parts]) -> None:
        self._steps, self._parts = steps, parts
        self._states_averaged = 0  # behind which step
        self._alone = False  # other ranks may be gone

    def settle(self, trainer: pl.Trainer, states: bool = False) -> None:
        """Lets all ranks hold the same parameters. Collective.

        Args:
            trainer: whose optimizers there are.
            states: their state too.
        """
        steps = self._steps()
        if steps is None or self._alone:
            return
        parts = self._parts()
        steps.settle(parts)
        if states and steps.apart_since(self._states_averaged):
            for optimizer in trainer.strategy.optimizers:
                steps.average_all(of_optimizer(optimizer, parts))
            self._states_averaged = steps.step

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        save = trainer.save_checkpoint
        if not hasattr(save, "__wrapped__"):

            @wraps(save)
            def save_checkpoint(*args: Any, **kwargs: Any) -> None:
                for callback in trainer.callbacks:  # type: ignore[attr-defined]
                    if isinstance(callback, LocalAveraging):
                        callback.settle(trainer, states=True)
                save(*args, **kwargs)

            trainer.save_checkpoint = save_checkpoint  # type: ignore[method-assign]
        if any(isinstance(callback, WeightAveraging) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            raise StepError(
                "LocalSGD does not go with WeightAveraging: each rank would average parameters of its own. Leave one "
                "of them out."
            )

    @override
    def on_train_start(self, *_: Any) -> None:
        if (steps := self._steps()) is not None:
            self._states_averaged = steps.step  # optimizers are new, or out of a checkpoint

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if (steps := self._steps()) is not None and steps.is_due:
            steps.settle(self._parts())

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.settle(trainer)

    @override
    def on_validation_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.settle(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.settle(trainer, states=True)  # a checkpoint may be saved behind the end, too

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._alone = not isinstance(exception, SIGTERMException)  # which is raised on all ranks


def refuse_local_steps(zero_stage: int, experts: bool, offload: bool) -> None:
    """What data ranks that step by themselves do not go with.

    Raises:
        LayoutError: one of these was asked for.
    """
    reasons = {
        f"`zero_stage={zero_stage}`: a data rank updates a part of the parameters only, and needs the others' "
        "gradients for it in each step. Use `zero_stage=0`": zero_stage > 0,
        "`expert`: data ranks hold different experts, whose gradients come from the tokens of all": experts,
        "`offload`: parameters and optimizer state would have to come back for each average": offload,
    }
    for reason, asked in reasons.items():
        if asked:
            raise LayoutError(f"`gradient_compression=LocalSGD(...)` does not go with {reason}.")


def refuse_copies(plugin: Any) -> None:
    """Precisions whose state would differ between data ranks.

    Raises:
        StepError: it is one.
    """
    if getattr(plugin, "has_copies", False):
        raise StepError(
            "LocalSGD averages parameters, not the fp32 copies of `master_weights` and `stochastic_rounding`. Leave "
            "these out, or use `bf16-mixed`."
        )
    if getattr(plugin, "gradient_scales", None) is not None:
        raise StepError("LocalSGD does not go with `gradient_scales` of blocks. Use the loss scale alone.")


def set_up_local_steps(strategy: CompressionHooks, trainer: pl.Trainer) -> None:
    """Lets the data ranks of a strategy step by themselves; before the optimizers are made."""
    refuse_copies(strategy.precision_plugin)
    reduction = strategy.engine.reduction

    def steps() -> LocalSteps | None:
        found = reduction.by_place.get(DATA) if isinstance(reduction, Compressors) else None
        return found if isinstance(found, LocalSteps) else None

    add_first(trainer, LocalAveraging(steps, LearningParts(strategy.engine.residence)))


class LearningParts:
    """The parameters of a rank that have learned, as :meth:`LocalSteps.settle` takes them.

    Args:
        residence: what lives here.
    """

    def __init__(self, residence: Residence) -> None:
        self._residence = residence
        self._learned: set[str] = set()

    def __call__(self) -> list[list[nn.Parameter]]:
        """Those that several stages hold one by one, those that tensor ranks hold alike, and their parts."""
        residence = self._residence
        alone: list[list[nn.Parameter]] = []
        alike: list[nn.Parameter] = []
        divided: list[nn.Parameter] = []
        for name, parameter in residence.root.named_parameters():
            if not residence.lives_here(name):
                continue
            if parameter.requires_grad:
                self._learned.add(name)
            if name not in self._learned:
                continue
            if len(residence.ranks_of(name)) > 1:
                alone.append([parameter])
            else:
                (divided if residence.is_divided(name) else alike).append(parameter)
        return [*alone, alike, divided]
