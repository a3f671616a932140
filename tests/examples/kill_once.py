"""A callback for tests of restarts: the first time, one rank kills itself."""

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback


class KillOnce(Callback):
    def __init__(self, folder: str, step: int, rank: int = 1) -> None:
        self.folder, self.step, self.rank = Path(folder), step, rank
        self.attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step and self.attempt == "0":
            pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
            (self.folder / f"pids-{trainer.global_rank}").write_text(" ".join(map(str, pids)))
            if trainer.global_rank == self.rank:
                os.kill(os.getpid(), signal.SIGKILL)

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        (self.folder / f"start-{self.attempt}-{trainer.global_rank}").write_text(str(trainer.global_step))

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        (self.folder / f"end-{self.attempt}-{trainer.global_rank}").write_text(str(trainer.global_step))
