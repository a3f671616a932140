"""Finds which layers of a unit to divide, and how, by trying on tensors without data.

A trial runs the unit's own ``forward`` on the meta device with parts in place of wholes. Layers met on the way get the
role that suits what they are given (a whole: column; divided features: row), and everything that would be sent is
booked. Where an operation has no rule, the whole is gathered and the layers it came from are noted; other roles for
these are tried until nothing is cheaper. So every plan is right; the search makes it cheap.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from lnn_lightning.parallel.step.leftovers import nothing_left_behind
from lnn_lightning.parallel.step.shapes import own_object
from lnn_lightning.parallel.step.tree import tree_leaves
from lnn_lightning.parallel.tensor.axis import Spec, TensorAxis, take_part
from lnn_lightning.parallel.tensor.calls import called, embedding_call, linear_call, turned_parameter
from lnn_lightning.parallel.tensor.layers import REPLICATE, Role
from lnn_lightning.parallel.tensor.sharded import Sharded, ShardingError, is_sharded, spec_of, wrap
from lnn_lightning.parallel.tensor.trial import (
    CallSample,
    Trial,
    computes,
    is_uneven,
    meta_of,
    on_meta,
    reason_of,
    replace_ledger,
    swapped_forwards,
)
from lnn_lightning.parallel.tensor.units import (
    UnitPlan,
    UnitState,
    find_argument,
    planned_forward,
    run_unit,
    sequence_spec,
)

FLOPS_PER_BYTE = 8
"""What sending a byte is worth in operations: little, so that layers are divided wherever that makes sense."""
_MAX_TRIALS = 120


class _Watch(TorchFunctionMode):
    """Gives layers their roles as they are met."""

    def __init__(self, planner: UnitPlanner, trial: Trial, forced: Mapping[str, Role]) -> None:
        super().__init__()
        self._planner, self._trial, self._forced = planner, trial, forced

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        planner, trial, kwargs = self._planner, self._trial, kwargs or {}
        args, kwargs = meta_of(args), {key: meta_of(value) for key, value in kwargs.items()}
        layer = linear_call(func, args, kwargs) or embedding_call(func, args, kwargs)
        if layer is not None and (name := planner.names.get(id(layer.weight))) is not None:
            role = self._role(name, layer)
            trial.roles[name] = role
            if layer.transposed:
                trial.transposed.add(name)
            if layer.bias is not None:
                trial.biases[planner.names.get(id(layer.bias), "")] = name
            if role != REPLICATE:
                spec, axis = role.weight_spec(layer.transposed), planner.axis
                weight = take_part(layer.weight, spec, axis.size, 0) if spec is not None else layer.weight
                bias = layer.bias
                if bias is not None and role.bias_spec is not None:
                    bias = take_part(bias, role.bias_spec, axis.size, 0)
                elif bias is not None and role.kind == "row":
                    trial.biases.pop(planner.names.get(id(layer.bias), ""), None)
                return layer.run(weight, bias, role, replace_ledger(axis, trial), frozenset({name}))
            value = layer.value
            if layer.options is None and (not is_sharded(value) or spec_of(value).dim == value.ndim - 1):
                trial.waste += planner.waste(layer)
        for value in tree_leaves((args, kwargs)) if turned_parameter(func, args) is None else ():
            if isinstance(value, nn.Parameter) and (name := planner.names.get(id(value))) is not None:
                if not any(is_sharded(other) for other in tree_leaves((args, kwargs))) and computes(func):
                    trial.used_whole.add(name)
        return called(func, args, kwargs)

    def _role(self, name: str, layer: Any) -> Role:
        planner, trial = self._planner, self._trial
        if name in trial.roles:
            return trial.roles[name]
        out, into = (1, 0) if layer.transposed else (0, 1)
        shape, size = layer.weight.shape, planner.axis.size
        wanted = self._forced.get(name, planner.fixed.get(name))
        if layer.options is not None:
            divide = name in planner.large if wanted is None else wanted != REPLICATE
            return Role("vocabulary", (shape[0],)) if divide else REPLICATE
        if wanted is None:
            wanted = self._default(layer, shape[into])
        if wanted.kind == "vocabulary":
            wanted = Role("column", wanted.sections)
        if wanted.kind == "column":
            apart = (shape[out] // 3,) * 3 if layer.thirds is not None else (shape[out],)
            spec = Spec(0, apart if layer.thirds is not None else wanted.sections or apart)
            if spec.total == shape[out] and (spec.fits(size) if planner.may_pad(name) else not is_uneven(spec, size)):
                return Role("column", spec.sections)
        if wanted.kind == "row":
            sections = wanted.sections or (shape[into],)
            if is_sharded(layer.value) and spec_of(layer.value).dim == layer.value.ndim - 1:
                sections = spec_of(layer.value).sections
            if sum(sections) == shape[into] and not is_uneven(Spec(0, sections), size):
                return Role("row", sections)
        return REPLICATE

    @staticmethod
    def _default(layer: Any, features: int) -> Role:
        value = layer.value
        if layer.thirds is not None or not is_sharded(value):
            return Role("column")
        spec = spec_of(value)
        if spec.dim == value.ndim - 1 and spec.total == features:
            return Role("row")
        return Role("column") if spec.sequence else REPLICATE


class UnitPlanner:
    """Plans one unit.

    Args:
        unit: the unit, whole.
        sample: what it is called with.
        size: number of tensor ranks.
        fixed: parameter name (within the unit) -> role that is given.
        large: names of weights worth dividing even if their output must be padded (vocabularies).
    """

    def __init__(
        self, unit: nn.Module, sample: CallSample, size: int, fixed: Mapping[str, Role], large: frozenset[str]
    ) -> None:
        self.unit, self.sample, self.fixed, self.large = unit, sample, dict(fixed), large
        self.axis = TensorAxis(size, 0, inside=True)
        self.names: dict[int, str] = {}
        self.trials = 0
        self.reasons: dict[str, str] = {}

    def may_pad(self, name: str) -> bool:
        """Whether a layer's outputs may be padded: those of a vocabulary."""
        return (name in self.large and bool(self.sample.loss_outputs)) or name in self.fixed

    def waste(self, layer: Any) -> float:
        """What computing a layer on every rank costs, as bytes."""
        flops = 6 * layer.value.numel() * layer.weight.numel() / layer.value.shape[-1]
        return flops * (1 - 1 / self.axis.size) / FLOPS_PER_BYTE

    def plan(self, sequence: bool) -> tuple[UnitPlan | None, str]:
        """The cheapest plan found, and a word on why; None where nothing is divided."""
        with self._tried():
            best, forced = self._search()
            if best.error is not None:
                return None, reason_of(best.error)
            divided = {name: role for name, role in best.roles.items() if role != REPLICATE}
            if not divided:
                costly = bool(best.roles) and any(self.reasons.values())
                return None, "dividing it would cost more than it saves" if costly else "it has no layer to divide"
            plan = self._made(best)
            if sequence:
                plan = self._along_tokens(plan, best, forced)
            return plan, ""

    @contextmanager
    def _tried(self) -> Iterator[None]:
        with swapped_forwards(self.unit), on_meta(self.unit) as self.names, nothing_left_behind(self.unit):
            yield

    def agrees(self, plan: UnitPlan | None) -> bool:
        """Whether a unit like this one's plan is right for this one: its code may take another way."""
        if plan is None:
            return True
        with self._tried():
            trial = self._trial(plan.roles, plan if plan.sequence is not None else None)
            made = self._made(trial)
        return trial.error is None and (made.roles, made.partial, made.biases) == (
            plan.roles,
            plan.partial,
            plan.biases,
        )

    def widened(self, plan: UnitPlan) -> tuple[UnitPlan | None, str | None]:
        """The plan made right for this other way of calling the unit too.

        Returns:
            The plan, and a reason if there can be none (no plan and no reason: the unit's own code failed).
        """
        with self._tried():
            active = plan.sequence is not None and self._divides_tokens(plan)
            trial = self._trial(plan.roles, plan if active else None)
            made = self._made(trial)
        if trial.error is not None:
            ours = isinstance(trial.error, ShardingError)
            return None, reason_of(trial.error) if ours else None
        divided = {name for name, role in {**plan.roles, **made.roles}.items() if role != REPLICATE}
        divided |= {bias for bias, weight in plan.biases.items() if plan.roles[weight].kind == "column"}
        # where tokens cannot be divided, a use on wholes counts as a share (`ParameterMode`)
        mixed = trial.used_whole & (divided | (plan.partial if active or plan.sequence is None else frozenset()))
        clash = (
            mixed
            | (made.partial & divided)
            | {name for name, role in made.roles.items() if plan.roles.get(name, role) != role}
        )
        if clash:
            return None, f"{min(clash)!r} is used in different ways by its calls"
        return replace(
            plan,
            roles={**made.roles, **plan.roles},
            transposed=plan.transposed | made.transposed,
            biases={**made.biases, **plan.biases},
            partial=plan.partial | made.partial,
        ), ""

    def _divides_tokens(self, plan: UnitPlan) -> bool:
        args, kwargs = self.sample.unflatten(list(self.sample.leaves))
        store, key = find_argument(planned_forward(self.unit), plan.argument, list(args), dict(kwargs))
        return sequence_spec(store[key], plan.sequence, self.axis.size) is not None

    def _search(self) -> tuple[Trial, dict[str, Role]]:
        forced: dict[str, Role] = {}
        best = self._trial(forced)
        if best.error is not None and not best.roles:
            return best, forced
        improved = True
        while improved and self.trials < _MAX_TRIALS:
            improved = False
            for change in self._changes(best, forced):
                if self.trials >= _MAX_TRIALS:
                    break
                wanted = {name: role for name, role in {**forced, **change}.items() if role is not None}
                trial = self._trial(wanted)
                if trial.cost < best.cost:
                    for name in change:
                        self.reasons[name] = self._why(best, name)
                    best, forced, improved = trial, wanted, True
                    break
        return best, forced

    def _changes(self, best: Trial, forced: Mapping[str, Role]) -> Iterator[dict[str, Role | None]]:
        """Other roles worth trying; None: whatever suits what a layer is given.

        First sections that an operation asked for, then no division of what had to be gathered, then what was decided
        earlier, last every layer the other way.
        """
        blamed = list(best.gathers)
        if best.error is not None:
            origins: frozenset[str] = getattr(best.error, "origins", frozenset())
            blamed = list(origins) or list(reversed(best.roles))
        for name in blamed:
            for sections in sorted(best.gathers.get(name, ("", set()))[1], key=len):
                wanted = Role("column", sections)
                if forced.get(name) != wanted and self.fixed.get(name, wanted).kind == "column":
                    yield {name: wanted}
        free = [name for name in best.roles if name not in self.fixed]
        divided = [name for name in blamed if name in free and best.roles[name] != REPLICATE]
        for name in divided:
            yield {name: REPLICATE}
        groups: dict[str, list[str]] = {}
        for name in divided:
            groups.setdefault(best.gathers.get(name, ("error", set()))[0], []).append(name)
        for names in groups.values():
            if len(names) > 1:
                yield dict.fromkeys(names, REPLICATE)
        for name in forced:
            yield {name: None}
        for name in free:
            if name not in divided and best.roles[name].kind != "vocabulary":  # tables are divided for their memory
                yield {name: Role("column") if best.roles[name] == REPLICATE else REPLICATE}
        if best.error is not None and len(free) > 1:
            yield dict.fromkeys(free, REPLICATE)

    def _why(self, trial: Trial, name: str) -> str:
        if name in trial.gathers:
            return f"`{trial.gathers[name][0]}` needs its whole result"
        return "" if trial.error is None else reason_of(trial.error)

    def _trial(self, forced: Mapping[str, Role], plan: UnitPlan | None = None) -> Trial:
        self.trials += 1
        trial = Trial()
        axis = replace_ledger(self.axis, trial)
        state = UnitState(
            plan or UnitPlan(open_outputs=self.sample.loss_outputs), axis, replace_ledger(axis, trial, False)
        )
        leaves = [own_object(leaf, partial(meta_of, leaf=True)) for leaf in self.sample.leaves]
        args, kwargs = self.sample.unflatten(leaves)
        forward = planned_forward(self.unit)
        if plan is not None:  # between units it is sharded already
            args, kwargs = list(args), dict(kwargs)
            store, key = find_argument(forward, plan.argument, args, kwargs)
            spec = sequence_spec(store[key], plan.sequence, axis.size)
            assert spec is not None
            store[key] = wrap(take_part(store[key], spec, axis.size, 0), spec, state.outside)
        try:
            with torch.device("meta"), _Watch(self, trial, forced):
                trial.out = run_unit(state, forward, args, kwargs)
            trial.used_whole |= {self.names[each] for each in trial.whole_ids if each in self.names}
            self._check(trial)
        except Exception as error:  # noqa: BLE001 - whatever the user's code cannot do on parts
            trial.error = error
        return trial

    def _check(self, trial: Trial) -> None:
        """Parameters that would be right in no way."""
        divided = {name for name, role in trial.roles.items() if role != REPLICATE}
        partial = {self.names[each] for each in trial.partial_parameters if each in self.names}
        divided |= {bias for bias, weight in trial.biases.items() if trial.roles[weight].kind == "column"}
        for name in sorted((trial.used_whole & (divided | partial)) | (partial & divided)):
            owner = trial.biases.get(name, name)
            raise ShardingError(
                f"{name!r} is used on divided values and on whole ones",
                frozenset({owner} if owner in trial.roles else ()),
            )

    def _made(self, trial: Trial) -> UnitPlan:
        partial = frozenset(self.names[each] for each in trial.partial_parameters if each in self.names)
        return UnitPlan(
            roles=dict(trial.roles),
            transposed=frozenset(trial.transposed),
            biases=dict(trial.biases),
            partial=partial,
            open_outputs=self.sample.loss_outputs,
            bytes=(trial.forward, trial.backward),
            reasons={name: self.reasons.get(name, "") for name in trial.roles},
        )

    def _along_tokens(self, plan: UnitPlan, best: Trial, forced: Mapping[str, Role]) -> UnitPlan:
        """The same roles with values between units sharded along a token dimension, if that sends no more."""
        found = self._stream(best.out)
        if found is None:
            return plan
        argument, value, output = found
        forced = {**forced, **best.roles}
        for dim in (1, 0):
            if sequence_spec(value, dim, self.axis.size) is None:
                continue
            trying = replace(plan, sequence=dim, argument=argument, output=output)
            trial = self._trial(forced, trying)
            out = tree_leaves(trial.out)[output] if trial.error is None else None
            stays = isinstance(out, Sharded) and spec_of(out).sequence and spec_of(out).dim == dim
            if stays and trial.call_cost <= best.call_cost * 1.02 and trial.roles == best.roles:
                made = self._made(trial)
                return replace(made, sequence=dim, argument=argument, output=output)
        return plan

    def _stream(self, out: Any) -> tuple[str | int, Tensor, int] | None:
        """The argument that runs through the unit: name, value, and the output leaf that goes on with it."""
        args, kwargs = self.sample.unflatten(list(self.sample.leaves))
        outputs = [(index, leaf) for index, leaf in enumerate(tree_leaves(out)) if isinstance(leaf, Tensor)]
        for key, value in [*enumerate(args), *kwargs.items()]:
            if not isinstance(value, FakeTensor) or not value.is_floating_point() or value.ndim < 2:
                continue
            for index, leaf in outputs:
                if leaf.shape == value.shape:
                    return _argument_name(self.unit, key), value, index
        return None


def _argument_name(unit: nn.Module, key: int | str) -> int | str:
    if isinstance(key, str):
        return key
    names = [
        name
        for name, parameter in inspect.signature(unit.forward).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    return names[key] if key < len(names) else key
