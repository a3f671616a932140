"""Saving of a strategy whose ranks hold parts of the module: each rank writes the slices that it has."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lnn_lightning.checkpoint import CheckpointError, save_checkpoint
from lnn_lightning.checkpoint.background import BackgroundWriter
from lnn_lightning.checkpoint.distributed import packed, together
from lnn_lightning.checkpoint.folder import remove
from lnn_lightning.checkpoint.pieces import Pieces
from lnn_lightning.checkpoint.states import MODULE_STATES, OURS, callback_part
from lnn_lightning.optim.cuts import reduced_dims
from lnn_lightning.optim.masters import states_of
from lnn_lightning.parallel.data.shards import local_of
from lnn_lightning.parallel.shared_folder import check_shared
from lnn_lightning.parallel.step.standin import is_stand_in
from lnn_lightning.parallel.watch import while_doing
from lnn_lightning.strategies.leaves import plain_optimizer, sharded_leaf
from lnn_lightning.strategies.positions import is_cut_short, random_state, take_loader_states
from lnn_lightning.strategies.resuming import ResumeHooks

FORMAT = 2
log = logging.getLogger(__name__)
_ALL_FAIL_WITHIN = timedelta(seconds=10)
_GIVE_UP = 60.0
"""Seconds that a run which ends by an error waits for a checkpoint that is being written."""


class CheckpointHooks(ResumeHooks):
    """Checkpoint part of a strategy: folders with the user's names, optimizer state by parameter name."""

    _async_save = False
    _writer: BackgroundWriter | None = None
    _checkpoint_group: dist.ProcessGroup | None = None
    _group_of: dist.ProcessGroup | None = None
    _will_wait = False

    @property
    def saves_in_background(self) -> bool:
        """Whether training goes on while a checkpoint is written."""
        return self._async_save or isinstance(self.checkpoint_io, AsyncCheckpointIO)

    def prepare_checkpoints(self) -> None:
        """Makes ready for saving by all ranks together. Collective.

        Raises:
            CheckpointError: there is a plugin that would never be asked.
        """
        if self._checkpoint_group is None or self._group_of is not dist.group.WORLD:
            self._checkpoint_group = dist.new_group(backend="gloo", timeout=self._timeout)
            self._group_of = dist.group.WORLD
        given = self.checkpoint_io
        inner = given.checkpoint_io if isinstance(given, AsyncCheckpointIO) else given
        if inner is not None and type(inner) is not TorchCheckpointIO:
            raise CheckpointError(
                f"{type(inner).__name__} would never be asked: {type(self).__name__} writes checkpoints by all ranks "
                "together. Leave the plugin out (`AsyncCheckpointIO()` alone is understood: it saves in background)."
            )

    def refuse_hyperparameters(self, trainer: pl.Trainer) -> None:
        """Tells at the start, not at the first save, what no checkpoint could bring back.

        Raises:
            CheckpointError: names the hyper-parameter.
        """
        if not trainer.checkpoint_callbacks:
            return
        for owner in (self.lightning_module, trainer.datamodule):  # type: ignore[attr-defined]
            for name, value in dict(getattr(owner, "hparams", {})).items():
                try:
                    packed({name: value})
                except Exception as error:
                    raise CheckpointError(
                        f"The hyper-parameter {name!r} of {type(owner).__name__} is a {type(value).__name__}, which no "
                        f"checkpoint brings back without running code. Leave it out: "
                        f"`self.save_hyperparameters(ignore=[{name!r}])`, or save what it is made from (numbers, "
                        "strings, lists, dicts, tensors, paths)."
                    ) from error

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """What this rank holds of the module, by the user's names: parts of divided tensors, pieces of sharded ones."""
        assert self.lightning_module is not None
        state = self.lightning_module.state_dict()
        return {key: state[key] for key in self.engine.residence.own_keys()}

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """State by parameter name, and the groups with the names of all their parameters."""
        assert self.lightning_module is not None
        plain = plain_optimizer(optimizer)
        names = self.engine.residence.names_by_id()
        parameters = dict(self.lightning_module.named_parameters())
        index = [plain_optimizer(each) for each in self.optimizers].index(plain)
        groups = [
            {**{k: v for k, v in group.items() if k != "params"}, "params": own}
            for group, own in zip(plain.param_groups, self._group_names[index], strict=True)
        ]
        state = {
            names[id(p)]: {
                leaf: sharded_leaf(value, p, parameters[names[id(p)]], reduced_dims(plain, leaf, p.ndim))
                for leaf, value in values.items()
            }
            for p, values in states_of(plain)
        }
        return {"state": state, "param_groups": groups}

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise TypeError("`Trainer.save_checkpoint(..., storage_options=...)` is not supported by this strategy.")
        if sys.exc_info()[0] is not None and not self._all_are_here(filepath):
            return
        with while_doing("saving %s", filepath):
            self._save(checkpoint, filepath)

    def _save(self, checkpoint: dict[str, Any], filepath: Any) -> None:
        path = Path(self.broadcast(str(filepath)))
        self.finish_saving()
        check_shared(path.parent, self._checkpoint_group)
        averages = self._take_averages(checkpoint)
        tensors, values, tied = self._entries(
            checkpoint, [(callback_part(callback, name), state) for callback, name, state in averages]
        )
        groups = [optimizer["param_groups"] for optimizer in checkpoint.pop("optimizer_states", [])]
        mine = {"values": values, "random": random_state(), "loaders": take_loader_states(checkpoint)}
        ranks: list[Any] = [None] * self.world_size
        dist.all_gather_object(ranks, mine, group=self._checkpoint_group)
        assert self.lightning_module is not None
        engine = self.engine
        checkpoint[OURS] = {
            "format": FORMAT,
            "layout": list(self.mesh.layout.shape),
            "optimizer_groups": groups,
            "values": {key: value for rank in reversed(ranks) for key, value in rank.pop("values").items()},
            "tied": tied,
            "averages": [[callback, name] for callback, name, _ in averages],
            "versions": self._versions(),
            "seed": engine.seed,
            "steps_done": list(engine.steps_done),
            "epoch_cut_short": is_cut_short(self.lightning_module.trainer),
            "ranks": ranks,
        }
        if not (self.saves_in_background and self._will_wait):
            save_checkpoint(path, tensors, checkpoint, self._checkpoint_group)
            return
        self._writer = self._writer or BackgroundWriter()
        rest: list[bytes] = []
        together(lambda: rest.append(packed(checkpoint)), path, self._checkpoint_group)
        copies = self._writer.snapshot(tensors)
        self._writer.start(partial(save_checkpoint, path, copies, rest[0], self._checkpoint_group))

    def _all_are_here(self, path: Any) -> bool:
        """Whether all ranks save because of an exception, or this one alone has one and saving would never end."""
        try:
            dist.monitored_barrier(self._checkpoint_group, _ALL_FAIL_WITHIN)
        except RuntimeError:
            log.warning("%s is not saved on the exception: it takes all ranks, and not all have one.", path)
            return False
        return True

    def _versions(self) -> dict[str, Any]:
        """Versions of the modules, which torch keeps beside a state dict."""
        assert self.lightning_module is not None
        metadata = getattr(self.lightning_module.state_dict(), "_metadata", {})
        return {name: dict(of_module) for name, of_module in metadata.items()}

    def _names_by_memory(self) -> dict[int, str]:
        """First names of the tensors here by where their data begin, for those that a hook stores under another key."""
        assert self.lightning_module is not None
        names, state = self.engine.residence.name_of_key(), self.lightning_module.state_dict()
        here = {key: state[key] for key in names if isinstance(state.get(key), Tensor) and not is_stand_in(state[key])}
        return {local_of(value).data_ptr(): names[key] for key, value in here.items() if local_of(value).numel()}

    def _take_averages(self, checkpoint: dict[str, Any]) -> list[tuple[str, str, Mapping[str, Any]]]:
        """State dicts of the module in callbacks' states (`StochasticWeightAveraging`): which callback, where, what."""
        assert self.lightning_module is not None
        keys, found = set(self.lightning_module.state_dict()), []
        states = checkpoint.get("callbacks", {})
        for callback, state in list(states.items()):
            for name, value in state.items() if isinstance(state, dict) else []:
                if isinstance(value, Mapping) and value and set(value) == keys:
                    found.append((callback, name, value))
                    states[callback] = {**states[callback], name: None}
        return found

    def _entries(
        self, checkpoint: dict[str, Any], averages: Iterable[tuple[str, Mapping[str, Any]]]
    ) -> tuple[dict[str, Pieces], dict[str, Any], dict[str, str]]:
        """Slices and other values that this rank writes, and the other names of tensors that have several."""
        residence = self.engine.residence
        tensors: dict[str, Pieces] = {}
        values: dict[str, Any] = {}
        keys: dict[str, str] = {}
        names, moved = residence.name_of_key(), self._names_by_memory()
        tied = {key: first for key, name in names.items() if (first := keys.setdefault(name, key)) != key}
        for part, state in [*((part, checkpoint.pop(part, {})) for part in MODULE_STATES), *averages]:
            for key, value in state.items():
                aliased = tied.get(key) in state
                name = names.get(key)
                if name is None and isinstance(value, Tensor) and not is_stand_in(value):
                    name = moved.get(local_of(value).data_ptr())
                if not is_stand_in(value) and not aliased and residence.writes(name):
                    self._sort_in(f"{part}.{key}", name, value, tensors, values)
        for index, optimizer in enumerate(checkpoint.get("optimizer_states", [])):
            plain = plain_optimizer(self.optimizers[index])
            for name, leaves in optimizer["state"].items():
                for leaf, value in leaves.items():
                    reduced = reduced_dims(plain, leaf, value.ndim) if isinstance(value, Tensor) else ()
                    self._sort_in(f"optimizer.{index}.{name}.{leaf}", name, value, tensors, values, reduced)
        return tensors, values, tied

    def _sort_in(
        self,
        entry: str,
        name: str | None,
        value: Any,
        tensors: dict[str, Pieces],
        values: dict[str, Any],
        reduced: Sequence[int] = (),
    ) -> None:
        """Numbers go where all that is no tensor goes: thousands of step counters are no thousands of records."""
        if isinstance(value, Tensor) and value.ndim > 0:
            tensors[entry] = self.engine.residence.pieces(name, value, reduced)
        else:
            values[entry] = value.detach().cpu().clone() if isinstance(value, Tensor) else value

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        if not self.is_global_zero:
            return
        act = partial(_remove_if_there, Path(filepath))
        if self._writer is not None:
            self._writer.afterwards(act)  # what stands in for it may not be complete yet
        else:
            act()

    @override
    def finish_saving(self, timeout: float | None = None) -> None:
        if self._writer is not None:
            self._writer.wait(timeout)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._will_wait = True

    @override
    def on_train_end(self) -> None:
        self._will_wait = False  # what is saved from now on, also when `fit` is over, is complete at once
        self.finish_saving()

    @override
    def teardown(self) -> None:
        self._will_wait = False
        failing = sys.exc_info()[0] is not None
        try:
            self.finish_saving(_GIVE_UP if failing else None)
        except Exception:
            if not failing:  # else that error is what the user needs to know
                raise
        finally:
            super().teardown()


def _remove_if_there(path: Path) -> None:
    if path.exists() or path.is_symlink():
        remove(path)
