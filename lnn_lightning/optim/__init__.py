"""What touches gradients and optimizers across the mesh."""

from lnn_lightning.optim.adafactor import Adafactor
from lnn_lightning.optim.clipping import clip_grad_by_mesh_norm, mesh_grad_norm

__all__ = ["Adafactor", "clip_grad_by_mesh_norm", "mesh_grad_norm"]
