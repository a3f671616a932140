"""The traced step: which units are called in which order, and which values flow between them.

The user's own step runs once with every unit computed on fake tensors (shapes without data). Glue runs as it is: on
real values where they follow from the batch alone, on fake ones behind the first unit. A dispatch mode notes for every
storage which unit outputs, and which parameters used by the glue, it derives from.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.step.hooks import hooks_set_aside, run_hooks, runs_hooks
from lnn_lightning.parallel.step.interception import CheckpointRegions
from lnn_lightning.parallel.step.leftovers import nothing_left_behind
from lnn_lightning.parallel.step.losses import LossCall, watch_losses
from lnn_lightning.parallel.step.patching import patched_calls
from lnn_lightning.parallel.step.shapes import ShapeRule, guess_flops, learn_output, own_object
from lnn_lightning.parallel.step.tracker import (
    HIDDEN,
    Dependency,
    Key,
    Tracker,
    UnitWatch,
    address_of,
    bytes_of,
    numbers_in,
)
from lnn_lightning.parallel.step.tree import Unflatten, tree_flatten, tree_leaves


@dataclass(frozen=True)
class TensorInfo:
    """What is known of a tensor before it exists."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass
class Call:
    """One call of a unit, in the order of the step.

    Attributes:
        index: number of the call.
        unit: name of the called module.
        group: name of the maximal unit it belongs to.
        outputs: a :class:`TensorInfo` for a tensor leaf, the value itself for others.
        aliases: output leaf -> input leaf that it is the very same object as.
        unflatten: builds the result from its leaves.
        needs: unit outputs its arguments derive from.
        parameters: names of parameters it uses: its own, and those that glue used for its arguments.
        glue_parameters: the latter alone.
        flops: floating-point operations of the forward.
        random: whether it draws random numbers.
        region: number of the glue-level checkpoint it is called in; None: in none.
        writes: it adds to, or changes, a list or dict that it is given.
        in_place: it changes a tensor that it is given.
        checkpoints: it uses ``torch.utils.checkpoint`` within.
        given_bytes: bytes of the tensors it is given.
        saved_bytes: bytes that autograd keeps within, of neither parameters nor what it is given; 0: not known.
    """

    index: int
    unit: str
    group: str
    outputs: list[Any] = field(default_factory=list)
    aliases: dict[int, int] = field(default_factory=dict)
    unflatten: Unflatten | None = None
    needs: frozenset[Key] = frozenset()
    parameters: frozenset[str] = frozenset()
    glue_parameters: frozenset[str] = frozenset()
    flops: int = 0
    random: bool = False
    region: int | None = None
    writes: bool = False
    in_place: bool = False
    checkpoints: bool = False
    given_bytes: int = 0
    saved_bytes: int = 0


