"""Stored activations in fewer bytes: Gist (Jain et al. 2018)."""

from lnn_lightning.memory.gist.operations import GistOperations
from lnn_lightning.memory.gist.settings import Gist

__all__ = ["Gist", "GistOperations"]
