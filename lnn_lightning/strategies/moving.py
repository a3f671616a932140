"""Parameters, gradients and activations of an engine, put where the offload settings say."""

from __future__ import annotations

import torch

from lnn_lightning.memory.offload.activations import ActivationKeeper
from lnn_lightning.memory.offload.gradients import GradientPages
from lnn_lightning.memory.offload.pages import PageFile, give_back, trim
from lnn_lightning.memory.offload.parameters import ParameterPages
from lnn_lightning.memory.offload.settings import Offload
from lnn_lightning.memory.offload.store import FileStore, check_bandwidth, open_store
from lnn_lightning.optim.clipping import LookedAt
from lnn_lightning.parallel.data.shards import is_sharded
from lnn_lightning.parallel.errors import LayoutError
from lnn_lightning.parallel.pipeline.engine import PipelineEngine


def refuse_parts(settings: Offload, device: str, data_size: int, zero_stage: int) -> None:
    """What cannot be offloaded under a layout.

    Args:
        settings: what to offload, and where to.
        device: type of the device that computes.
        data_size: number of data ranks.
        zero_stage: what they share out.

    Raises:
        LayoutError: with the reason and the way out.
    """
    for part in ("parameters", "gradients"):
        if device != "cpu" and settings.has(part):
            raise LayoutError(
                f"Offloading {part} works where the CPU computes; on {device} they stay where they are used. Leave "
                f"{part!r} out of `Offload(what=...)`, and share them out over ranks (`zero_stage=3`, "
                "`tensor_parallel_size`, `pipeline_parallel_size`) instead."
            )
    if settings.has("gradients") and settings.in_file and data_size > 1 and zero_stage < 2:
        raise LayoutError(
            f"Offloading gradients saves nothing with `zero_stage={zero_stage}`: data ranks average them in buckets "
            "that hold a copy of all. Set `zero_stage=2` or 3, or leave 'gradients' out of `Offload(what=...)`."
        )


def check_disk(settings: Offload) -> None:
    """Measures the disk, where a least speed is asked for and the optimizer's state does not go there, too.

    Raises:
        OffloadError: it is slower, or the folder does not take anything.
    """
    if settings.minimum_bandwidth is None or settings.has("optimizer"):
        return
    store = open_store(settings, pin=False)
    try:
        check_bandwidth(store, settings.minimum_bandwidth)
    finally:
        store.close()


def activation_keeper(settings: Offload, device: torch.device) -> ActivationKeeper | None:
    """Takes what forwards save; None where it is in its place already: in host memory, with ``target="cpu"``.

    Raises:
        OffloadError: the folder does not take it.
    """
    if device.type == "cpu" and not settings.in_file:
        return None
    pin = device.type == "cuda" and settings.pin_memory is not False
    store = FileStore(settings.target, settings.threads, pin) if settings.in_file else None
    return ActivationKeeper(store, pin)


def keep_parameters(engine: PipelineEngine, settings: Offload) -> ParameterPages:
    """Moves the parameters of this rank to a file; tensors that are small stay.

    Raises:
        OffloadError: the folder does not take them.
    """
    pages = ParameterPages(PageFile(settings.target), settings.prefetch)
    for name, parameter in engine.root.named_parameters():
        if engine.residence.lives_here(name) and not is_sharded(parameter):
            parameter.data = pages.take(name, parameter.data)
    if engine.sharding is not None:
        engine.sharding.relocate(pages.take)
    trim()
    return pages


def keep_gradients(engine: PipelineEngine, settings: Offload) -> GradientPages:
    """Gradients of this rank will be moved to a file.

    Raises:
        OffloadError: the folder cannot be written to.
    """
    return GradientPages(PageFile(settings.target), engine.residence.parameters())


def gradients_looked_at(settings: Offload | None) -> LookedAt | None:
    """What takes gradients that somebody has looked at; None if they are not kept in a file."""
    return give_back if settings is not None and settings.in_file and settings.has("gradients") else None
