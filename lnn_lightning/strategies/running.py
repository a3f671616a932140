"""The steps of a strategy: the user's own, run by the engine on every rank."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from typing_extensions import override

from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.pipeline.engine import PipelineEngine
from lnn_lightning.parallel.watch import doing
from lnn_lightning.precision import loss_scale
from lnn_lightning.strategies.signals import AgreedSignals
from lnn_lightning.strategies.steps import StepDriver
from lnn_lightning.strategies.zero import ZeroHooks


class StepHooks(ZeroHooks):
    """Steps of a strategy: training, validation, test and prediction."""

    _engine: PipelineEngine | None = None
    _driver: StepDriver | None = None

    @property
    def engine(self) -> PipelineEngine:
        """Runs the steps; exists once the Trainer has set up the module."""
        if self._engine is None:
            raise RuntimeError("The pipeline does not exist yet: it is made when the Trainer starts.")
        return self._engine

    @property
    def driver(self) -> StepDriver:
        """Runs the steps for the Trainer."""
        assert self._driver is not None
        return self._driver

    def _user_step(self, kind: str, arguments: tuple[Any, ...]) -> Any:
        module, plugin = self.lightning_module, self.precision_plugin
        context = {
            "training_step": plugin.train_step_context,
            "validation_step": plugin.val_step_context,
            "test_step": plugin.test_step_context,
            "predict_step": plugin.predict_step_context,
        }[kind]
        return partial(_call, module, kind, context, arguments)

    @override
    def training_step(self, batch: Any, *arguments: Any) -> Any:
        module = self.lightning_module
        assert module is not None
        step = self._user_step("training_step", arguments)
        scale = self.engine.loss_scale = loss_scale(self.precision_plugin)
        if not module.automatic_optimization:
            return self.driver.train_manually(step, batch, scale)
        trainer = module.trainer
        position = trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches
        zeroes = type(module).optimizer_zero_grad is pl.LightningModule.optimizer_zero_grad
        for masters in self._masters if position == 0 and zeroes else ():
            masters.drop_gradients()
        return self.driver.train(
            step,
            batch,
            scale / trainer.accumulate_grad_batches,
            sync=self._sync_gradients,
            continues=position != 0,
            drop_old=position == 0 and zeroes,
        )

    @override
    def validation_step(self, batch: Any, *arguments: Any) -> Any:
        return self._evaluate("validation_step", batch, arguments)

    @override
    def test_step(self, batch: Any, *arguments: Any) -> Any:
        return self._evaluate("test_step", batch, arguments)

    @override
    def predict_step(self, batch: Any, *arguments: Any) -> Any:
        return self._evaluate("predict_step", batch, arguments)

    def _evaluate(self, kind: str, batch: Any, arguments: tuple[Any, ...]) -> Any:
        self._signals.before_evaluation_batch()
        result = self.driver.evaluate(kind, self._user_step(kind, arguments), batch)
        doing("waiting for a batch of the %s", kind)
        return result

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._begin_evaluation()

    @override
    def on_test_start(self) -> None:
        super().on_test_start()
        self._begin_evaluation()

    @override
    def on_predict_start(self) -> None:
        super().on_predict_start()
        self._begin_evaluation()

    def _begin_evaluation(self) -> None:
        self.engine.residence.synchronize_buffers()
        self._signals.begin_evaluation(self.root_device)

    @property
    def _signals(self) -> AgreedSignals:
        assert self.lightning_module is not None
        signals = self.lightning_module.trainer._signal_connector
        assert isinstance(signals, AgreedSignals)
        return signals

    def _example_arguments(self, kind: str) -> tuple[Any, ...]:
        function = getattr(self.lightning_module, kind)
        if is_param_in_hook_signature(function, "dataloader_iter", explicit=True):
            raise StepError(
                f"{kind}(dataloader_iter) is not supported: take a batch, `{kind}(self, batch, batch_idx)`."
            )
        arguments: tuple[Any, ...] = (0,) if is_param_in_hook_signature(function, "batch_idx", min_args=2) else ()
        if kind != "training_step" and is_param_in_hook_signature(function, "dataloader_idx", explicit=True):
            arguments += (0,)
        return arguments


def _call(module: Any, kind: str, context: Any, arguments: tuple[Any, ...], batch: Any) -> Any:
    with context():
        return getattr(module, kind)(batch, *arguments)
