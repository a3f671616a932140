"""`lnn-lightning memory`: what each rank of a configured training needs, predicted beside measured."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    Checkpoint,
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateMonitor,
    ProgressBar,
)
from lightning.pytorch.cli import LightningCLI
from typing_extensions import override

from lnn_lightning.commands.measuring import MeasureMemory
from lnn_lightning.commands.unlaunched import predict_memory
from lnn_lightning.parallel.errors import ParallelError
from lnn_lightning.planning.memory import Prediction, RankMemory

HELP = """usage: lnn-lightning memory [--no-measure] --config FILE [OPTION ...]

Prints what each rank of a training holds: parameters, gradients, optimizer state, activations, buffers, and what
gradient compression keeps. What the configuration needs is predicted on this one process, for any number of devices;
beside it stands what three steps of a run measured, where all devices are on this machine.

options:
  --no-measure   predict only, start nothing
  --config ...   and all other options: as for `lnn-lightning fit`. For a cluster's configuration on a machine without
                 its accelerators: --trainer.accelerator=cpu --trainer.devices=N (of one machine)
"""
_STEPS = 3
_COLUMNS = ("parameters", "gradients", "optimizer", "activations")
# Of no use for a few steps, or in need of what is left out
_LEFT_OUT = (Checkpoint, DeviceStatsMonitor, EarlyStopping, LearningRateMonitor, ProgressBar)


class _ShortRun(LightningCLI):
    """Builds what `fit` would run, but for what writes files, and does not run it."""

    def __init__(self, args: list[str], callbacks: Sequence[Any]) -> None:
        self._more = callbacks
        super().__init__(save_config_callback=None, args=["fit", *args])

    @override
    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Any]) -> Trainer:
        quiet = {
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "profiler": None,
            "fast_dev_run": False,
            "max_steps": _STEPS,
            "limit_val_batches": 0,
            "num_sanity_val_steps": 0,
        }
        given = config.get("callbacks") or []
        given = given if isinstance(given, list) else [given]
        kept = [callback for callback in [*given, *callbacks] if not isinstance(callback, _LEFT_OUT)]
        return super()._instantiate_trainer({**config, **quiet, "callbacks": kept}, list(self._more))

    @override
    def _run_subcommand(self, subcommand: str) -> None:
        """Whoever made this decides what to run."""


def memory(words: Sequence[str]) -> int:
    """Runs the subcommand; returns the exit status.

    Args:
        words: the command line behind `memory`.
    """
    words = list(words)
    if not words or {"-h", "--help"} & set(words):
        print(HELP)
        return 0
    if words[0] == "--measure-into":  # a rank of the run that is measured
        cli = _ShortRun(words[2:], [MeasureMemory(words[1])])
        cli.trainer.fit(cli.model, datamodule=cli.datamodule)
        return 0
    measures = "--no-measure" not in words
    words = [word for word in words if word != "--no-measure"]
    cli = _ShortRun(words, [])
    try:
        prediction = predict_memory(cli.trainer, cli.model, datamodule=cli.datamodule)
    except ParallelError as error:
        print(f"lnn-lightning memory: {error}", file=sys.stderr)
        return 1
    notes = list(prediction.notes)
    measured: list[dict[str, Any]] = []
    if measures and cli.trainer.num_nodes > 1:
        notes.append("Not measured: the configuration has several machines.")
    elif measures:
        measured, problem = _measure(words)
        notes += [problem] if problem else []
    print(table(prediction, measured))
    print("\n".join(notes))
    return 0


def _measure(words: Sequence[str]) -> tuple[list[dict[str, Any]], str]:
    """Starts the training for some steps; what its ranks measured, or why it failed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "lnn_lightning.cli", "memory", "--measure-into", folder, *words]
        run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if run.returncode:
            return [], f"Not measured: the run failed.\n{run.stdout[-4000:]}"
        return [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank*.json"))], ""


def table(prediction: Prediction, measured: Sequence[Mapping[str, Any]] = ()) -> str:
    """A line for each group of equal ranks; `predicted / measured` where a rank of the group was measured.

    Args:
        prediction: of all ranks.
        measured: by rank, from :class:`~lnn_lightning.commands.measuring.MeasureMemory`.
    """
    columns = (*_COLUMNS, *(["compression"] if any(rank.compression for rank in prediction.ranks) else []))
    rows = [("pipeline", "data", *columns, "buffers", "total", *(["growth"] if measured else []))]
    for _, equal in groupby(prediction.ranks, key=_sizes):
        ranks = list(equal)
        first, last = ranks[0], ranks[-1]
        data = str(first.data) if len(ranks) == 1 else f"{first.data}-{last.data}"
        mine = [each for each in measured if (each["pipeline"], first.data) == (first.pipeline, each["data"])]
        cells = [_pair(getattr(first, column), mine, column) for column in columns]
        growth = [_pair(first.total - first.parameters, mine, "growth")] if measured else []
        rows.append((str(first.pipeline), data, *cells, _mib(first.buffers), _mib(first.total), *growth))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    how = "predicted / measured" if measured else "predicted"
    title = f"Memory of each rank in MiB, {how}; {prediction.microbatches} micro-batch(es) a step"
    return "\n".join([title, *lines])


def _sizes(rank: RankMemory) -> tuple[Any, ...]:
    return rank.pipeline, *(getattr(rank, column) for column in (*_COLUMNS, "compression", "buffers"))


def _pair(predicted: int | None, measured: Sequence[Mapping[str, Any]], name: str) -> str:
    values = [each[name] for each in measured if each.get(name) is not None]
    return f"{_mib(predicted)} / {_mib(max(values))}" if values else _mib(predicted)


def _mib(size: int | None) -> str:
    return "?" if size is None else f"{size / 2**20:.2f}"
