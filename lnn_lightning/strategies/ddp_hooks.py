"""Compression in Lightning's own ``DDPStrategy``, which registers hooks on CUDA only and saves nothing of them."""

from __future__ import annotations

from functools import wraps
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS
from typing_extensions import override

from lnn_lightning.communication import Compression, Compressors, attach
from lnn_lightning.communication.local import LocalSGD, LocalSteps
from lnn_lightning.communication.states import gathered, packed, take
from lnn_lightning.parallel.errors import LayoutError, StepError
from lnn_lightning.precision import loss_scale
from lnn_lightning.strategies.compression import advise
from lnn_lightning.strategies.local_steps import LocalAveraging, add_first

KEY = "lnn_lightning.gradient_compression"
"""Of the state in a checkpoint."""


def let_lightning_call_our_hooks() -> None:
    """Teaches ``DDPStrategy(ddp_comm_hook=...)`` our compressions, on every device; other hooks go on as before."""
    original = DDPStrategy._register_ddp_hooks
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def register(self: DDPStrategy) -> None:
        if isinstance(self._ddp_comm_hook, Compression):
            carry(self, self._ddp_comm_hook)
        else:
            original(self)

    DDPStrategy._register_ddp_hooks = register  # type: ignore[method-assign]


def carry(strategy: DDPStrategy, compression: Compression) -> None:
    """Lets a strategy that has wrapped its module compress gradients. Collective.

    Raises:
        LayoutError: there are other arguments that a compression of ours does not go with.
        StepError: the module or its training does not go with it.
    """
    module, model = strategy.lightning_module, strategy.model
    assert module is not None and isinstance(model, DistributedDataParallel)
    trainer = module.trainer
    _refuse(strategy, compression, trainer)
    loaded = trainer._checkpoint_connector._loaded_checkpoint
    before = _of_fit_before(trainer, module, compression)  # where it is, it has taken what is loaded
    seed = strategy.broadcast(torch.initial_seed() % 2**62)
    if before is not None:
        seed = before.seed
    elif KEY in loaded:
        seed = loaded[KEY]["seed"]
    carried = CarriedCompression(attach(model, compression, seed), module)
    if before is not None:
        carried.compressors.load_state_dict(before.state_dict())
    elif loaded:
        carried.on_load_checkpoint(trainer, module, loaded)
    add_first(trainer, carried)
    if isinstance(compression, LocalSGD):
        (steps,) = carried.compressors.by_place.values()
        assert isinstance(steps, LocalSteps)
        learning = [p for n, p in module.named_parameters() if p.requires_grad and n not in model.parameters_to_ignore]
        add_first(trainer, LocalAveraging(lambda: steps, lambda: [learning]))


def _of_fit_before(trainer: Any, module: pl.LightningModule, compression: Compression) -> Compressors | None:
    """What compressed the gradients of this module in another fit."""
    for callback in trainer.callbacks:
        if isinstance(callback, CarriedCompression) and callback.is_for(module, compression):
            return callback.compressors
    return None


def _refuse(strategy: DDPStrategy, compression: Compression, trainer: pl.Trainer) -> None:
    name = type(compression).__name__
    for argument in ("ddp_comm_wrapper", "ddp_comm_state", "model_averaging_period"):
        if getattr(strategy, f"_{argument}") is not None:
            raise LayoutError(
                f"`DDPStrategy(ddp_comm_hook={name}(...))` does not go with `{argument}`, which is for hooks of torch: "
                f"{name} has its own state, and takes no other hook in. Leave `{argument}` out."
            )
    if isinstance(compression, LocalSGD) and loss_scaler(trainer.precision_plugin) is not None:
        raise StepError(
            "LocalSGD does not go with the loss scaler of `precision='16-mixed'` in DDPStrategy: each rank would skip "
            "steps and change its scale by itself. Use `bf16-mixed`, or `PTDPStrategy(gradient_compression=LocalSGD("
            "...))`, whose ranks agree on both."
        )


def loss_scaler(plugin: Any) -> Any:
    """The loss scaler of a precision plugin that scales; None: it does not."""
    scaler = getattr(plugin, "scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None


class CarriedCompression(Callback):
    """Tells compressors the loss scale, and brings their state into checkpoints.

    Args:
        compressors: of the module.
        module: whose gradients they reduce.
    """

    def __init__(self, compressors: Compressors, module: pl.LightningModule) -> None:
        self.compressors, self._module = compressors, module
        self._alone = False  # other ranks may be gone

    def is_for(self, module: pl.LightningModule, compression: Compression) -> bool:
        """Whether a new fit goes on with this state."""
        return self._module is module and self.compressors.compression == compression

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        compression = self.compressors.compression
        advise(compression, trainer.optimizers)
        if not compression.remembers:
            return
        name = type(compression).__name__
        if not pl_module.automatic_optimization and len(trainer.optimizers) > 1:
            raise StepError(
                f"{name} needs each gradient to be reduced once a step and stepped with. Manual optimization with "
                f"{len(trainer.optimizers)} optimizers runs several backwards a step, and each reduces the gradients "
                "of all parameters, also those that are thrown away. Use a compression that remembers nothing, such as "
                "Cast, or one optimizer."
            )
        if any(isinstance(optimizer, LBFGS) for optimizer in trainer.optimizers):
            raise StepError(
                f"{name} needs each gradient to be reduced once a step. LBFGS runs several backwards a step. Use "
                "another optimizer, or a compression that remembers nothing, such as Cast."
            )

    @override
    def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        if loss_scaler(trainer.precision_plugin) is not None:
            self.compressors.scaled(loss_scale(trainer.precision_plugin))

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._alone = not isinstance(exception, SIGTERMException)  # which is raised on all ranks

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        states: list[Any] | None = []
        if not self._alone:
            states = gathered(self.compressors.state_dict(), _world(), trainer.strategy.root_device)
        if states is not None:
            checkpoint[KEY] = packed(self.compressors, states)

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if pl_module is not self._module:
            return
        saved = checkpoint.pop(KEY, None)  # it holds what all ranks have
        if saved is None:
            rank_zero_info(
                "The checkpoint is of a run without gradient compression: it holds nothing that was not sent."
            )
            return
        if (reason := take(self.compressors, saved, trainer.global_rank, trainer.world_size)) is not None:
            rank_zero_warn(
                f"The checkpoint's state of gradient compression does not fit: {reason}. What had not been sent when "
                "it was saved is dropped."
            )


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD
