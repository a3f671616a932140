"""SIGTERM and SLURM's requeue signal: handlers raise a flag, all ranks save and stop at the end of the same step.

Lightning's own handlers communicate inside of the handler, where other collectives are under way on some rank: they
hang. These take their place in the Trainer while the strategy is in it.
"""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lnn_lightning.parallel.watch import doing, while_doing

if TYPE_CHECKING:
    from lnn_lightning.strategies.ptdp import PTDPStrategy

log = logging.getLogger(__name__)

_SIGTERM, _REQUEUE = "SIGTERM", "the requeue signal"


class AgreedSignals(_SignalConnector):
    """The Trainer's signal connector under a strategy of many ranks.

    Args:
        trainer: whose signals.
        strategy: its strategy.
    """

    def __init__(self, trainer: pl.Trainer, strategy: PTDPStrategy) -> None:
        super().__init__(trainer)
        self._strategy = strategy
        self._replaced: list[tuple[Any, str]] = []
        self._common_batches = self._evaluated = 0

    # ---------------------------------------------------------------- signals

    @property
    def _requeues(self) -> bool:
        environment = self._strategy.cluster_environment
        return isinstance(environment, SLURMEnvironment) and environment.auto_requeue

    @override
    def register_signal_handlers(self) -> None:
        self.received_sigterm = False
        self._original_handlers = self._get_current_signal_handlers()
        environment = self._strategy.cluster_environment
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            log.info("SLURM auto-requeueing enabled. Setting signal handlers.")
            requeue = environment.requeue_signal
            if requeue is not None and not self._has_already_handler(requeue):
                self._register_signal(requeue, _Flag(self._strategy, _REQUEUE, None))
        before = signal.getsignal(signal.SIGTERM)
        self._register_signal(signal.SIGTERM, _Flag(self._strategy, _SIGTERM, before))
        self._take_the_steps_ends()

    def _take_the_steps_ends(self) -> None:
        if self.trainer.state.fn != TrainerFn.FITTING:
            return
        loop = self.trainer.fit_loop.epoch_loop
        advance = loop.advance

        def advance_unless_stopped(data_fetcher: Any) -> None:
            self._before_batch(data_fetcher)
            advance(data_fetcher)

        self._replace(loop, "advance", advance_unless_stopped)
        self._replace(loop, "_broadcast_sigterm_tensor", lambda: None)

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        owner.__dict__[name] = value
        self._replaced.append((owner, name))

    @override
    def teardown(self) -> None:
        for owner, name in self._replaced:
            owner.__dict__.pop(name, None)
        self._replaced = []
        super().teardown()

    # ---------------------------------------------------------------- where all ranks can stop

    def _before_batch(self, data_fetcher: Any) -> None:
        """Between two training batches, with everything of the first done (validation, too)."""
        doing("waiting for a batch")
        loop = self.trainer.fit_loop.epoch_loop
        if loop.val_loop.restarted_mid_evaluation:
            # the validation runs again as a whole: what had begun of it does not count
            total = loop.val_loop.batch_progress.total
            total.ready = total.started = total.completed  # type: ignore[attr-defined]
        if loop._should_accumulate():
            return  # the gradients made so far would be lost
        reasons = self._strategy.watch.check_stop()
        if not reasons:
            return
        # resuming where a validation was due but for it, Lightning counts the batch once more
        counted_twice = bool(loop._should_check_val_fx(data_fetcher))
        loop._batches_that_stepped -= counted_twice
        self._stop(reasons)

    def begin_evaluation(self, device: torch.device) -> None:
        """Before a validation, test or prediction. Collective: data ranks may have different numbers of batches."""
        trainer = self.trainer
        loop = trainer.predict_loop if trainer.predicting else trainer._evaluation_loop
        own = [int(count) if math.isfinite(count) else 0 for count in loop.max_batches]
        fewest = torch.tensor([*own, *(-count for count in own)], device=device)
        dist.all_reduce(fewest, dist.ReduceOp.MIN)
        equal = bool((fewest[: len(own)] == -fewest[len(own) :]).all())
        self._common_batches = sum(own) if equal else int(fewest[: len(own)].min())
        self._evaluated = 0

    def before_evaluation_batch(self) -> None:
        """Before a batch of validation, test or prediction."""
        self._evaluated += 1
        if self.trainer.sanity_checking or self._evaluated > self._common_batches:
            return  # another rank may have no such batch
        reasons = self._strategy.watch.check_stop()
        if not reasons:
            return
        if self.trainer.state.fn != TrainerFn.FITTING:
            self._give_up(reasons, "Nothing is saved: this is no training.")
        with _validation_not_begun(self.trainer):
            self._stop(reasons)

    # ---------------------------------------------------------------- the stop

    def _stop(self, reasons: tuple[str, ...]) -> None:
        """All ranks together: saves, requeues, ends the run.

        Raises:
            SIGTERMException: always.
        """
        saved = self._save()
        requeued = ""
        if _REQUEUE in reasons:
            for logger in self.trainer.loggers:
                logger.finalize("finished")
            if self.trainer.is_global_zero:
                requeued = " " + _requeue()
        self._give_up(reasons, saved + requeued)

    def _save(self) -> str:
        trainer = self.trainer
        if self._requeues:
            path = trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir)
            path = self._strategy.broadcast(path)
            with while_doing("saving %s before stopping", path):
                trainer.save_checkpoint(path)
                self._strategy.finish_saving()
            return f"Saved {path}; the job finds it by itself when it runs again."
        callback = next((each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)), None)
        if callback is None:
            return "NOTHING IS SAVED: the Trainer has no ModelCheckpoint."
        with while_doing("saving the last checkpoint before stopping"):
            path = _save_as_last(callback, trainer)
            self._strategy.finish_saving()
        return f'Saved {path}; `ckpt_path="last"` finds it.'

    def _give_up(self, reasons: tuple[str, ...], text: str) -> None:
        step = self.trainer.global_step
        rank_zero_info(f"Stopping behind optimizer step {step}, as {' and '.join(reasons)} asked for. {text}")
        self.received_sigterm = True
        raise SIGTERMException


