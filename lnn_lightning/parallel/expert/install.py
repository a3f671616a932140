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
from lnn_lightning.parallel.expert.cuts import Cuts, divide_fused, divide_loop, expert_cuts, fused_cuts
from lnn_lightning.parallel.expert.find import Seam, find_seams
from lnn_lightning.parallel.expert.fused import fused_forward
from lnn_lightning.parallel.expert.recording import loop_state
from lnn_lightning.parallel.expert.seam import SeamState, loop_forward, seam_of
from lnn_lightning.parallel.expert.shared import prepare_beside
from lnn_lightning.parallel.expert.tries import normalises_batches
from lnn_lightning.parallel.step.standin import is_stand_in, named_tensors
from lnn_lightning.parallel.tensor.axis import Spec, join_parts, reduced_shape, spans_of_part, take_part
from lnn_lightning.parallel.tensor.check import agreed_failures
from lnn_lightning.parallel.tensor.install import blank_of
from lnn_lightning.parallel.tensor.modules import sharding_suspended, take_forward
from lnn_lightning.parallel.tensor.plan import KEPT_WHOLE

Runs = list[tuple[int, int, int]]
"""Runs of (first in the part, first in the whole, length)."""


def prepare_seams(root: nn.Module, loops: bool = True) -> list[Seam]:
    """Finds the experts of a model and takes their modules' ``forward`` over, which goes on as before for now.

    To be called before the step is traced: stacked experts answer there by shape, as their real way depends on data.

    Args:
        root: the module, whole.
        loops: also those that are modules of their own, which tensor ranks then leave whole; these are traced anyway.
    """
    seams = [seam for seam in find_seams(root) if loops or seam.kind == "fused"]
    for seam in seams:
        for member in seam.members:
            vars(root.get_submodule(member))[KEPT_WHOLE] = True
        module = root.get_submodule(seam.name)
        if seam.layer or "lnn_seam" in vars(module):
            continue
        inside = len(seam.name) + 1 if seam.name else 0
        members = tuple(member[inside:] for member in seam.members)
        vars(module)["lnn_seam"] = SeamState(seam.name, seam.experts, members)
        if seam.kind == "loop":
            loop_state(module)  # before a trace, which removes the attributes it makes
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
        names: first names of all parameters and buffers that belong to experts; none if every rank holds all of them,
            which are then like any other parameters.
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
        self._cuts: dict[str, Cuts] = {}
        self._specs: dict[str, Spec] = {}
        for seam in self.seams:
            if seam.experts < axis.size:
                raise LayoutError(
                    f"{seam.name!r} has {seam.experts} experts, too few for {axis.size} expert ranks. "
                    f"`expert_parallel_size` must be at most {min(each.experts for each in self.seams)}."
                )
        self._note_names()

    def install(self) -> None:
        """Checks the seams and cuts their parameters in place. Collective over all ranks.

        Raises:
            LayoutError: experts are to be divided over tensor ranks, and there is no way to (on all ranks).
        """
        verdicts: dict[Any, tuple[Cuts, str]] = {}
        failed, impossible = {}, {}
        for seam in self.seams:
            try:
                if (reason := self._reason_against(seam, self.root.get_submodule(seam.name), verdicts)) is not None:
                    failed[seam.name] = reason
            except LayoutError as error:
                impossible[seam.name] = str(error)
        if self._is_spread:
            failed, impossible = agreed_failures(failed), agreed_failures(impossible)
        if impossible:
            raise LayoutError(next(iter(impossible.values())))
        self.left = failed
        self.seams = [seam for seam in self.seams if seam.name not in failed]
        for reason in dict.fromkeys(failed.values()):
            names = ", ".join(repr(name) for name, each in failed.items() if each == reason)
            _warn(f"The experts of {names} are not shared out, every rank holds all of them: {reason}.")
        self._note_names()
        gc.collect()  # graphs of the traced step would remember the whole shapes
        for seam in self.seams:
            self._share_out(seam)

    @property
    def _is_spread(self) -> bool:
        return self.axis.size > 1 or (self.axis.tensor is not None and self.axis.divides_experts)

    def lives_here(self, name: str) -> bool:
        """Whether this rank has a parameter or a part of it; not so for experts that are modules of their own."""
        return self._owners.get(name, self.axis.rank) == self.axis.rank

    def is_divided(self, name: str) -> bool:
        """Whether each rank has a part of a parameter."""
        return (name in self._experts and self.axis.size > 1) or name in self._specs

    def spans(self, name: str) -> list[tuple[int, Runs]]:
        """The divided dimensions of a parameter, and where this rank's part of it lies in the whole."""
        found: list[tuple[int, Runs]] = []
        if name in self._experts and self.axis.size > 1:
            here = self.axis.span(self._experts[name])
            found.append((0, [(0, here.start, len(here))]))
        if (spec := self._specs.get(name)) is not None and self.axis.tensor is not None:
            found.append((spec.dim, spans_of_part(spec, self.axis.tensor.size, self.axis.tensor.rank)))
        return found

    def whole_shape(self, name: str) -> torch.Size:
        """Shape of the whole of an expert parameter."""
        return self._shapes[name]

    def local_shape(self, name: str) -> torch.Size:
        """Shape of this rank's part of it."""
        shape = self._shapes[name]
        if name in self._experts and self.axis.size > 1:
            shape = torch.Size((len(self.axis.span(self._experts[name])), *shape[1:]))
        if (spec := self._specs.get(name)) is not None and self.axis.tensor is not None:
            shape = torch.Size(spec.part_shape(shape, self.axis.tensor.size))
        return shape

    def whole(self, name: str, value: Tensor) -> Tensor:
        """The whole of a parameter, gradient or state of this name from its parts. Collective over the expert ranks.

        Of experts that are modules of their own it comes from the rank that has it; elsewhere only the shape and dtype
        of ``value`` matter. Over the tensor ranks too, where each expert is divided over them.
        """
        value = value.detach()
        is_part = value.shape == self.local_shape(name)
        if (owner := self._owners.get(name)) is not None and self.axis.size > 1:
            is_part = is_part or value.shape == self._shapes[name]
            value = self._from_owner(value, owner, self.local_shape(name) if is_part else value.shape)
        if not is_part or not self.is_divided(name):
            return value
        if (spec := self._specs.get(name)) is not None and self.axis.tensor is not None:
            value = join_parts(self.axis.tensor.all_gather(value), spec)
        if name in self._experts and self.axis.size > 1:
            value = self._from_all(value, self.axis.counts(self._experts[name]))
        return value

    def local(self, name: str, whole: Tensor, reduced: Sequence[int] = ()) -> Tensor:
        """This rank's part of a whole parameter, gradient or state of this name (one element along reduced dims)."""
        if not self.is_divided(name) or whole.shape != reduced_shape(self._shapes[name], reduced):
            return whole
        part = whole
        if name in self._experts and self.axis.size > 1 and 0 not in reduced:
            here = self.axis.span(self._experts[name])
            part = part[here.start : here.stop]
        spec, tensor = self._specs.get(name), self.axis.tensor
        if spec is not None and tensor is not None and spec.dim not in reduced:
            part = take_part(part, spec, tensor.size, tensor.rank)
        return whole if part is whole else part.clone(memory_format=torch.contiguous_format)

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
            for name in self.names:
                owner, _, key = name.rpartition(".")
                store = self.root.get_submodule(owner)._parameters
                parameter = store.get(key)
                if parameter is None or parameter.shape == self._shapes[name]:  # a buffer, or it lives elsewhere
                    continue
                saved.append((store, key, parameter))
                store[key] = blank_of(parameter, tuple(self._shapes[name]))  # type: ignore[assignment]
            with sharding_suspended():
                yield
        finally:
            for store, key, parameter in saved:
                store[key] = parameter

    def _from_owner(self, value: Tensor, owner: int, shape: torch.Size) -> Tensor:
        if owner == self.axis.rank:
            made = value.clone(memory_format=torch.contiguous_format)
        else:
            made = torch.empty(shape, dtype=value.dtype, device=value.device)
        dist.broadcast(made, group=self.axis.group, group_src=owner)
        return made

    def _from_all(self, value: Tensor, counts: Sequence[int]) -> Tensor:
        padded = value.new_zeros((max(counts), *value.shape[1:]))
        padded[: value.shape[0]] = value
        parts = padded.new_empty((self.axis.size, *padded.shape))
        dist.all_gather_single(parts.view(-1), padded.view(-1), group=self.axis.group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def _note_names(self) -> None:
        self._shapes, self._experts, self._owners, self._specs = {}, {}, {}, {}
        for seam in self.seams:
            specs = self._cuts.get(seam.name, Cuts()).specs
            for holder in seam.members or (seam.name,):
                self._specs |= {f"{holder}.{name}" if holder else name: spec for name, spec in specs.items()}
            for name in seam.parameters:
                self._shapes[name], self._experts[name] = self.root.get_parameter(name).shape, seam.experts
            for index, member in enumerate(seam.members):
                owner = next(rank for rank in range(self.axis.size) if index in self.axis.span(seam.experts, rank))
                for name, tensor in named_tensors(self.root.get_submodule(member)):
                    self._shapes[f"{member}.{name}"], self._owners[f"{member}.{name}"] = tensor.shape, owner
        self.names = frozenset(self._shapes) if self._is_spread else frozenset()

    def _reason_against(self, seam: Seam, module: nn.Module, verdicts: dict[Any, tuple[Cuts, str]]) -> str | None:
        """Why a seam must be left alone; None if it can be shared out."""
        if shared := self._shared_name(seam):
            return f"{shared!r} is used in more than one place"
        if self._is_elsewhere(seam):
            return None
        if self._is_spread and any(normalises_batches(self.root.get_submodule(each)) for each in seam.members):
            return "BatchNorm in them is to see the tokens of one rank"
        kind = (type(module), tuple((name, each.shape, each.dtype) for name, each in module.named_parameters()))
        if kind not in verdicts:
            cuts = self._cuts_of(seam, module)
            checked = self._is_spread and not seam.layer
            verdicts[kind] = cuts, check_seam(self.root, seam, self.axis, cuts, self.device) if checked else ""
        self._cuts[seam.name], reason = verdicts[kind]
        return reason or None

    def _cuts_of(self, seam: Seam, module: nn.Module) -> Cuts:
        """How each expert of a seam is divided over the tensor ranks."""
        if self.axis.tensor is None or not self.axis.divides_experts:
            return Cuts()
        size = self.axis.tensor.size
        if seam.kind == "fused":
            cuts = fused_cuts(module, size)
        else:
            cuts = expert_cuts(self.root.get_submodule(seam.members[0]), size)
        if cuts is None:
            raise LayoutError(
                f"The experts of {seam.name!r} cannot be divided over {size} tensor ranks: no way to cut their weights "
                "gives parts whose results add up to the whole's (their inner size must be a multiple, and nothing but "
                "their matrices may depend on it). Leave `divide_experts=False`: tensor ranks then hold whole experts."
            )
        return cuts

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
        cuts = self._cuts.get(seam.name, Cuts())
        if self._is_elsewhere(seam) or (self.axis.size == 1 and not cuts.specs):
            return
        if seam.kind == "fused":
            seam_of(module).once = cuts.once
            divide_fused(module, seam.experts, self.axis, cuts)
            seam_of(module).beside = self.axis.size > 1 and prepare_beside(self.root, seam.name)
        else:
            divide_loop(self.root, seam.members, self.axis, cuts)


def is_spread(module: nn.Module) -> bool:
    """Whether experts of any sub-module have been shared out."""
    states = [vars(each).get("lnn_seam") for each in module.modules()]
    return any(state is not None and state.axis is not None for state in states)


def _warn(message: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        warnings.warn(message, stacklevel=3)
