"""A checkpoint for others: one file for a plain Lightning Trainer, or safetensors as the Hugging Face hub has them.

Tensors are read and written one after the other, so the model need not fit into memory.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lnn_lightning.checkpoint.distributed import (
    is_distributed_checkpoint,
    load_metadata,
    load_tensors,
    tensor_names,
)
from lnn_lightning.checkpoint.errors import CheckpointError
from lnn_lightning.checkpoint.folder import beside, put_in_place, remove, sync_folder
from lnn_lightning.checkpoint.hub import bytes_of, write_file, write_folder
from lnn_lightning.checkpoint.pieces import whole_tensor
from lnn_lightning.checkpoint.sources import Folder, Known, open_source
from lnn_lightning.checkpoint.states import MODULE_STATES, OURS, callback_part, same_values, whole_state
from lnn_lightning.checkpoint.torch_file import Blanks, save_by_tensor

Format = Literal["lightning", "safetensors"]
_PLUGINS = {f"Mesh{name}": name for name in ("Precision", "DoublePrecision", "HalfPrecision", "MixedPrecision")}
_AT_ONCE = 64 << 20
"""Bytes of small tensors that are read together."""
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def export(
    checkpoint: str | Path,
    out: str | Path,
    format: Format | None = None,
    max_shard_size: int | str | None = None,
    prefix: str = "",
    config: str | Path | None = None,
    overwrite: bool = False,
) -> str:
    """Writes a checkpoint as a Lightning ``.ckpt`` or as safetensors.

    Args:
        checkpoint: a checkpoint folder of this package; for safetensors also a ``.ckpt`` or other safetensors.
        out: the file; for safetensors a folder too. It is written beside and renamed when it is complete.
        format: None: by the ending of ``out``: ``.ckpt``, ``.pt`` and ``.pth`` are Lightning's.
        max_shard_size: (safetensors folder) most bytes of a file, 5GB if not said.
        prefix: (safetensors) only tensors whose names begin with it, without it.
        config: (safetensors folder) a model's ``config.json``, copied beside the weights.
        overwrite: replace what is at ``out``.

    Returns:
        What was written, in words.

    Raises:
        CheckpointError: nothing was written: the checkpoint cannot be read or does not fit the format, or there is
            something at ``out``.
    """
    checkpoint, out = Path(checkpoint), Path(out)
    format = format or ("lightning" if out.suffix in (".ckpt", ".pt", ".pth") else "safetensors")
    is_file = format == "lightning" or out.suffix == ".safetensors"
    for given, option in ((max_shard_size, "--max-shard-size"), (config, "--config")):
        if given is not None and is_file:
            raise CheckpointError(f"{option} is for a folder of safetensors; {out} is to be one file.")
    if config is not None and not Path(config).is_file():
        raise CheckpointError(f"There is no file {config}.")
    _check_place(out, checkpoint, is_file, overwrite)
    new = beside(out)
    remove(new)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if format == "lightning":
            if prefix:
                raise CheckpointError("--prefix is for safetensors: a Lightning checkpoint keeps the module's names.")
            said = _write_lightning(checkpoint, new)
        else:
            said = _write_safetensors(checkpoint, new, is_file, size_of(max_shard_size or "5GB"), prefix)
            if config is not None:
                shutil.copyfile(config, new / "config.json")
        _put_in_place(out)
    finally:
        remove(new)
    return f"{out}: {said}"


def size_of(text: int | str) -> int:
    """Bytes of a size such as ``5GB``.

    Raises:
        CheckpointError: it is none.
    """
    match = re.fullmatch(r"([0-9.]+)\s*([A-Za-z]*)", str(text).strip())
    try:
        size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    except (ValueError, KeyError):
        size = 0
    if size < 1:
        raise CheckpointError(f"{text!r} is no size of a file, such as 5GB or 200MB.")
    return size


def in_order(names: Iterable[str]) -> list[str]:
    """Names with numbers in order: layer 2 before layer 10."""
    return sorted(
        names,
        key=lambda name: [(not each.isdigit(), int(each) if each.isdigit() else 0, each) for each in name.split(".")],
    )


# ------------------------------------------------------------------------------------------------ Lightning


def _write_lightning(folder: Path, file: Path) -> str:
    if not is_distributed_checkpoint(folder):
        raise CheckpointError(f"{folder} is no checkpoint folder of lnn_lightning: only that becomes a Lightning file.")
    known, blanks = tensor_names(folder), Blanks()
    Folder(folder).verify()
    content = plain_checkpoint(load_metadata(folder), known, blanks)

    def read(names: list[str]) -> Iterator[Tensor]:
        for some in _batches(names, known):
            tensors = load_tensors(folder, some)
            yield from (tensors.pop(name) for name in some)

    save_by_tensor(file, content, blanks, read)
    optimizers = len(content.get("optimizer_states", ()))
    return f"{len(content['state_dict'])} tensors of the module and {optimizers} optimizer(s), {_readable(file)}"


def plain_checkpoint(metadata: Mapping[str, Any], known: Known, blanks: Blanks) -> dict[str, Any]:
    """What a Trainer without this package finds in a checkpoint file, with blanks for the tensors.

    Args:
        metadata: what a checkpoint folder has besides tensors.
        known: its tensors.
        blanks: makes them.
    """
    content = {_PLUGINS.get(key, key): value for key, value in metadata.items() if key != OURS}
    ours = metadata[OURS]
    entries = {name: blanks(name, *known[name]) for name in in_order(known)} | ours["values"]
    for part in MODULE_STATES:
        state = whole_state(entries, part, ours)
        if state or part == "state_dict":
            content[part] = state
    for callback, name in ours.get("averages", []):
        content["callbacks"][callback][name] = whole_state(entries, callback_part(callback, name), ours)
    read = [rank["loaders"] for rank in ours.get("ranks", ())]
    if read and read[0] and all(same_values(each, read[0]) for each in read):  # else each has read other samples
        content["loops"]["fit_loop"]["state_dict"]["combined_loader"] = read[0]
    groups = ours["optimizer_groups"]
    if groups or "lr_schedulers" in content:
        content["optimizer_states"] = [_numbered(index, each, entries) for index, each in enumerate(groups)]
    return content


def _numbered(index: int, groups: list[dict[str, Any]], entries: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state as plain torch has it: parameters by their number in the groups."""
    prefix = f"optimizer.{index}."
    by_name: dict[str, dict[str, Any]] = {}
    for key, value in entries.items():
        if key.startswith(prefix):
            name, leaf = key.removeprefix(prefix).rsplit(".", 1)
            by_name.setdefault(name, {})[leaf] = value
    names = [name for group in groups for name in group["params"]]
    numbers = iter(range(len(names)))
    return {
        "state": {number: by_name[name] for number, name in enumerate(names) if name in by_name},
        "param_groups": [{**group, "params": [next(numbers) for _ in group["params"]]} for group in groups],
    }