class _Flag:
    """A signal handler that does nothing but raise a flag, and call the handler that was there before."""

    def __init__(self, strategy: PTDPStrategy, reason: str, before: Any) -> None:
        self._strategy, self._reason = strategy, reason
        self._before: Any = before._before if isinstance(before, _Flag) else before

    def __call__(self, signum: int, frame: Any) -> None:
        self._strategy.watch.request_stop(self._reason)
        if callable(self._before):
            self._before(signum, frame)


def _save_as_last(callback: ModelCheckpoint, trainer: pl.Trainer) -> str:
    settings = callback.save_last, callback.save_weights_only
    # no link to one that was saved earlier, and all that it takes to go on
    callback.save_last, callback.save_weights_only = True, False
    try:
        callback._save_last_checkpoint(trainer, callback._monitor_candidates(trainer))
    finally:
        callback.save_last, callback.save_weights_only = settings
    return callback.last_model_path


@contextmanager
def _validation_not_begun(trainer: pl.Trainer) -> Iterator[None]:
    """The validation that is under way counts as one whose first batch has just begun: it will run again as a whole."""
    progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress
    state = progress.state_dict()
    done = progress.total.completed - progress.current.completed
    for tracker, completed in ((progress.total, done), (progress.current, 0)):
        tracker.ready = tracker.started = completed + 1  # type: ignore[attr-defined]
        tracker.processed = tracker.completed = completed  # type: ignore[attr-defined]
    try:
        yield
    finally:
        progress.load_state_dict(state)


def _requeue() -> str:
    """Asks SLURM to run this job again; what came of it."""
    job = os.environ.get("SLURM_JOB_ID", "")
    if (array := os.environ.get("SLURM_ARRAY_JOB_ID")) is not None:
        job = f"{array}_{os.environ.get('SLURM_ARRAY_TASK_ID', '')}"
    if not re.fullmatch(r"[0-9_-]+", job):
        return f"The job is not requeued: its id is {job!r}."
    try:
        result = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        rank_zero_warn(f"`scontrol requeue {job}` failed: {error}. Requeue it by hand.")
        return f"Requeueing job {job} failed."
    if result.returncode:
        said = result.stderr.strip() or f"exit code {result.returncode}"
        rank_zero_warn(f"`scontrol requeue {job}` failed: {said}. Requeue it by hand.")
        return f"Requeueing job {job} failed."
    return f"Job {job} is requeued."
