"""Where values come from: dispatch modes that follow glue code and what happens inside of a unit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.step.glue import masks_as_indices
from lnn_lightning.parallel.step.interception import CheckpointRegions
from lnn_lightning.parallel.step.randomness import is_random
from lnn_lightning.parallel.step.saved import refuses_hooks, watching_saved
from lnn_lightning.parallel.step.tree import tree_leaves

Key: TypeAlias = tuple[int, int]
"""(number of the call, number of the output leaf); leaf -1 stands for a value that left the unit another way."""
HIDDEN = -1
Dependency: TypeAlias = Key | str
"""A unit output, or the name of a parameter that glue code uses."""


class Tracker(TorchDispatchMode):
    """Keeps for each storage what it derives from; passive while a unit runs."""

    def __init__(self, parameters: dict[int, str], batch_storages: dict[int, int], regions: CheckpointRegions) -> None:
        super().__init__()
        self.regions = regions
        self.parameters = parameters
        self.batch_storages = batch_storages
        self.mutates_batch = False
        self.derived: dict[int, frozenset[Dependency]] = {}
        self.alive: list[Any] = []
        self.inside = False
        self.random = False
        self.masks = False
        self.everywhere: set[str] = set()
        self.mutated: set[Key] = set()
        self.since_last_call: set[Dependency] = set()

    def of(self, tree: Any) -> frozenset[Dependency]:
        """What the tensors of a tree derive from."""
        result: frozenset[Dependency] = frozenset()
        for leaf in tree_leaves(tree):
            if isinstance(leaf, Tensor):
                result |= self.of_tensor(leaf)
        return result

    def of_tensor(self, tensor: Tensor) -> frozenset[Dependency]:
        """What a tensor derives from."""
        address = address_of(tensor)
        found = self.derived.get(address, frozenset())
        if (name := self.parameters.get(address)) is not None:
            found |= {name}
        return found

    def add(self, tensor: Tensor, dependencies: frozenset[Dependency]) -> None:
        """Notes that a tensor's storage derives from something."""
        address = address_of(tensor)
        if address not in self.derived:
            self.alive.append(tensor.untyped_storage())
        self.derived[address] = self.derived.get(address, frozenset()) | dependencies

    def note_batch_write(self, tensor: Any) -> None:
        """Notes a change in place, if it is one of the batch."""
        self.mutates_batch |= isinstance(tensor, Tensor) and address_of(tensor) in self.batch_storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.inside:
            return func(*args, **kwargs)
        dependencies = self.of((args, kwargs))
        written = list(written_arguments(func, args, kwargs))
        func, indexed = masks_as_indices(func, args)
        self.masks |= indexed is not args
        out = func(*indexed, **kwargs)
        self.random |= is_random(func)
        if is_random(func) and self.regions.current is not None:
            raise StepError(
                "The step draws random numbers (dropout, say) inside of `torch.utils.checkpoint` but outside of its "
                "blocks: the recomputation would draw others. Checkpoint each block by itself."
            )
        for argument in written:
            self.note_batch_write(argument)
        if dependencies:
            self.since_last_call |= dependencies
            for argument in written:
                self.mutated |= {key for key in self.of_tensor(argument) if isinstance(key, tuple)}
                self.add(argument, dependencies)
            tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
            for tensor in tensors:
                self.add(tensor, dependencies)
            if not tensors:
                self.everywhere |= {name for name in dependencies if isinstance(name, str)}
        return out


class UnitWatch(TorchDispatchMode):
    """What happens within one unit call."""

    def __init__(self, tracker: Tracker, given: set[int]) -> None:
        super().__init__()
        self.tracker = tracker
        self.given = given
        self.flops = 0
        self.random = False
        self.used: set[str] = set()
        self.changed: set[int] = set()
        self.made: dict[int, Any] = {}
        self.saved: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and (name := self.tracker.parameters.get(address_of(leaf))) is not None:
                self.used.add(name)
        self.changed |= {address_of(argument) for argument in written_arguments(func, args, kwargs)} & self.given
        out = func(*args, **kwargs)
        self.random |= is_random(func)
        if (formula := flop_registry.get(func._overloadpacket)) is not None:
            try:
                self.flops += int(formula(*args, **kwargs, out_val=out))
            except Exception:  # noqa: BLE001 - a formula that does not know this form of the operator
                pass
        for leaf in tree_leaves(out):
            if isinstance(leaf, FakeTensor) and (address := address_of(leaf)) not in self.given:
                self.made[address] = leaf.untyped_storage()
        return out

    def counting_saved(self, run: Callable[[], Any]) -> Any:
        """Runs the unit; ``saved`` gets the storages that autograd keeps, but those of parameters and arguments.

        It gets none of a unit that uses ``torch.func``, which refuses to run under saved-tensor hooks.
        """

        def note(tensor: Tensor) -> None:
            if (address := address_of(tensor)) not in self.given and address not in self.tracker.parameters:
                self.saved[address] = tensor.detach()

        try:
            with watching_saved(note):
                return run()
        except RuntimeError as error:
            if not refuses_hooks(error):
                raise
        self.saved.clear()
        return run()

    def saved_bytes(self) -> int:
        """Bytes of ``saved``."""
        return sum(bytes_of(tensor) for tensor in self.saved.values())


def numbers_in(leaves: list[Any]) -> list[Any]:
    """Plain values in objects handed to a unit: their change would be lost on other stages."""
    objects = [leaf for leaf in leaves if hasattr(leaf, "__dict__") and not isinstance(leaf, (Tensor, nn.Module, type))]
    return [
        (name, value)
        for leaf in objects
        if not callable(leaf)
        for name, value in vars(leaf).items()
        if isinstance(value, (bool, int, float, str))
    ]


def address_of(tensor: Tensor) -> int:
    """Identity of a tensor's storage, which views share."""
    try:
        return tensor.untyped_storage()._cdata
    except NotImplementedError:  # sparse tensors and the like have no storage
        return id(tensor)


def bytes_of(tensor: Tensor) -> int:
    """Bytes of a tensor's storage."""
    try:
        return tensor.untyped_storage().nbytes()
    except NotImplementedError:  # as above
        return tensor.numel() * tensor.element_size()


def written_arguments(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Tensors that an operator changes in place."""
    if not func._schema.is_mutable:
        return
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