# ------------------------------------------------------------------------------------------------ safetensors


def _write_safetensors(checkpoint: Path, new: Path, is_file: bool, max_shard_size: int, prefix: str) -> str:
    source = open_source(checkpoint)
    source.verify()
    everything, tied = source.tensors(), source.tied()
    once: dict[str, str] = {}
    for name in [*in_order(everything.keys() - tied.keys()), *in_order(tied)]:
        if name.startswith(prefix):
            once.setdefault(tied.get(name, name), name)
    known = {name.removeprefix(prefix): everything[name] for name in once.values()}
    if not known:
        raise CheckpointError(
            f"No tensor of {checkpoint} begins with {prefix!r}; the first is {next(iter(everything))!r}."
        )

    def read(names: list[str]) -> Iterator[Tensor]:
        for some in _batches(names, known):
            tensors = {name: torch.empty(known[name][0], dtype=known[name][1]) for name in some}
            source.read({prefix + name: whole_tensor(tensor) for name, tensor in tensors.items()})
            yield from (tensors.pop(name) for name in some)

    if is_file:
        write_file(new, known, read)
    else:
        new.mkdir()
        write_folder(new, known, read, max_shard_size)
    left = sum(tied.get(name, name) not in once for name in everything)
    return f"{len(known)} tensors, {_readable(new)}" + (f"; {left} without the prefix left out" if left else "")


def _batches(names: list[str], known: Known) -> Iterator[list[str]]:
    """Small tensors by the dozen, large ones alone."""
    batch: list[str] = []
    size = 0
    for name in names:
        if batch and size + bytes_of(*known[name]) > _AT_ONCE:
            yield batch
            batch, size = [], 0
        batch.append(name)
        size += bytes_of(*known[name])
    if batch:
        yield batch


# ------------------------------------------------------------------------------------------------ the place


def _check_place(out: Path, checkpoint: Path, is_file: bool, overwrite: bool) -> None:
    here, there = out.resolve(), checkpoint.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise CheckpointError(f"{out} is the checkpoint itself, in it or around it.")
    if not out.exists():
        return
    if not overwrite:
        raise CheckpointError(f"{out} exists. Choose another place, or --overwrite.")
    if out.is_dir() and (is_file or not any(out.glob("*.safetensors"))):
        raise CheckpointError(f"{out} is a folder that is no export: it is not overwritten.")


def _put_in_place(out: Path) -> None:
    new = beside(out)
    for file in [new] if new.is_file() else new.iterdir():
        with open(file, "rb") as written:
            os.fsync(written.fileno())
    if new.is_file():
        new.replace(out)
        sync_folder(out.parent)
    else:
        put_in_place(out)


def _readable(path: Path) -> str:
    files = [path] if path.is_file() else list(path.iterdir())
    return f"{sum(each.stat().st_size for each in files) / 1e6:,.1f} MB in {len(files)} file(s)"
