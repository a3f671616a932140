"""Which checkpoint is loaded: the one asked for if its files are as they were written, the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lnn_lightning.checkpoint import CheckpointError, is_distributed_checkpoint, load_metadata
from lnn_lightning.checkpoint.folder import repair, repair_all
from lnn_lightning.checkpoint.manifest import MANIFEST, newest_first, verify
from lnn_lightning.checkpoint.states import OURS
from lnn_lightning.parallel.shared_folder import check_seen
from lnn_lightning.strategies.mesh import MeshStrategy

_HPC = "hpc_ckpt_"


class IntactHooks(MeshStrategy):
    """Looks at a checkpoint before it is loaded."""

    def finish_saving(self, timeout: float | None = None) -> None:
        """Waits for a checkpoint that is being written."""

    def _intact(self, wanted: Any) -> Path:
        """The checkpoint to load, the same on all ranks; what is called the last may be an earlier one, if it is torn.

        Collective.
        """
        self.finish_saving()
        path = Path(self.broadcast(str(wanted)))
        if self.is_global_zero:
            repair(path)
        self.barrier()
        check_seen(path)
        problem = self._problem(path)
        if problem is None:
            return path
        error = FileNotFoundError if not path.exists() else CheckpointError
        if not path.name.startswith((ModelCheckpoint.CHECKPOINT_NAME_LAST, _HPC)):
            raise error(problem)
        others = newest_first(each for each in path.parent.glob("*") if each.name != path.name)
        for other in map(Path, self.broadcast([str(each) for each in others])):
            if self._problem(other) is None:
                rank_zero_warn(f"{problem} The newest checkpoint that is complete is loaded in its place: {other}.")
                return other
        raise error(f"{problem} There is no other complete checkpoint in {path.parent}.")

    def _bring_back(self, trainer: pl.Trainer) -> None:
        """Checkpoints whose replacement was cut off are not there when Lightning looks for the last one. Collective.

        Raises:
            CheckpointError: one was brought back, and this run may be about to begin without it.
        """
        back: list[str] = []
        if self.is_global_zero:
            folders = [each.dirpath for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
            back = [str(path) for folder in folders if folder is not None for path in repair_all(Path(folder))]
        back = self.broadcast(back)
        if back:
            raise CheckpointError(
                f"{back[0]} was being replaced when an earlier run was killed, and was not there when this one looked "
                "for its last checkpoint. It is there again: start the run once more."
            )

    def _problem(self, path: Path) -> str | None:
        """What is wrong with a checkpoint, found by all ranks together: each reads a share of the files."""
        problem = None
        try:
            if not path.exists():
                target = f", which is a link to {path.resolve()}" if path.is_symlink() else ""
                problem = f"There is no checkpoint at {path}{target} (rank {self.global_rank})."
            elif path.is_dir() and not is_distributed_checkpoint(path):
                problem = f"The folder {path} was not written by this strategy."
            elif path.is_dir() and ((path / MANIFEST).is_file() or load_metadata(path)[OURS]["format"] > 1):
                verify(path, self.global_rank, self.world_size)
        except (CheckpointError, OSError, KeyError) as caught:
            problem = str(caught)
        problems: list[Any] = [None] * self.world_size
        dist.all_gather_object(problems, problem)
        return next((each for each in problems if each is not None), None)

    def _agree(self, act: Callable[[], None]) -> None:
        """Does something on all ranks: if it fails on one, all of them raise. Collective."""
        failure = None
        try:
            act()
        except Exception as error:  # noqa: BLE001 - told to all ranks
            failure = f"{error}" if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        failures: list[Any] = [None] * self.world_size
        dist.all_gather_object(failures, failure)
        for rank, text in enumerate(failures):
            if text is not None:
                raise CheckpointError(f"{text} (rank {rank})")
