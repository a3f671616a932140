"""What differs from rank to rank besides tensors: random number generators, and how far dataloaders have read."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lnn_lightning.checkpoint.states import same_values

_LOADERS = "combined_loader"


def random_state() -> dict[str, Any]:
    """State of this process's generators, as plain values and tensors."""
    version, numbers, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": (version, torch.tensor(numbers, dtype=torch.int64), gauss),
        "numpy": (str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Puts the generators back to a state of :func:`random_state`."""
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def take_loader_states(checkpoint: Mapping[str, Any]) -> list[Any]:
    """Takes out of a checkpoint how far this rank's training dataloaders have read (none: they cannot say)."""
    return checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {}).pop(_LOADERS, [])


def put_loader_states(checkpoint: Mapping[str, Any], states: Sequence[Any]) -> None:
    """Puts back what :func:`take_loader_states` took."""
    if states:
        checkpoint["loops"]["fit_loop"]["state_dict"][_LOADERS] = list(states)


def epoch_is_over(checkpoint: Mapping[str, Any]) -> bool:
    """Whether a checkpoint was saved between two epochs: the next one begins with its dataloader's first batch."""
    epochs = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]
    return bool(epochs["processed"] == epochs["started"])


def is_cut_short(trainer: Any) -> bool:
    """Whether the run ends before its epoch does: by ``max_steps``, a time limit or a callback."""
    loop = trainer.fit_loop.epoch_loop
    stops = trainer.should_stop or 0 <= loop.max_steps <= loop.global_step
    return bool(stops and not loop._num_ready_batches_reached())


def reopen_epoch(checkpoint: Mapping[str, Any]) -> None:
    """Lets an epoch that was cut short go on: Lightning has booked it as done, and would leave out the rest of it."""
    for epochs in checkpoint["loops"]["fit_loop"]["epoch_progress"].values():
        if epochs["processed"] == epochs["started"] > 0:
            epochs["processed"] -= 1
            epochs["completed"] = epochs["processed"]


def first_epoch(loop: Any) -> int:
    """The epoch to which the batches belong that the ``fit_loop`` will read first."""
    return int(loop.epoch_progress.current.processed) + _is_behind_last_batch(loop)


def reads_first_batch(loop: Any) -> bool:
    """Whether a ``fit_loop`` that is resumed begins an epoch with the first iterator that it makes."""
    epochs = loop.epoch_progress.current
    return bool(epochs.processed == epochs.started) or _is_behind_last_batch(loop)


def _is_behind_last_batch(loop: Any) -> bool:
    """Saved in ``on_train_batch_end`` of an epoch's last batch: Lightning will book the epoch as done, and go on."""
    batches, epochs = loop.epoch_loop.batch_progress, loop.epoch_progress.current
    saved_there = batches.current.completed < batches.current.processed and epochs.processed < epochs.started
    return bool(loop.restarting and batches.is_last_batch and saved_there)


def begin_next_epoch(loop: Any) -> None:
    """Lets a resumed ``fit_loop`` begin an epoch where it takes the one that is over for one that goes on.

    Lightning 2.6 books an epoch as done when it is resumed behind its last batch, but does not count the next one, nor
    call ``on_train_epoch_start`` for it: it is one behind from then on. And resumed at the end of an epoch with
    ``max_steps`` given, it would train one more batch of the old epoch first.
    """
    epochs = loop.epoch_progress.current
    if loop.restarted_mid_epoch and epochs.processed == epochs.started:
        loop.reset_restart_stage()
    elif loop.restarting and epochs.processed == epochs.started == epochs.ready > 0:
        if loop.restarted_on_epoch_end:
            loop.epoch_progress.increment_completed()
        loop._restarting = False
        loop.epoch_loop.restarting = False
        loop.reset_restart_stage()


def saved_rank(saved: Sequence[int], data_rank: int) -> int:
    """The first rank of a layout (pipeline, data, tensor) with a data rank; rank 0 if it has fewer."""
    return data_rank * saved[2] if data_rank < saved[1] else 0


def loader_states_for(
    ranks: Sequence[Mapping[str, Any]], saved: Sequence[int], data_rank: int, data_size: int
) -> list[Any]:
    """What this rank's dataloaders continue from.

    Args:
        ranks: by rank of the run that saved.
        saved: its layout: sizes of pipeline, data and tensor axis.
        data_rank: this rank's place along the data axis.
        data_size: size of the data axis now.

    Returns:
        States; none if each data rank had read other samples and there is another number of them now.
    """
    states = [ranks[saved_rank(saved, each)]["loaders"] for each in range(saved[1])]
    if saved[1] == data_size:
        return list(states[data_rank])
    if all(same_values(state, states[0]) for state in states[1:]):
        return list(states[0])
    rank_zero_warn(
        f"The checkpoint knows how far the dataloaders of {saved[1]} data ranks had read, and there are {data_size} "
        "now: the epoch's data starts anew. Resume with the same `data_parallel_size` to go on where it ended."
    )
    return []
