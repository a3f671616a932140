"""Orthonormal columns for batches of tall matrices (PowerSGD)."""

from __future__ import annotations

import torch
from torch import Tensor


def householder(matrices: Tensor, epsilon: float) -> Tensor:
    """By Householder's QR: the columns are orthonormal whatever the rank, of a matrix of zeros too.

    Args:
        matrices: (batch, rows, columns), finite, with no more columns than rows.
        epsilon: this multiple of the identity, in units of the longest column, is added to each.
    """
    if epsilon:
        longest = torch.linalg.vector_norm(matrices, dim=-2, keepdim=True).amax(-1, keepdim=True)
        identity = torch.eye(*matrices.shape[-2:], dtype=matrices.dtype, device=matrices.device)
        matrices = matrices + epsilon * longest * identity
    return torch.linalg.qr(matrices).Q


def gram_schmidt(matrices: Tensor, epsilon: float) -> Tensor:
    """By Gram and Schmidt's method (modified); columns that the ones before them span become zero.

    Args:
        matrices: (batch, rows, columns), finite.
        epsilon: a column is spanned if less of its length is left; at least the square root of the precision, since
            what is left of shorter ones is rounding, and not orthogonal to the others.
    """
    basis = matrices.clone()
    floors = torch.linalg.vector_norm(basis, dim=-2, keepdim=True) * max(epsilon, torch.finfo(basis.dtype).eps ** 0.5)
    for index in range(basis.shape[-1]):
        column = basis[..., index : index + 1]
        length = torch.linalg.vector_norm(column, dim=-2, keepdim=True)
        column.mul_(torch.where(length > floors[..., index : index + 1], 1 / length, 0))
        rest = basis[..., index + 1 :]
        rest.sub_(column @ (column.mT @ rest))
    return basis


METHODS = {"qr": householder, "gram_schmidt": gram_schmidt}
