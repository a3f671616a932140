"""ZeRO 1: each data rank updates a part of the parameters, and holds the optimizer state of that part only.

The user's own optimizer object stays: its groups are reduced to what this rank updates, and behind each of its steps
the owners send the new values to the others. Parameters are dealt out whole, the largest first to whoever has least,
so that any optimizer is right, also those that look at a whole matrix (LARS, Muon, Shampoo). ``torch``'s
ZeroRedundancyOptimizer and fairscale's OSS build a new optimizer from a class and defaults instead: schedulers that
were given the user's optimizer then move one that nobody steps, and optimizers of another signature cannot be built.

Where parameters are sharded already (ZeRO 2 and 3) the groups get this rank's pieces as plain tensors, and nothing is
sent; what stays whole there is dealt out as in ZeRO 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.optim import Optimizer

from lnn_lightning.optim.cuts import KnowsCuts
from lnn_lightning.parallel.data.shards import is_sharded, local_of
from lnn_lightning.parallel.step.standin import is_stand_in

_ALONE = 1 << 18
"""Tensors of at least so many elements travel by themselves, without being copied into a bucket."""
_BUCKET = 1 << 22
"""Elements of a bucket."""


def deal(sizes: Sequence[int], loads: list[int]) -> list[int]:
    """Gives each size to the rank with the least load so far, the largest first; adds to ``loads``."""
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owner = min(range(len(loads)), key=lambda rank: loads[rank])
        owners[index] = owner
        loads[owner] += sizes[index]
    return owners


class _Circle:
    """Ranks that share parameters out, and who updates which.

    Args:
        group: the ranks; None: this one alone.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.size = dist.get_world_size(group) if group is not None else 1
        self.rank = dist.get_rank(group) if group is not None else 0
        self.loads = [0] * self.size
        self.owned: list[list[nn.Parameter]] = [[] for _ in range(self.size)]
        """Whole parameters by the rank that updates them, in the same order on all ranks."""

    def deal(self, parameters: Sequence[nn.Parameter]) -> set[int]:
        """Deals out more parameters; those that this rank updates, by id."""
        owners = deal([p.numel() for p in parameters], self.loads)
        for parameter, owner in zip(parameters, owners, strict=True):
            self.owned[owner].append(parameter)
        return {id(p) for p, owner in zip(parameters, owners, strict=True) if owner == self.rank}

    def elsewhere(self) -> list[nn.Parameter]:
        """Parameters that other ranks update."""
        return [p for owner, parameters in enumerate(self.owned) for p in parameters if owner != self.rank]


class OptimizerShare:
    """What this data rank updates of one optimizer's parameters.

    Args:
        optimizer: the user's; its groups are changed in place.
        group: data ranks that share the state out; None: nothing is dealt out.
        local: what the optimizer gets in place of a sharded parameter; None: there are none.
        apart: parameters that other ranks share out (experts: those that hold the same), and these ranks, None if it is
            one.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        group: dist.ProcessGroup | None,
        local: Callable[[nn.Parameter], nn.Parameter] | None = None,
        apart: tuple[Callable[[nn.Parameter], bool], dist.ProcessGroup | None] | None = None,
    ) -> None:
        self.optimizer, self._local = optimizer, local
        self._is_apart = apart[0] if apart is not None else lambda parameter: False
        self._circles = [_Circle(group), _Circle(apart[1] if apart is not None else None)]
        self._known = 0
        self.sharded: list[tuple[nn.Parameter, nn.Parameter]] = []
        """Sharded parameters, and what the optimizer has in place of them."""
        self._zero_grad = optimizer.zero_grad
        if self.sends or local is not None:
            optimizer.zero_grad = self._zero_all  # type: ignore[method-assign]
        if self.sends:
            optimizer.register_step_post_hook(self._send)

    @property
    def sends(self) -> bool:
        """Whether new values go to other ranks behind each step."""
        return any(circle.size > 1 for circle in self._circles)

    def adopt(self) -> None:
        """Reduces groups that are new to what this rank updates; groups stay, also when they become empty."""
        new = self.optimizer.param_groups[self._known :]
        self._known = len(self.optimizer.param_groups)
        here = [p for group in new for p in group["params"] if not is_stand_in(p)]
        whole = [p for p in here if not is_sharded(p)]
        rest, apart = self._circles
        mine = rest.deal([p for p in whole if not self._is_apart(p)])
        mine |= apart.deal([p for p in whole if self._is_apart(p)])
        pieces = {id(p): self._local(p) for p in here if is_sharded(p)} if self._local is not None else {}
        self.sharded += [(p, pieces[id(p)]) for p in here if id(p) in pieces]
        for group in new:
            kept = [pieces.get(id(p), p) for p in group["params"] if id(p) in mine or id(p) in pieces]
            state = {p: self.optimizer.state.pop(p) for p in group["params"] if p in self.optimizer.state}
            group["params"] = [p for p in kept if p.numel() or id(p) in mine or isinstance(self.optimizer, KnowsCuts)]
            for parameter, values in state.items():  # some optimizers make it when they are built
                target = pieces.get(id(parameter), parameter)
                if any(target is p for p in group["params"]):
                    self.optimizer.state[target] = {key: local_of(value) for key, value in values.items()}

    def _zero_all(self, *args: Any, **kwargs: Any) -> None:
        """The optimizer's ``zero_grad``, for the gradients it does not see too."""
        self._zero_grad(*args, **kwargs)
        for parameter, piece in self.sharded:
            if piece.grad is None:
                parameter.grad = None
        to_none = kwargs.get("set_to_none", args[0] if args else True)
        for parameter in [parameter for circle in self._circles for parameter in circle.elsewhere()]:
            if to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()
        for parameter, piece in self.sharded:  # most optimizers' groups are without pieces that have no elements
            if piece.numel() == 0 and to_none:
                parameter.grad = piece.grad = None

    @torch.no_grad()
    def _send(self, *_: Any) -> None:
        """Behind a step: the owners' values for everyone. Collective over the ranks that share out."""
        works: list[Any] = []
        arrived: list[tuple[Tensor, list[Tensor]]] = []
        for circle in self._circles:
            for owner, parameters in enumerate(circle.owned if circle.size > 1 else ()):
                for tensors in _buckets([parameter.detach() for parameter in parameters]):
                    alone = len(tensors) == 1 and tensors[0].is_contiguous()
                    flat = tensors[0] if alone else _flatten_dense_tensors(tensors)
                    works.append(dist.broadcast(flat, group=circle.group, group_src=owner, async_op=True))
                    if not alone and owner != circle.rank:
                        arrived.append((flat, tensors))
        for work in works:
            work.wait()
        for flat, tensors in arrived:
            torch._foreach_copy_(tensors, list(_unflatten_dense_tensors(flat, tensors)))


def _buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Tensors that travel together: of one dtype and device, in order."""
    buckets: list[list[Tensor]] = []
    open_: dict[Any, list[Tensor]] = {}
    filled: dict[Any, int] = {}
    for tensor in tensors:
        key = (tensor.dtype, tensor.device)
        if tensor.numel() >= _ALONE:
            buckets.append([tensor])
            continue
        if key not in open_ or filled[key] + tensor.numel() > _BUCKET:
            open_[key], filled[key] = [], 0
            buckets.append(open_[key])
        open_[key].append(tensor)
        filled[key] += tensor.numel()
    return buckets
