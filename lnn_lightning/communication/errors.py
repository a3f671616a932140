"""Error feedback: what was not sent is added to the next gradient (Karimireddy et al. 2019, arXiv 1901.09847)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lnn_lightning.communication.grouping import working_dtype
from lnn_lightning.parallel.errors import LayoutError

_PREFIX = "error."


class Errors:
    """What a rank has not sent yet, by parameter, in fp32 (fp64 for such gradients) and without the loss scale.

    A parameter that got no gradient in a step (all zeros) sends nothing, and its error waits: where no rank has used
    it, what would arrive is thrown away. What is not finite is not kept: the step is skipped, the error stays.

    Args:
        prefix: of the names in the state.
    """

    def __init__(self, prefix: str = _PREFIX) -> None:
        self._prefix = prefix
        self._kept: dict[str, Tensor] = {}
        self._used: dict[str, Tensor] = {}  # of this step: whether there is a gradient

    def of(self, name: str, gradient: Tensor) -> Tensor:
        """What is kept for a parameter, on the device of its gradient; zeros at first.

        Raises:
            LayoutError: the error from a checkpoint has another shape.
        """
        error = self._kept.get(name)
        if error is None:
            dtype = working_dtype(gradient.dtype)
            error = self._kept[name] = torch.zeros(gradient.shape, dtype=dtype, device=gradient.device)
        elif error.shape != gradient.shape:
            raise LayoutError(
                f"The error of {name!r} in the checkpoint has the shape {tuple(error.shape)}, its gradient "
                f"{tuple(gradient.shape)}: the parameter is another one. Go on without the checkpoint's compression."
            )
        elif error.device != gradient.device:
            error = self._kept[name] = error.to(gradient.device)
        return error

    def wanted(self, name: str, gradient: Tensor, scale: float) -> Tensor:
        """What should be sent: the gradient and what is left from earlier steps; a new tensor."""
        error = self.of(name, gradient)
        used = self._used[name] = gradient.any()
        return torch.add(gradient.to(error.dtype), error * used, alpha=scale)

    def keep(self, name: str, wanted: Tensor, sent: Tensor, arrived: Tensor, scale: float) -> None:
        """Keeps what is left.

        Args:
            name: of the parameter.
            wanted: from :meth:`wanted`.
            sent: what this rank sent of it.
            arrived: the result for all ranks: not finite where a rank's gradient is not.
            scale: as in :meth:`wanted`.
        """
        error = self._kept[name]
        good = arrived.isfinite().all() & self._used.pop(name)
        error.copy_(torch.where(good, (wanted - sent) / scale, error))

    def norm(self) -> Tensor | None:
        """Of all errors (0 dimensions)."""
        if not self._kept:
            return None
        norms = torch._foreach_norm(list(self._kept.values()))
        # those of a checkpoint stay in host memory while their parameter does not learn
        return torch.linalg.vector_norm(torch.stack([each.to(norms[-1].device) for each in norms]))

    def state_dict(self) -> dict[str, Tensor]:
        """By the prefix and the name."""
        return {self._prefix + name: error for name, error in self._kept.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the errors among a compressor's state; each moves to its gradient when that comes (:meth:`of`)."""
        self._kept = {
            key.removeprefix(self._prefix): value.to("cpu", copy=True)
            for key, value in state.items()
            if key.startswith(self._prefix) and isinstance(value, Tensor)
        }
