"""Saving and loading of a strategy whose ranks hold parts of the module."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lnn_lightning.checkpoint import (
    is_distributed_checkpoint,
    load_metadata,
    load_tensors,
    save_checkpoint,
    tensor_names,
)
from lnn_lightning.checkpoint.distributed import CheckpointError
from lnn_lightning.checkpoint.shared_folder import check_seen, check_shared
from lnn_lightning.parallel.data.shards import is_sharded, piece_of, sharded_like, whole_of
from lnn_lightning.parallel.layout import TENSOR
from lnn_lightning.parallel.step.standin import is_stand_in
from lnn_lightning.strategies.mesh import MeshStrategy

_OURS = "lnn_lightning"
_MODULE_STATES = ("state_dict", "current_model_state")
"""State dicts of the module in a checkpoint; the second is what `WeightAveraging` calls the one that is trained."""


class CheckpointHooks(MeshStrategy):
    """Checkpoint part of a strategy: folders with the user's names, optimizer state by parameter name."""

    if TYPE_CHECKING:
        from lnn_lightning.parallel.pipeline.engine import PipelineEngine

        _group_names: list[list[list[str]]]

        @property
        def engine(self) -> PipelineEngine:  # noqa: D102 - the strategy has it
            ...

        def _keep_own_parameters(self) -> None: ...

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        state, residence = self.lightning_module.state_dict(), self.engine.residence
        names = residence.name_of_key()
        return self._stored((key, names.get(key), state[key]) for key in residence.own_keys())

    def _stored(self, entries: Iterable[tuple[str, str | None, Any]]) -> dict[str, Any]:
        """Tensors of the module (key, name, value), or optimizer state of their shape, as checkpoints have them.

        What tensor ranks divide is put together, one tensor at a time, and kept by one of them, in turns: none has all.
        Collective over data and tensor ranks.
        """
        residence, stored = self.engine.residence, {}
        for key, name, value in entries:
            if not isinstance(value, Tensor) or is_stand_in(value) or not residence.is_divided(name or ""):
                stored[key] = value
                continue
            whole = value
            if tuple(value.shape) != residence.whole_shape(name, value):
                device = self.root_device if value.device.type == "cpu" else None
                whole = residence.whole(name, whole_of(value, device))
            if zlib.crc32((name or "").encode()) % self.mesh.size(TENSOR) == self.mesh.rank(TENSOR):
                stored[key] = whole.cpu()
        return stored

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """State by parameter name, and the groups with the names of all their parameters."""
        assert self.lightning_module is not None
        plain = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        names = self.engine.residence.names_by_id()
        parameters = dict(self.lightning_module.named_parameters())
        index = [_plain(each) for each in self.optimizers].index(plain)
        groups = [
            {**{k: v for k, v in group.items() if k != "params"}, "params": own}
            for group, own in zip(plain.param_groups, self._group_names[index], strict=True)
        ]
        state = {
            names[id(p)]: self._stored(
                (leaf, names[id(p)], _whole_leaf(value, p, parameters[names[id(p)]])) for leaf, value in values.items()
            )
            for p, values in plain.state.items()
        }
        return {"state": state, "param_groups": groups}

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise TypeError("`Trainer.save_checkpoint(..., storage_options=...)` is not supported by this strategy.")
        path = self.broadcast(str(filepath))
        check_shared(Path(path).parent)
        tensors: dict[str, Tensor] = {}
        values: dict[str, Any] = {}
        names = self.engine.residence.name_of_key()
        for part in _MODULE_STATES:
            state = checkpoint.pop(part, {})
            for key, value in self._stored((key, names.get(key), value) for key, value in state.items()).items():
                if not is_stand_in(value):
                    _sort_in(f"{part}.{key}", value, tensors, values)
        groups = []
        for index, optimizer in enumerate(checkpoint.pop("optimizer_states", [])):
            groups.append(optimizer["param_groups"])
            for name, state in optimizer["state"].items():
                for leaf, value in state.items():
                    _sort_in(f"optimizer.{index}.{name}.{leaf}", value, tensors, values)
        everyones: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyones, values)
        engine = self.engine
        checkpoint[_OURS] = {
            "format": 1,
            "layout": list(self.mesh.layout.shape),
            "optimizer_groups": groups,
            "values": {key: value for part in everyones for key, value in part.items()},
            "seed": engine.seed,
            "steps_done": list(engine.steps_done),
        }
        save_checkpoint(path, tensors, checkpoint)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(self.broadcast(str(checkpoint_path)))
        check_seen(path)
        if not path.exists():
            raise FileNotFoundError(f"There is no checkpoint at {path} (rank {self.global_rank}).")
        if not is_distributed_checkpoint(path):
            if path.is_dir():
                raise CheckpointError(f"The folder {path} was not written by this strategy.")
            checkpoint = super().load_checkpoint(path, weights_only=True)
            for part in _MODULE_STATES:
                if part in checkpoint:
                    checkpoint[part] = self._own_parts(checkpoint[part])
            return checkpoint
        checkpoint = load_metadata(path)
        ours = checkpoint[_OURS]
        names = tensor_names(path)
        for part in _MODULE_STATES:
            if part == "state_dict" or any(name.startswith(f"{part}.") for name in names):
                checkpoint[part] = self._own_parts(self._read_state(path, part, ours["values"]))
        checkpoint["optimizer_states"] = [{"index": i, "path": str(path)} for i in range(len(ours["optimizer_groups"]))]
        return checkpoint

    def _read_state(self, path: Path, part: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """What lives here of a state dict of the module."""
        keys = self.engine.residence.own_keys()
        loaded = load_tensors(path, [f"{part}.{key}" for key in keys if f"{part}.{key}" not in values])
        state: dict[str, Any] = {name.removeprefix(f"{part}."): tensor for name, tensor in loaded.items()}
        return state | {key: values[f"{part}.{key}"] for key in keys if f"{part}.{key}" in values}

    def _own_parts(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state dict that every copy of the divided module can load: own pieces, and stand-ins for the rest."""
        assert self.lightning_module is not None
        parts, names = dict(state), self.engine.residence.name_of_key()
        for key, now in self.lightning_module.state_dict().items():
            if is_stand_in(now):
                parts[key] = now
            elif isinstance(now, Tensor) and key in parts:
                part = self.engine.residence.local(names.get(key), parts[key])
                parts[key] = sharded_like(piece_of(part, now), now) if is_sharded(now) else part
        return parts

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        own = set(self.engine.residence.own_keys())
        given = {key: value for key, value in checkpoint["state_dict"].items() if key in own}
        result = self.lightning_module.load_state_dict(given, strict=False)
        missing = [key for key in result.missing_keys if key in own]
        known = set(self.lightning_module.state_dict())
        unexpected = [key for key in checkpoint["state_dict"] if key not in known]
        if strict and (missing or unexpected):
            raise RuntimeError(
                f"The checkpoint does not fit {type(self.lightning_module).__name__} (rank {self.global_rank}): "
                f"missing {missing}, unexpected {unexpected}. Set `strict_loading = False` in the module to load "
                f"what fits."
            )

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = checkpoint["optimizer_states"]
        ours = checkpoint.get(_OURS)
        if ours is not None:
            self.engine.seed = ours["seed"]
            self.engine.steps_done = list(ours["steps_done"])
        for index, (optimizer, state) in enumerate(zip(self.optimizers, states, strict=True)):
            if ours is not None:
                groups = ours["optimizer_groups"][index]
                self._add_groups(_plain(optimizer), groups)
                by_name = self._read_optimizer(Path(state["path"]), index, ours["values"])
            else:
                by_name, groups = self._by_name(index, state)
            self._put_optimizer_state(_plain(optimizer), by_name, groups)

    def _read_optimizer(self, path: Path, index: int, values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """State of the parameters that this rank updates."""
        prefix = f"optimizer.{index}."
        names = self.engine.residence.names_by_id()
        own = {names[id(p)] for group in _plain(self.optimizers[index]).param_groups for p in group["params"]}
        entries = [key for key in [*tensor_names(path), *values] if key.startswith(prefix)]
        wanted = {key: key.removeprefix(prefix).rsplit(".", 1) for key in entries}
        wanted = {key: parts for key, parts in wanted.items() if parts[0] in own}
        loaded: dict[str, Any] = dict(load_tensors(path, [key for key in wanted if key not in values]))
        state: dict[str, dict[str, Any]] = {}
        for key, (name, leaf) in wanted.items():
            state.setdefault(name, {})[leaf] = loaded[key] if key in loaded else values[key]
        return state

    def _by_name(self, index: int, state: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """An optimizer state as plain torch numbers it: parameters in the order of the groups."""
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        names = [name for group in self._group_names[index] for name in group]
        of = dict(zip(numbers, names, strict=True))
        return {of[number]: values for number, values in state["state"].items()}, state["param_groups"]

    def _add_groups(self, optimizer: Optimizer, groups: list[Any]) -> None:
        """Groups that a callback had added when the checkpoint was saved (unfrozen layers): their parameters learn."""
        assert self.lightning_module is not None
        parameters = dict(self.lightning_module.named_parameters())
        for group in groups[len(optimizer.param_groups) :]:
            for name in group["params"]:
                parameters[name].requires_grad_(True)
            optimizer.add_param_group({**group, "params": [parameters[name] for name in group["params"]]})
        self._keep_own_parameters()

    def _put_optimizer_state(self, optimizer: Optimizer, by_name: Mapping[str, Any], groups: list[Any]) -> None:
        assert self.lightning_module is not None
        names = self.engine.residence.names_by_id()
        parameters = dict(self.lightning_module.named_parameters())
        local = optimizer.state_dict()
        numbered = {}
        for group, numbers in zip(optimizer.param_groups, local["param_groups"], strict=True):
            for parameter, number in zip(group["params"], numbers["params"], strict=True):
                if (name := names[id(parameter)]) in by_name:
                    numbered[number] = {
                        leaf: _own_part(self._divided(name, value), parameters[name])
                        for leaf, value in by_name[name].items()
                    }
        merged = [
            {**saved, "params": mine["params"]} for saved, mine in zip(groups, local["param_groups"], strict=True)
        ]
        optimizer.load_state_dict({"state": numbered, "param_groups": merged})

    def _divided(self, name: str, value: Any) -> Any:
        return self.engine.residence.local(name, value) if isinstance(value, Tensor) else value


def _plain(optimizer: Any) -> Optimizer:
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def _whole_leaf(value: Any, held: Tensor, parameter: Tensor) -> Any:
    """A leaf of optimizer state as the module has the parameter: of a piece's state, a sharded tensor."""
    if is_sharded(parameter) and isinstance(value, Tensor) and value.shape == held.shape:
        return sharded_like(value, parameter)
    return value


def _own_part(value: Any, parameter: Tensor) -> Any:
    """This rank's part of a whole leaf of optimizer state."""
    if is_sharded(parameter) and isinstance(value, Tensor) and value.shape == parameter.shape:
        return piece_of(value, parameter)
    return value


def _sort_in(key: str, value: Any, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    if isinstance(value, Tensor):
        tensors[key] = value
    else:
        values[key] = value
