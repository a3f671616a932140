"""The graph that autograd has made."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch import Tensor


def nodes_behind(tensors: Iterable[Tensor], end: Collection[Any] = ()) -> Iterator[Any]:
    """The nodes that a backward from some tensors comes to, each once.

    Args:
        tensors: where it begins.
        end: nodes that it does not come to, nor to what is behind them alone.
    """
    nodes: list[Any] = [tensor.grad_fn for tensor in tensors]
    seen: set[Any] = {None, *end}
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        nodes += [following for following, _ in node.next_functions]
