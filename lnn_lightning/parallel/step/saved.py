"""What autograd saves for backward, watched."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def watching_saved(note: Callable[[Tensor], None]) -> saved_tensors_hooks:
    """A context in which a function sees what autograd saves; the tensors are kept as without it."""

    def pack(tensor: Tensor) -> Tensor:
        note(tensor)
        return tensor.detach()  # itself, the result of an operation would keep its own graph alive

    return saved_tensors_hooks(pack, lambda tensor: tensor)


def refuses_hooks(error: RuntimeError) -> bool:
    """Whether an error is that of ``torch.func``, which does not run where saved tensors are packed."""
    return "yet support saved tensor hooks" in str(error)
