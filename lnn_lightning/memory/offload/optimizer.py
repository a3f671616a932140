"""An optimizer whose state is elsewhere: its own object, with a step that works through a store.

``optimizer.state`` has the state as before: tensors that are mapped from the store's file, which nothing touches in
training. Whoever looks at them (a checkpoint, the user) reads the file. Parameters are updated by the optimizer's own
class, part by part, on buffers that are read ahead and written behind; on the CPU by torch's fused form of it, where
there is one and the user chose none.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lnn_lightning.checkpoint.states import same_values
from lnn_lightning.memory.offload.lane import Lane, Work
from lnn_lightning.memory.offload.places import SMALL, Home, Leaf
from lnn_lightning.memory.offload.probe import Behaviour, behaviour_of, leaves_of
from lnn_lightning.memory.offload.settings import Offload, OffloadError
from lnn_lightning.memory.offload.shadow import snapshot
from lnn_lightning.memory.offload.store import Store
from lnn_lightning.memory.offload.updates import PartUpdate, Step


class OffloadedOptimizer:
    """Keeps the state of an optimizer in a store and steps on it there.

    Args:
        optimizer: the user's; its ``step`` is replaced, all else stays.
        store: where its state goes; may be shared by several.
        settings: chunk size, and how much is read ahead.

    Raises:
        OffloadError: its state cannot be split by parameter, or there is no room for it.
    """

    def __init__(self, optimizer: Optimizer, store: Store, settings: Offload) -> None:
        self.optimizer, self.store, self.settings = optimizer, store, settings
        self.behaviour: Behaviour = behaviour_of(optimizer)
        self.lane = Lane(store, settings.prefetch)
        self.order: Mapping[int, int] = {}
        """By the ``id`` of a parameter: where it stands in the order in which new values are needed."""
        self.may_go_on: Callable[[], bool] = lambda: False
        """Whether the step that is asked for may end while its work goes on."""
        self._homes: dict[int, Home] = {}
        self._mapped: dict[int, dict[str, Tensor]] = {}
        self._ahead: dict[int, list[PartUpdate]] = {}
        self._versions: dict[int, list[int]] = {}
        self._early: Step | None = None
        self._updated: dict[int, Tensor] = {}
        self._streams: dict[torch.device, Any] = {}
        self._loaded: dict[int, dict[str, Tensor]] = {}
        step: Any = Optimizer.profile_hook_step(partial(_step, self))
        step._wrapped_by_lr_sched = True  # it tells schedulers itself that it was called
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined] # overflows are known beforehand
        optimizer.register_state_dict_pre_hook(lambda _: self.finish())
        optimizer.register_load_state_dict_pre_hook(self._before_load)
        optimizer.register_load_state_dict_post_hook(lambda _: self._behind_load())
        self.reserve()
        for parameter in list(optimizer.state):
            self._take_over(parameter)
        store.release()

    # ---------------------------------------------------------------- what is where

    def parameters(self) -> Iterator[tuple[int, Tensor]]:
        """Its parameters as they are now, with the numbers of their groups."""
        for number, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                yield number, parameter

    def stays(self, parameter: Tensor) -> bool:
        """Whether a parameter's state stays where the optimizer makes it."""
        here = self.store.in_place and parameter.device.type == "cpu"
        return here or parameter.numel() < SMALL or not torch.ops.aten.is_non_overlapping_and_dense(parameter)

    def reserve(self) -> None:
        """Makes room for the state that the first step will make, as far as it is known, so that there is some then.

        Raises:
            OffloadError: the disk is full.
        """
        now = snapshot(self.optimizer)
        known: dict[tuple[int, int, torch.dtype], Mapping[str, torch.dtype]] = {}
        for number, parameter in self.parameters():
            if self.stays(parameter) or id(parameter) in self._homes or not parameter.requires_grad:
                continue
            kind = (number, parameter.dim(), parameter.dtype)
            if kind not in known:
                known[kind] = leaves_of(now, number, parameter)
            leaves = {name: self._leaf(parameter, dtype) for name, dtype in known[kind].items()}
            self._homes[id(parameter)] = Home(parameter, leaves)

    def expose(self) -> None:
        """Puts what there is room for into ``optimizer.state``: a checkpoint is then read straight into the file."""
        for home in self._homes.values():
            if not home.made:
                self.optimizer.state[home.parameter] = dict(self._tensors(home))

    def conceal(self) -> None:
        """Takes back what :meth:`expose` showed and nothing was loaded into."""
        for home in self._homes.values():
            if not home.made:
                self.optimizer.state.pop(home.parameter, None)

    def keep_values(self, parameter: Tensor, updated: Callable[[int, int, Tensor], None] | None = None) -> bool:
        """Keeps a parameter's own values in the store too (fp32 masters of a module in half precision).

        Args:
            parameter: one of the optimizer's, on the CPU; from now on it is mapped from the file.
            updated: called in a thread with (start, stop, new values) for each part of it that is updated.

        Returns:
            Whether it is large enough for that.
        """
        home = self._homes.get(id(parameter))
        if home is None or parameter.device.type != "cpu":
            return False
        home.values, home.updated = self._leaf(parameter, parameter.dtype), updated
        mapped = home.values.tensor(self.store)
        mapped.copy_(parameter.detach())
        parameter.data = mapped
        self.store.release()
        return True

    def _leaf(self, parameter: Tensor, dtype: torch.dtype) -> Leaf:
        region = self.store.allocate(parameter.numel(), dtype)
        return Leaf(region, tuple(parameter.shape), parameter.stride())

    def _tensors(self, home: Home) -> dict[str, Tensor]:
        mapped = self._mapped.setdefault(id(home.parameter), {})
        for name, leaf in home.leaves.items():
            if name not in mapped:
                mapped[name] = leaf.tensor(self.store)
        return mapped

    def _take_over(self, parameter: Tensor) -> bool:
        """Moves state to the store that the optimizer, a checkpoint or the user put into ``optimizer.state``.

        Returns:
            Whether the store's was not what is valid now.
        """
        home = self._homes.get(id(parameter))
        if home is None:
            return False
        if parameter not in self.optimizer.state:  # the first step is to come, or somebody cleared the state
            cleared, home.made = home.made, False
            return cleared
        state, moved = self.optimizer.state[parameter], False
        for name in set(home.leaves) - set(state):
            self._mapped.get(id(parameter), {}).pop(name, None)
            self.store.free(home.leaves.pop(name).region)
        mapped = self._tensors(home)
        for name, value in state.items():
            here = name in home.leaves and isinstance(value, Tensor) and tuple(value.shape) == home.leaves[name].shape
            own = isinstance(value, Tensor) and value.shape == parameter.shape
            if value is mapped.get(name) or not (here or own):
                continue
            if name not in home.leaves:
                home.leaves[name] = self._leaf(parameter, value.dtype)
                mapped = self._tensors(home)
            if value.data_ptr() != mapped[name].data_ptr():
                mapped[name].copy_(value)
            state[name], moved = mapped[name], True
        home.made = bool(state)
        return moved

    # ---------------------------------------------------------------- steps

    def step(self, arguments: Mapping[str, Any]) -> None:
        """Updates all parameters that have gradients; it may go on behind this call, see :attr:`may_go_on`."""
        self.reserve()
        step = Step(snapshot(self.optimizer, arguments))
        if self._early is not None:
            self._check_unchanged(step)
            step = self._early
        works: list[PartUpdate] = []
        small: dict[int, list[Tensor]] = {}
        for number, parameter in self.parameters():
            if parameter.grad is None or id(parameter) in self._updated:
                continue
            if id(parameter) not in self._homes or parameter.grad.layout is not torch.strided:
                small.setdefault(number, []).append(parameter)
            else:
                works += self._begin(number, parameter, step)
        for number, parameters in small.items():
            step.apply(number, parameters, [self.optimizer.state[parameter] for parameter in parameters])
        self.lane.submit(sorted(works, key=self._turn))
        self.lane.reorder(self._turn)
        self.lane.let_go()
        self._ahead, self._early, self._updated = {}, None, {}
        if not self.may_go_on() or self.behaviour.counts or self.optimizer._optimizer_step_post_hooks:
            self.finish()
            for number, changes in step.changes.items():
                changes.apply(self.optimizer, number)

    def update_now(self, parameter: Tensor) -> None:
        """Begins the update of a parameter before :meth:`step` is called, which must find its gradient as it is now.

        Autograd refuses whatever else would still use its old values in this backward.
        """
        if self._early is None:
            self._early = Step(snapshot(self.optimizer))
        number = next(number for number, each in self.parameters() if each is parameter)
        torch.autograd.graph.increment_version(parameter)
        assert parameter.grad is not None
        self._updated[id(parameter)] = parameter.grad
        self.lane.submit(self._begin(number, parameter, self._early))

    def is_updated(self, parameter: Tensor) -> bool:
        """Whether :meth:`update_now` was called for a parameter and the step was not yet."""
        return id(parameter) in self._updated

    def can_update(self, parameter: Tensor) -> bool:
        """Whether :meth:`update_now` does something for a parameter and it was not called for it yet."""
        return id(parameter) in self._homes and id(parameter) not in self._updated

    def _check_unchanged(self, now: Step) -> None:
        """What was updated before the step was asked for was updated with what it has now."""
        assert self._early is not None
        gradients = {id(parameter): parameter.grad for _, parameter in self.parameters()}
        same = all(gradients.get(key) is gradient for key, gradient in self._updated.items())
        if not same or not same_values(self._early.now.options, now.now.options):
            what = "learning rate or another setting" if same else "a gradient"
            raise OffloadError(
                f"{what} of {type(self.optimizer).__name__} changed between backward and `optimizer.step()`, when "
                "parameters had been updated already. Set `Offload(overlap=False)`."
            )

    def read_ahead(self) -> None:
        """Starts to read what the next step will need first; parameters are not changed yet."""
        ahead = sorted((item for item in self.parameters() if id(item[1]) in self._homes), key=self._place)
        works: list[PartUpdate] = []
        for number, parameter in ahead:
            if len(works) > self.settings.prefetch:
                break
            if parameter.requires_grad and id(parameter) not in self._ahead and not self.lane.has(id(parameter)):
                self._ahead[id(parameter)] = self._parts(number, self._homes[id(parameter)])
                self._versions[id(parameter)] = self._changes(parameter)
                works += self._ahead[id(parameter)]
        self.lane.submit(works, held=True)

    def wait_for(self, parameters: Iterable[int]) -> None:
        """Waits until parameters, by their ``id``, have their new values."""
        self.lane.wait_for(parameters)

    def finish(self) -> None:
        """Waits until all parameters have their new values and the store all state.

        Raises:
            OffloadError: a read or write failed, or a step was begun and broken off.
        """
        if self._early is not None:
            raise OffloadError(
                f"A step of {type(self.optimizer).__name__} was broken off when a part of the parameters had been "
                "updated: they are of no step. Load a checkpoint; `Offload(overlap=False)` updates all of them at once."
            )
        self._ahead = {}
        self.lane.let_go()  # what was read for a step that did not come is dropped
        self.lane.finish()

    def close(self) -> None:
        """Ends its thread."""
        self.lane.close()

    def _begin(self, number: int, parameter: Tensor, step: Step) -> list[PartUpdate]:
        """The pieces of a parameter's update that nobody has been given yet."""
        self.lane.wait_for([id(parameter)])  # where no forward did: what is read next must be known
        moved, home = self._take_over(parameter), self._homes[id(parameter)]
        changed = moved or self._versions.get(id(parameter)) != self._changes(parameter)  # since it was read ahead
        ahead = None if changed else self._ahead.get(id(parameter))
        parts = ahead if ahead is not None else self._parts(number, home)
        state = self.optimizer.state.get(parameter, {})
        for part in parts:
            part.gradient, part.step = parameter.grad, step
            part.stream = self._stream(parameter.device)
            part.rest = {name: value for name, value in state.items() if name not in home.leaves}
        return parts if ahead is None else []

    def _changes(self, parameter: Tensor) -> list[int]:
        """How often what the store has of a parameter was changed in place, by whoever it was."""
        mapped = self._mapped.get(id(parameter), {})
        return [parameter._version, *(mapped[name]._version for name in sorted(mapped))]

    def _parts(self, number: int, home: Home) -> list[PartUpdate]:
        numel = home.parameter.numel()
        cut = self.behaviour.elementwise
        size = self.settings.chunk_size if cut else numel
        return [
            PartUpdate(home, self.store, number, start, min(start + size, numel), cut, self._done)
            for start in range(0, numel, size)
        ]

    def _done(self, home: Home, rest: dict[str, Any]) -> None:
        home.made = True
        state = self.optimizer.state[home.parameter]
        state.update({**rest, **self._tensors(home)})

    def _turn(self, work: Work) -> int:
        return self.order.get(work.owner, 0)

    def _place(self, item: tuple[int, Tensor]) -> int:
        return self.order.get(id(item[1]), 0)

    def _stream(self, device: torch.device) -> Any:
        """Where a GPU's copies are made, behind what it was given to do until now."""
        if device.type == "cpu":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        self._streams[device].wait_stream(torch.cuda.current_stream(device))
        return self._streams[device]

    # ---------------------------------------------------------------- checkpoints

    def _before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        """Takes tensors out of what is loaded that go to the store: torch would copy them to the parameter's device."""
        self.finish()
        self.reserve()
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for _, parameter in self.parameters()]
        if len(numbers) != len(parameters):
            return None  # of which torch tells the user
        states = dict(state_dict["state"])
        for number, parameter in zip(numbers, parameters, strict=True):
            if id(parameter) not in self._homes or number not in states:
                continue
            taken = {
                name: value
                for name, value in states[number].items()
                if isinstance(value, Tensor) and value.shape == parameter.shape
            }
            self._loaded[id(parameter)] = taken
            states[number] = {name: value for name, value in states[number].items() if name not in taken}
        return {**state_dict, "state": states}

    def _behind_load(self) -> None:
        for home in self._homes.values():
            home.made = False
        for key in list(self._loaded):
            parameter = self._homes[key].parameter
            self.optimizer.state[parameter].update(self._loaded.pop(key))
            self._take_over(parameter)
            self.store.release()


def _step(offloaded: OffloadedOptimizer, optimizer: Optimizer, closure: Any = None, **arguments: Any) -> Any:
    """In place of the optimizer's own."""
    optimizer._opt_called = True  # type: ignore[attr-defined] # which schedulers ask for
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    offloaded.step(arguments)
    return loss
