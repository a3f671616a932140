"""Loading by a strategy whose ranks hold parts of the module: each rank reads the slices that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lnn_lightning.checkpoint import CheckpointError, load_metadata, tensor_names
from lnn_lightning.checkpoint.distributed import read_pieces
from lnn_lightning.checkpoint.pieces import Pieces, whole_tensor
from lnn_lightning.checkpoint.sources import load_safely
from lnn_lightning.checkpoint.states import MODULE_STATES, OURS, callback_part, with_versions
from lnn_lightning.optim.cuts import reduced_dims
from lnn_lightning.optim.masters import LEAF, masters_of, states_of
from lnn_lightning.parallel.data.shards import is_sharded, local_of, piece_of, sharded_like
from lnn_lightning.parallel.step.standin import is_stand_in
from lnn_lightning.parallel.tensor.axis import reduced_shape
from lnn_lightning.parallel.watch import while_doing
from lnn_lightning.strategies.intact import IntactHooks
from lnn_lightning.strategies.leaves import (
    has_load_hooks,
    own_part,
    plain_optimizer,
    room_like,
    state_like,
)
from lnn_lightning.strategies.positions import (
    begin_next_epoch,
    epoch_is_over,
    loader_states_for,
    put_loader_states,
    reads_first_batch,
    reopen_epoch,
    restore_random_state,
    saved_rank,
)


class ResumeHooks(IntactHooks):
    """Loading part of a strategy."""

    _random_state: Mapping[str, Any] | None = None

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

    # ---------------------------------------------------------------- the module

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        with while_doing("loading %s", checkpoint_path):
            path = self._intact(checkpoint_path)
            return self._folder(path) if path.is_dir() else self._one_file(path)

    def _folder(self, path: Path) -> dict[str, Any]:
        """A checkpoint of this package: its tensors are read here, those of the optimizers when they are there."""
        checkpoint = load_metadata(path)
        ours = checkpoint[OURS]
        names = tensor_names(path)
        for part in MODULE_STATES:
            if part == "state_dict" or any(name.startswith(f"{part}.") for name in names):
                checkpoint[part] = self._read_state(path, part, ours, names)
        for callback, name in ours.get("averages", []):
            checkpoint["callbacks"][callback][name] = self._read_state(path, callback_part(callback, name), ours, names)
        if "lr_schedulers" in checkpoint:  # not where weights alone were saved, of which Lightning tells the user
            groups = ours["optimizer_groups"]
            checkpoint["optimizer_states"] = [{"index": i, "path": str(path)} for i in range(len(groups))]
        self._find_position(checkpoint, ours)
        return checkpoint

    def _one_file(self, path: Path) -> dict[str, Any]:
        """A checkpoint of Lightning's own kind. It is mapped: what this rank does not take is not read."""
        checkpoint: dict[str, Any] = load_safely(path)
        if not isinstance(checkpoint, dict) or not {"state_dict", "pytorch-lightning_version"} <= checkpoint.keys():
            raise CheckpointError(
                f"{path} is no checkpoint of Lightning. A file of weights alone is given as `PTDPStrategy("
                "initial_weights=...)`."
            )
        for part in MODULE_STATES:
            if part in checkpoint:
                checkpoint[part] = self._own_parts(checkpoint[part])
        plugin = type(self.precision_plugin)  # ours is a subclass of Lightning's, under whose name its state is
        for kind in plugin.__mro__:
            if kind.__qualname__ in checkpoint:
                checkpoint[plugin.__qualname__] = checkpoint[kind.__qualname__]
        return checkpoint

    def _read_state(
        self, path: Path, part: str, ours: Mapping[str, Any], known: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    ) -> dict[str, Any]:
        """A state dict of the module: what lives here, stand-ins for the rest; what it does not know has no data."""
        assert self.lightning_module is not None
        residence, state = self.engine.residence, self.lightning_module.state_dict()
        names, tied, values = residence.name_of_key(), ours.get("tied", {}), ours["values"]
        in_place = part == "state_dict" and not self._hooks_see_the_state()
        read: dict[str, Any] = {key: now for key, now in state.items() if is_stand_in(now)}
        made: dict[str, Tensor] = {}
        wanted: dict[str, Pieces] = {}
        for key in residence.own_keys():
            first = tied.get(key, key)
            entry, now = f"{part}.{first}", state[key]
            if entry in values:
                read[key] = values[entry]
            elif entry in known and isinstance(now, Tensor):
                if first not in made:
                    # straight into the module, where neither an average nor a hook needs the values apart
                    direct = in_place and now.dtype == known[entry][1]
                    made[first] = now.detach() if direct else room_like(now, known[entry][1])
                    wanted[entry] = residence.pieces(names.get(key), made[first])
                read[key] = made[first]
        stored = {name.removeprefix(f"{part}.") for name in [*known, *values] if name.startswith(f"{part}.")}
        for key in stored - set(state):
            entry = f"{part}.{key}"
            if entry in values:
                read[key] = values[entry]
                continue
            shape, dtype = known[entry]
            if in_place:
                read[key] = torch.empty(shape, dtype=dtype, device="meta")
            else:  # a hook may know it: a layer that had another name, a value of the user's own
                read[key] = torch.empty(shape, dtype=dtype)
                wanted[entry] = whole_tensor(read[key])
        self._agree(lambda: read_pieces(path, wanted))
        return with_versions(read, ours.get("versions", getattr(state, "_metadata", {})))

    def _hooks_see_the_state(self) -> bool:
        """Whether the module may leave out of a checkpoint what it does not want (to keep a new head, say)."""
        module = self.lightning_module
        assert module is not None
        return (
            type(module).on_load_checkpoint is not pl.LightningModule.on_load_checkpoint
            or type(module).load_state_dict is not torch.nn.Module.load_state_dict
            or has_load_hooks(module)
        )

    def _own_parts(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A whole state dict as every copy of the divided module can load it: own pieces, stand-ins for the rest."""
        assert self.lightning_module is not None
        parts, names = with_versions(state, getattr(state, "_metadata", {})), self.engine.residence.name_of_key()
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
        self._agree(lambda: self._load_model(checkpoint["state_dict"], strict))

    def _load_model(self, state: Mapping[str, Any], strict: bool) -> None:
        module = self.lightning_module
        assert module is not None
        own, now = set(self.engine.residence.own_keys()), module.state_dict()
        names = self.engine.residence.name_of_key()
        given = {key: self._own_part_of(names.get(key), value, now[key]) for key, value in state.items() if key in own}
        result = module.load_state_dict(with_versions(given, getattr(state, "_metadata", {})), strict=False)
        missing = [key for key in result.missing_keys if key in own]
        unexpected = [key for key in state if key not in now]
        if strict and (missing or unexpected):
            raise CheckpointError(
                f"The checkpoint does not fit {type(module).__name__}: missing {missing}, unexpected {unexpected}. Set "
                "`strict_loading = False` in the module to load what fits."
            )
        if unexpected and has_load_hooks(module):
            rank_zero_warn(
                f"{unexpected} of the checkpoint are not loaded: hooks of `register_load_state_dict_pre_hook` cannot "
                "rename them, as they see what a rank holds. Rename them in `on_load_checkpoint`."
            )

    def _own_part_of(self, name: str | None, value: Any, now: Any) -> Any:
        """What a hook made of a checkpoint: whole where it had another name there, or this rank's part already."""
        if not isinstance(value, Tensor) or not isinstance(now, Tensor) or is_sharded(value):
            return value
        if value.shape != local_of(now).shape and tuple(value.shape) == self.engine.residence.whole_shape(name, now):
            value = self.engine.residence.local(name, value)
        return sharded_like(piece_of(value, now), now) if is_sharded(now) and value.shape == now.shape else value

    # ---------------------------------------------------------------- the optimizers

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = checkpoint["optimizer_states"]
        ours = checkpoint.get(OURS)
        if ours is not None:
            self.engine.seed = ours["seed"]
            self.engine.steps_done = list(ours["steps_done"])
        if states and len(states) != len(self.optimizers):
            raise CheckpointError(
                f"The checkpoint has states of {len(states)} optimizers, {type(self.lightning_module).__name__} "
                f"has {len(self.optimizers)}."
            )
        for index, (optimizer, state) in enumerate(zip(self.optimizers, states, strict=False)):  # none: not trained yet
            if ours is not None:
                groups = ours["optimizer_groups"][index]
                self._add_groups(plain_optimizer(optimizer), groups)
                by_name = self._read_optimizer(Path(state["path"]), index, ours["values"])
            else:
                by_name, groups = self._by_name(index, state)
            self._put_optimizer_state(plain_optimizer(optimizer), by_name, groups)
        self._restore_random_state(between_epochs=True)

    def _read_optimizer(self, path: Path, index: int, values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """State of the parameters that this rank updates, as the optimizer holds them."""
        assert self.lightning_module is not None
        residence, prefix = self.engine.residence, f"optimizer.{index}."
        names, parameters = residence.names_by_id(), dict(self.lightning_module.named_parameters())
        optimizer = plain_optimizer(self.optimizers[index])
        held: dict[str, dict[str, Any]] = {
            names[id(p)]: {} for group in optimizer.param_groups for p in group["params"]
        }
        held |= {names[id(p)]: values for p, values in states_of(optimizer)}
        known = tensor_names(path)
        state: dict[str, dict[str, Any]] = {}
        wanted: dict[str, Pieces] = {}
        for entry in [*known, *values]:
            name, _, leaf = entry.removeprefix(prefix).rpartition(".")
            if not entry.startswith(prefix) or name not in held:
                continue
            if entry in values:
                state.setdefault(name, {})[leaf] = values[entry]
                continue
            shape, dtype = known[entry]
            parameter = parameters[name]
            reduced = reduced_dims(optimizer, leaf, parameter.ndim)
            if shape == reduced_shape(residence.whole_shape(name, parameter), reduced):
                value = state_like(parameter, dtype, held[name].get(leaf), reduced)
                wanted[entry] = residence.pieces(name, value, reduced)
            else:
                value = torch.empty(shape, dtype=dtype)
                wanted[entry] = residence.pieces(None, value)
            state.setdefault(name, {})[leaf] = local_of(value)
        read_pieces(path, wanted)
        return state

    def _by_name(self, index: int, state: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """An optimizer state as plain torch numbers it (parameters in the order of the groups), own parts of it."""
        assert self.lightning_module is not None
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        names = [name for group in self._group_names[index] for name in group]
        of = dict(zip(numbers, names, strict=True))
        parameters, residence = dict(self.lightning_module.named_parameters()), self.engine.residence
        optimizer = plain_optimizer(self.optimizers[index])
        by_name: dict[str, Any] = {}
        for number, leaves in state["state"].items():
            name = of[number]
            for leaf, value in leaves.items():
                reduced = reduced_dims(optimizer, leaf, parameters[name].ndim)
                part = residence.local(name, value, reduced) if isinstance(value, Tensor) else value
                by_name.setdefault(name, {})[leaf] = own_part(part, parameters[name], reduced)
        return by_name, state["param_groups"]

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
        names = self.engine.residence.names_by_id()
        self._put_masters(optimizer, names, by_name)
        local = optimizer.state_dict()
        numbered = {
            number: by_name[names[id(parameter)]]
            for group, numbers in zip(optimizer.param_groups, local["param_groups"], strict=True)
            for parameter, number in zip(group["params"], numbers["params"], strict=True)
            if by_name.get(names[id(parameter)])
        }
        merged = [
            {**saved, "params": mine["params"]} for saved, mine in zip(groups, local["param_groups"], strict=True)
        ]
        optimizer.load_state_dict({"state": numbered, "param_groups": merged})

    def _put_masters(self, optimizer: Optimizer, names: Mapping[int, str], by_name: Mapping[str, Any]) -> None:
        """Master weights of a checkpoint go to those of the run."""
        masters = masters_of(optimizer)
        if masters is not None:
            if missing := masters.load(names, by_name):
                rank_zero_warn(
                    f"The checkpoint has no master weights of {len(missing)} parameter(s), the first {missing[0]!r}: "
                    "they start from the parameters, which are rounded."
                )
        elif any([leaves.pop(LEAF, None) is not None for leaves in by_name.values()]):
            rank_zero_warn(
                "The checkpoint has fp32 master weights, which this run does not keep: it goes on from the parameters, "
                "which are rounded. Use `MeshHalfPrecision(..., master_weights=True)` to go on exactly."
            )

    # ---------------------------------------------------------------- where it goes on

    def _find_position(self, checkpoint: dict[str, Any], ours: Mapping[str, Any]) -> None:
        """This rank's generators and dataloaders continue as those with the same data did."""
        ranks, saved = ours.get("ranks"), ours["layout"]
        self._random_state = None
        if not ranks or "loops" not in checkpoint:
            return
        if ours.get("epoch_cut_short", False):
            reopen_epoch(checkpoint)
        same = list(self.mesh.layout.shape) == list(saved)
        rank = self.global_rank if same else saved_rank(saved, self.data_parallel_rank)
        self._random_state = ranks[rank]["random"]
        if not epoch_is_over(checkpoint):
            loaders = loader_states_for(ranks, saved, self.data_parallel_rank, self.data_parallel_size)
            put_loader_states(checkpoint, loaders)

    def _restore_random_state(self, between_epochs: bool) -> None:
        """Puts the generators back where a run that was not interrupted would have them.

        Args:
            between_epochs: before the dataloader's iterator is made, which draws from them: right between two epochs;
                in an epoch it was made long ago, and they are put back behind it.
        """
        assert self.lightning_module is not None
        loop = self.lightning_module.trainer.fit_loop
        if self._random_state is not None and (not between_epochs or reads_first_batch(loop)):
            restore_random_state(self._random_state)
            self._random_state = None

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._restore_random_state(between_epochs=False)
        assert self.lightning_module is not None
        begin_next_epoch(self.lightning_module.trainer.fit_loop)
