"""Offloading: training state in host memory or in files, moved to where it is computed with and back."""

from lnn_lightning.memory.offload.settings import Offload, OffloadError
from lnn_lightning.memory.offload.store import FileStore, HostStore, Region, Store, open_store

__all__ = ["FileStore", "HostStore", "Offload", "OffloadError", "Region", "Store", "open_store"]
