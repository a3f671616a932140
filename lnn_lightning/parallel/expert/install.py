"""Shares the experts of a model out over ranks: checks seams, cuts their parameters, knows which part is where."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lnn_lightning.parallel.errors import LayoutError
from lnn_lightning.parallel.expert.axis import ExpertAxis
from lnn_lightning.parallel.expert.check import check_seam
from lnn_lightning.parallel.expert.find import Seam, find_seams
from lnn_lightning.parallel.expert.fused import fused_forward
from lnn_lightning.parallel.expert.seam import SeamState, loop_forward, seam_of
from lnn_lightning.parallel.step.standin import is_stand_in, named_tensors, replace_tensors, stand_in_for
from lnn_lightning.parallel.tensor.axis import reduced_shape
from lnn_lightning.parallel.tensor.install import blank_of, remembers_whole
from lnn_lightning.parallel.tensor.modules import sharding_suspended, take_forward

Runs = list[tuple[int, int, int]]
"""Runs of (first in the part, first in the whole, length)."""


def prepare_seams(root: nn.Module) -> list[Seam]:
    """Finds the experts of a model and takes their modules' ``forward`` over, which goes on as before for now.

    To be called before the step is traced: experts answer there by shape, as their real way depends on data.
    """
    seams = find_seams(root)
    for seam in seams:
        module = root.get_submodule(seam.name)
        if seam.layer or "lnn_seam" in vars(module):
            continue
        inside = len(seam.name) + 1 if seam.name else 0
        members = tuple(member[inside:] for member in seam.members)
        vars(module)["lnn_seam"] = SeamState(seam.name, seam.experts, members)
        take_forward(module, fused_forward if seam.kind == "fused" else loop_forward)
    return seams


class ExpertSharding:
    """The experts of a module on this rank.

    Args:
        root: the module, whole but for what lives on other pipeline stages.
        seams: what :func:`prepare_seams` found.
        axis: the expert ranks.
        capacity_factor: see :class:`~.settings.ExpertParallel`.
        device: where to check; None: where the parameters are.

    Attributes:
        seams: those that are shared out; after :meth:`install` without those that failed their check.
        names: first names of all parameters and buffers that belong to experts.
        left: seam that is not shared out -> the reason.

    Raises:
        LayoutError: a block has fewer experts than there are expert ranks.
    """

    def __init__(
        self,
        root: nn.Module,
        seams: Sequence[Seam],
        axis: ExpertAxis,
        *,
        capacity_factor: float | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.root, self.axis, self.capacity_factor, self.device = root, axis, capacity_factor, device
        self.seams: list[Seam] = list(seams)
        self.left: dict[str, str] = {}
        self.names: frozenset[str] = frozenset()
        self._shapes: dict[str, torch.Size] = {}
        self._experts: dict[str, int] = {}
        self._owners: dict[str, int] = {}
        for seam in self.seams:
            if seam.experts < axis.size:
                raise LayoutError(
                    f"{seam.name!r} has {seam.experts} experts, too few for {axis.size} expert ranks. "
                    f"`expert_parallel_size` must be at most {min(each.experts for each in self.seams)}."
                )
        self._note_names()

    def install(self) -> None:
        """Checks the seams and cuts their parameters in place. Collective over the expert ranks."""
        verdicts: dict[Any, str] = {}
        for seam in list(self.seams):
            module = self.root.get_submodule(seam.name)
            if (reason := self._reason_against(seam, module, verdicts)) is None:
                continue
            self.left[seam.name] = reason
            self.seams.remove(seam)
            _warn(f"The experts of {seam.name!r} are not shared out, every rank holds all of them: {reason}.")
        self._note_names()
        gc.collect()  # graphs of the traced step would remember the whole shapes
        for seam in self.seams:
            self._share_out(seam)

    def lives_here(self, name: str) -> bool:
        """Whether this rank has a parameter or a part of it; not so for experts that are modules of their own."""
        return self._owners.get(name, self.axis.rank) == self.axis.rank

    def is_divided(self, name: str) -> bool:
        """Whether each rank has a part of a parameter."""
        return name in self._experts and self.axis.size > 1

    def spans(self, name: str) -> list[tuple[int, Runs]]:
        """The divided dimensions of a parameter, and where this rank's part of it lies in the whole."""
        if not self.is_divided(name):
            return []
        here = self.axis.span(self._experts[name])
        return [(0, [(0, here.start, len(here))])]

    def whole_shape(self, name: str) -> torch.Size:
        """Shape of the whole of an expert parameter."""
        return self._shapes[name]

    def local_shape(self, name: str) -> torch.Size:
        """Shape of this rank's part of it."""
        shape = self._shapes[name]
        if not self.is_divided(name):
            return shape
        return torch.Size((len(self.axis.span(self._experts[name])), *shape[1:]))

    def whole(self, name: str, value: Tensor) -> Tensor:
        """The whole of a parameter, gradient or state of this name from its parts. Collective over the expert ranks.

        Of experts that are modules of their own it comes from the rank that has it; elsewhere only the shape and dtype
        of ``value`` matter.
        """
        if self.axis.size == 1:
            return value
        if (owner := self._owners.get(name)) is not None:
            made = value.detach().clone() if owner == self.axis.rank else torch.empty_like(value, requires_grad=False)
            made = (
                made.contiguous()
                if owner == self.axis.rank
                else torch.empty(made.shape, dtype=made.dtype, device=made.device)
            )
            dist.broadcast(made, group=self.axis.group, group_src=owner)
            return made
        if not self.is_divided(name) or value.shape != self.local_shape(name):
            return value
        counts = self.axis.counts(self._experts[name])
        most = max(counts)
        padded = value.detach().new_zeros((most, *value.shape[1:]))
        padded[: value.shape[0]] = value.detach()
        parts = padded.new_empty((self.axis.size, *padded.shape))
        dist.all_gather_single(parts.view(-1), padded.view(-1), group=self.axis.group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def local(self, name: str, whole: Tensor, reduced: Sequence[int] = ()) -> Tensor:
        """This rank's part of a whole parameter, gradient or state of this name (one element along reduced dims)."""
        if not self.is_divided(name) or 0 in reduced or whole.shape != reduced_shape(self._shapes[name], reduced):
            return whole
        here = self.axis.span(self._experts[name])
        return whole[here.start : here.stop].clone(memory_format=torch.contiguous_format)

    def loads(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Seam -> rows sent to each of its experts by this rank since the last reading, and rows dropped."""
        found = {}
        for seam in self.seams:
            state = vars(self.root.get_submodule(seam.name)).get("lnn_seam")
            if state is not None and (read := state.read()) is not None:
                found[seam.name] = read
        return found

    @contextmanager
    def whole_shapes(self) -> Iterator[None]:
        """For tracing: divided parameters have their whole shape inside (no data), and modules their own forward."""
        saved: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for seam in self.seams if self.axis.size > 1 else ():
                store = self.root.get_submodule(seam.name)._parameters
                for name in seam.parameters:
                    parameter, key = store[name.rpartition(".")[2]], name.rpartition(".")[2]
                    if parameter is None or parameter.shape == self._shapes[name]:  # it lives elsewhere
                        continue
                    saved.append((store, key, parameter))
                    store[key] = blank_of(parameter, tuple(self._shapes[name]))  # type: ignore[assignment]
            with sharding_suspended():
                yield
        finally:
            for store, key, parameter in saved:
                store[key] = parameter

    def _note_names(self) -> None:
        tensors = dict(named_tensors(self.root))
        self._shapes, self._experts, self._owners = {}, {}, {}
        for seam in self.seams:
            for name in seam.parameters:
                self._shapes[name], self._experts[name] = tensors[name].shape, seam.experts
            for index, member in enumerate(seam.members):
                owner = next(rank for rank in range(self.axis.size) if index in self.axis.span(seam.experts, rank))
                for name, tensor in named_tensors(self.root.get_submodule(member)):
                    self._shapes[f"{member}.{name}"], self._owners[f"{member}.{name}"] = tensor.shape, owner
        self.names = frozenset(self._shapes)

    def _reason_against(self, seam: Seam, module: nn.Module, verdicts: dict[Any, str]) -> str | None:
        """Why a seam must be left alone; None if it can be shared out."""
        if shared := self._shared_name(seam):
            return f"{shared!r} is used in more than one place"
        if self.axis.size == 1 or seam.layer or self._is_elsewhere(seam):
            return None
        kind = (type(module), tuple((name, each.shape, each.dtype) for name, each in module.named_parameters()))
        if kind not in verdicts:
            verdicts[kind] = check_seam(self.root, seam, self.axis, self.device)
        return verdicts[kind] or None

    def _shared_name(self, seam: Seam) -> str | None:
        """An expert parameter that is registered in several places."""
        places: dict[int, int] = {}
        for module in self.root.modules():
            for each in module._parameters.values():
                if each is not None:
                    places[id(each)] = places.get(id(each), 0) + 1
        if seam.kind == "fused":
            own = [(name, self.root.get_parameter(name)) for name in seam.parameters]
        else:
            own = [
                (f"{member}.{name}", each)
                for member in seam.members
                for name, each in self.root.get_submodule(member).named_parameters()
            ]
        return next((name for name, each in own if places[id(each)] > 1), None)

    def _is_elsewhere(self, seam: Seam) -> bool:
        return all(is_stand_in(each) for each in self.root.get_submodule(seam.container).parameters())

    def _share_out(self, seam: Seam) -> None:
        module = self.root.get_submodule(seam.name)
        if seam.layer:
            module.axis = self.axis  # type: ignore[assignment]
        else:
            state = seam_of(module)
            state.axis, state.capacity_factor = self.axis, self.capacity_factor
        if self.axis.size == 1 or self._is_elsewhere(seam):
            return
        if seam.kind == "fused":
            cut_stacked(module, self.axis, seam.experts)
            return
        drop_others(self.root, seam.members, self.axis)


def is_spread(module: nn.Module) -> bool:
    """Whether experts of any sub-module have been shared out."""
    states = [vars(each).get("lnn_seam") for each in module.modules()]
    return any(state is not None and state.axis is not None for state in states)


def cut_stacked(module: nn.Module, axis: ExpertAxis, experts: int) -> None:
    """Leaves this rank's rows of stacked parameters; the parameter objects stay if nothing remembers their shape."""
    here = axis.span(experts)
    for key, parameter in list(module._parameters.items()):
        if parameter is None:
            continue
        parameter.data = parameter.data[here.start : here.stop].clone(memory_format=torch.contiguous_format)
        if remembers_whole(parameter):
            module._parameters[key] = nn.Parameter(parameter.data, parameter.requires_grad)


def drop_others(root: nn.Module, members: Sequence[str], axis: ExpertAxis) -> None:
    """Leaves only the names and shapes of experts that live on other ranks."""
    here = axis.span(len(members))
    for index, member in enumerate(members):
        if index not in here:
            replace_tensors(root.get_submodule(member), lambda _, tensor: stand_in_for(tensor))


def _warn(message: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        warnings.warn(message, stacklevel=3)