@dataclass
class Trace:
    """A followed step.

    Attributes:
        calls: unit calls in order.
        tail: unit outputs that the rest of the step (behind the last call) and its logged values derive from.
        tail_parameters: names of parameters the tail uses.
        everywhere: parameters whose value became a Python number in glue: needed on every stage.
        mutated: unit outputs that glue or a later unit changes in place.
        glue_random: glue code draws random numbers.
        glue_masks: glue code masks values that may be absent.
        mutates_batch: the step changes the batch in place.
        losses: mean cross entropies seen, with where their targets come from.
        inputs: called unit -> the leaves it was first called with, and what builds ``(args, kwargs)`` from them; real
            values where they follow from the batch alone, fake ones for results of other units.
        tail_error: why the tail could not be followed (None: it was).
    """

    calls: list[Call]
    tail: frozenset[Key] = frozenset()
    tail_parameters: frozenset[str] = frozenset()
    everywhere: frozenset[str] = frozenset()
    mutated: frozenset[Key] = frozenset()
    glue_random: bool = False
    glue_masks: bool = False
    mutates_batch: bool = False
    losses: list[LossCall] = field(default_factory=list)
    inputs: dict[str, list[tuple[tuple[Any, ...], Unflatten]]] = field(default_factory=dict)
    tail_error: Exception | None = None

    @property
    def glue_needs_mode(self) -> bool:
        """Whether glue code cannot run on its own, see :mod:`~lnn_lightning.parallel.step.glue`."""
        return self.glue_random or self.glue_masks

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the called units in order."""
        return tuple(call.unit for call in self.calls)


class _Recorder:
    """Answers unit calls while tracing."""

    def __init__(
        self,
        root: nn.Module,
        groups: dict[str, str],
        tracker: Tracker,
        fake_mode: FakeTensorMode,
        rules: dict[str, ShapeRule],
        regions: CheckpointRegions,
    ) -> None:
        self.regions = regions
        self.trains = torch.is_grad_enabled()
        self.root, self.groups, self.tracker, self.fake_mode, self.rules = root, groups, tracker, fake_mode, rules
        self.names = {id(p): name for name, p in root.named_parameters()}
        self.calls: list[Call] = []
        self.inputs: dict[str, list[tuple[tuple[Any, ...], Unflatten]]] = {}

    def enter(self, name: str, unit: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        tracker = self.tracker
        if tracker.inside:
            return original(*args, **kwargs)
        if self.regions.current is not None and self.trains and not torch.is_grad_enabled():
            raise StepError(
                f"{name!r} is called inside of `torch.utils.checkpoint.checkpoint(..., use_reentrant=True)`, whose "
                "values have no graph to send gradients through. Use `use_reentrant=False`."
            )
        call = Call(len(self.calls), name, self.groups[name], region=self.regions.current)
        self.calls.append(call)
        checkpoints = self.regions.count
        dependencies = tracker.of((args, kwargs))
        leaves, unflatten = tree_flatten((args, kwargs))
        self._note_inputs(name, leaves, unflatten)
        tracker.inside = True
        try:
            fakes = [self._fake(leaf) for leaf in leaves]
            inside = UnitWatch(tracker, {address_of(leaf) for leaf in fakes if isinstance(leaf, Tensor)})
            given, numbers = unflatten(fakes), numbers_in(fakes)
            hooked = runs_hooks(unit, original)
            with hooks_set_aside(unit) if hooked else nullcontext():
                out = self._run(name, unit, original, fakes, given, unflatten, inside)
            now = tree_leaves(given)
            call.writes = (
                numbers_in(fakes) != numbers
                or len(now) != len(fakes)
                or any(new is not old for new, old in zip(now, fakes, strict=True))
            )
        finally:
            tracker.inside = False
        call.needs = frozenset(key for key in dependencies if isinstance(key, tuple))
        call.glue_parameters = frozenset(key for key in dependencies if isinstance(key, str))
        own = {self.names[id(p)] for p in unit.parameters() if id(p) in self.names}
        call.parameters = call.glue_parameters | own | inside.used
        call.flops, call.random = inside.flops, inside.random
        call.checkpoints = self.regions.count > checkpoints
        call.given_bytes = sum(bytes_of(leaf) for leaf in leaves if isinstance(leaf, Tensor))
        call.saved_bytes = inside.saved_bytes()
        changed = self._note_mutations(call, leaves, fakes, inside)
        call.in_place = bool(changed)
        for address, storage in inside.made.items():
            tracker.derived[address] = tracker.derived.get(address, frozenset()) | {(call.index, HIDDEN)}
            tracker.alive.append(storage)
        result = self._note_outputs(call, out, leaves, fakes, changed)
        tracker.since_last_call = set()
        return run_hooks(unit, args, kwargs, result, absent=True) if hooked else result

    def _run(
        self,
        name: str,
        unit: nn.Module,
        original: Any,
        leaves: list[Any],
        given: Any,
        unflatten: Unflatten,
        inside: UnitWatch,
    ) -> Any:
        # a cache, say, is written to by a run that fails half-way
        untouched = [own_object(leaf) for leaf in leaves]
        args, kwargs = given
        try:
            with self.fake_mode, inside:
                out = inside.counting_saved(partial(original, *args, **kwargs))
            if inside.flops == 0 and any(isinstance(module, nn.RNNBase) for module in unit.modules()):
                inside.flops = guess_flops(unit, leaves)
            return out
        except StepError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a data-dependent block raises on fake tensors
            inside.random = True
            rule = self.rules.get(name)
            out, rule = learn_output(name, unit, original, untouched, unflatten, self.fake_mode, rule, error)
            self.rules[name] = rule
            inside.flops = rule.flops
            return out

    def _note_inputs(self, name: str, leaves: list[Any], unflatten: Unflatten) -> None:
        known = self.inputs.setdefault(name, [])
        kinds = [[type(leaf) for leaf in other] for other, _ in known]
        if [type(leaf) for leaf in leaves] not in kinds:
            self.tracker.inside = True
            kept = tuple(own_object(leaf, _without_graph) for leaf in leaves)
            self.tracker.inside = False
            known.append((kept, unflatten))

    def _fake(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or isinstance(leaf, FakeTensor):
            return leaf
        if isinstance(leaf, nn.Parameter):
            return leaf
        return self.fake_mode.from_tensor(leaf, static_shapes=True)

    def _note_mutations(self, call: Call, leaves: list[Any], fakes: list[Any], inside: UnitWatch) -> set[int]:
        """Ids of the inputs the unit changed in place; what is read of them later left the unit by a side door."""
        changed: set[int] = set()
        keys: set[Key] = set()
        for leaf, fake in zip(leaves, fakes, strict=True):
            if isinstance(fake, FakeTensor) and address_of(fake) in inside.changed:
                self.tracker.note_batch_write(leaf)
                changed.add(id(fake))
                keys |= {key for key in self.tracker.of_tensor(leaf) if isinstance(key, tuple)}
                self.tracker.add(leaf, frozenset({(call.index, HIDDEN)}))
        self.tracker.mutated |= keys
        return changed

    def _note_outputs(self, call: Call, out: Any, leaves: list[Any], fakes: list[Any], changed: set[int]) -> Any:
        outputs, call.unflatten = tree_flatten(out)
        position = {
            id(fake): index for index, fake in enumerate(fakes) if isinstance(fake, Tensor) and id(fake) not in changed
        }
        result = []
        for index, leaf in enumerate(outputs):
            if not isinstance(leaf, Tensor):
                call.outputs.append(leaf)
                result.append(leaf)
                continue
            call.outputs.append(TensorInfo(tuple(leaf.shape), leaf.dtype, leaf.requires_grad))
            if (source := position.get(id(leaf))) is not None:
                call.aliases[index] = source
                result.append(leaves[source])
                continue
            self.tracker.inside = True
            with self.fake_mode:  # a storage of its own, so that what derives from it can be told apart
                fresh = leaf.clone()
            self.tracker.inside = False
            self.tracker.add(fresh, frozenset({(call.index, index)}))
            result.append(fresh)
        return call.unflatten(result)


def _without_graph(leaf: Tensor) -> Tensor:
    return leaf.detach().requires_grad_(leaf.requires_grad) if leaf.grad_fn is not None else leaf


def trace_step(
    root: nn.Module,
    groups: dict[str, str],
    step: Callable[[Any], Any],
    batch: Any,
    watch: Callable[[Callable[[Any], None]], Any],
    rules: dict[str, ShapeRule],
    fake_mode: FakeTensorMode,
) -> Trace:
    """Runs ``step(batch)`` once without computing any unit.

    Args:
        root: the module the units belong to.
        groups: every module that counts as a unit when it is called from glue -> the maximal unit it belongs to.
        step: the user's step.
        batch: one micro-batch.
        watch: makes a context in which logging is muted; what would be logged is passed to the given function.
        rules: output shapes of units that cannot run on fake tensors; learnt ones are added.
        fake_mode: mode of the fake tensors; must allow real inputs.

    Raises:
        StepError: the step called no unit, or failed before its last unit.
    """
    batch_storages = {
        address_of(leaf): index for index, leaf in enumerate(tree_leaves(batch)) if isinstance(leaf, Tensor)
    }
    regions = CheckpointRegions()
    tracker = Tracker({address_of(p): name for name, p in root.named_parameters()}, batch_storages, regions)
    recorder = _Recorder(root, groups, tracker, fake_mode, rules, regions)
    logged: set[Dependency] = set()
    error: Exception | None = None
    losses: list[LossCall] = []
    units = {name: root.get_submodule(name) for name in groups}
    with nothing_left_behind(root), regions.watched(), tracker, patched_calls(units, recorder.enter):
        with watch(lambda value: logged.update(tracker.of(value))), watch_losses(losses, batch_storages, tracker):
            try:
                tail = tracker.of(step(batch))
            except StepError:
                raise
            except Exception as caught:  # noqa: BLE001 - the tail may do anything with values that are not there
                error, tail = caught, frozenset()
    if not recorder.calls:
        if error is not None:
            raise error
        raise StepError(
            f"{type(root).__name__}'s step calls no sub-module with parameters, so there is nothing to cut into stages."
        )
    everything = tail | tracker.since_last_call | logged
    if error is not None:
        everything |= {(len(recorder.calls) - 1, i) for i, _ in enumerate(recorder.calls[-1].outputs)}
    return Trace(
        calls=recorder.calls,
        tail=frozenset(key for key in everything if isinstance(key, tuple)),
        tail_parameters=frozenset(name for name in everything if isinstance(name, str)),
        everywhere=frozenset(tracker.everywhere),
        mutated=frozenset(tracker.mutated),
        glue_random=tracker.random,
        glue_masks=tracker.masks,
        mutates_batch=tracker.mutates_batch,
        losses=losses,
        inputs=recorder.inputs,
        tail_error=error,
    )
