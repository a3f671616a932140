"""Ranks that look after each other: who is gone, who hangs and where, and a stop that all make at the same step."""

from lnn_lightning.parallel.watch.activity import doing, while_doing
from lnn_lightning.parallel.watch.member import Watch
from lnn_lightning.parallel.watch.start import start_watch

__all__ = ["Watch", "doing", "start_watch", "while_doing"]
