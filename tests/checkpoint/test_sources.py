import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lnn_lightning.checkpoint import CheckpointError
from lnn_lightning.checkpoint.export import export
from lnn_lightning.checkpoint.hub import INDEX
from lnn_lightning.checkpoint.pieces import Piece, Pieces, whole_tensor
from lnn_lightning.checkpoint.sources import open_source
from tests.checkpoint import folders


def _hub(path: Path, state: dict[str, Tensor]) -> None:
    path.mkdir()
    names = list(state)
    index = {}
    for number, some in enumerate((names[:3], names[3:]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: state[name] for name in some}, path / file, {"format": "pt"})
        index |= dict.fromkeys(some, file)
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _one_in_a_folder(path: Path, state: dict[str, Tensor]) -> None:
    path.mkdir()
    save_file(state, path / "model.safetensors")


KINDS: dict[str, Callable[[Path, dict[str, Tensor]], Any]] = {
    "folder.ckpt": lambda path, state: folders.write(path, state),
    "lightning.ckpt": lambda path, state: torch.save({"state_dict": state, "epoch": 3}, path),
    "bare.pt": lambda path, state: torch.save(state, path),
    "old.bin": lambda path, state: torch.save(state, path, _use_new_zipfile_serialization=False),
    "file.safetensors": lambda path, state: save_file(state, path),
    "hub": _hub,
    "single": _one_in_a_folder,
}


@pytest.mark.parametrize("name", KINDS)
def test_any_region_of_any_kind(name: str, tmp_path: Path) -> None:
    state = folders.tensors()
    KINDS[name](tmp_path / name, state)
    source = open_source(tmp_path / name)
    source.verify()
    assert source.tensors() == {key: (tuple(value.shape), value.dtype) for key, value in state.items()}
    assert source.tied() == {}
    whole = {key: torch.zeros_like(value) for key, value in state.items()}
    source.read({key: whole_tensor(value) for key, value in whole.items()})
    assert all(torch.equal(whole[key], value) for key, value in state.items())
    wanted = {
        "net.10.weight": folders.parts(
            state["net.10.weight"],
            (slice(2, 5), slice(0, 10)),
            (slice(7, 12), slice(3, 4)),
            dtype=torch.float64,
        ),
        "net.2.weight": folders.parts(state["net.2.weight"], (slice(0, 9), slice(5, 7), slice(1, 2))),
        "table": folders.parts(state["table"], (slice(4, 4), slice(0, 2))),
    }
    source.read(wanted)
    for key, pieces in wanted.items():
        for piece in pieces.pieces:
            region = tuple(slice(at, at + n) for at, n in zip(piece.offsets, piece.value.shape, strict=True))
            assert torch.equal(piece.value, state[key][region].to(piece.value.dtype))


def test_tied_tensors_have_all_their_names(tmp_path: Path) -> None:
    state = {"a.weight": torch.randn(4, 3), "b.weight": torch.randn(4, 3)}
    folders.write(tmp_path / "folder", state, tied={"c.weight": "a.weight"})
    torch.save({"state_dict": state | {"c.weight": state["a.weight"]}}, tmp_path / "file.ckpt")
    for name in ("folder", "file.ckpt"):
        source = open_source(tmp_path / name)
        assert source.tied() == {"c.weight": "a.weight"} and set(source.tensors()) == {*state, "c.weight"}
        found = {key: torch.zeros(4, 3) for key in ("a.weight", "c.weight")}
        source.read({key: whole_tensor(value) for key, value in found.items()})
        assert all(torch.equal(value, state["a.weight"]) for value in found.values())


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux tells how much memory is in use")
@pytest.mark.parametrize("name", ["lightning.ckpt", "hub"])
def test_what_is_not_read_takes_no_memory(name: str, tmp_path: Path) -> None:
    KINDS[name](tmp_path / name, {f"{index}": torch.zeros(4 << 20) for index in range(4)})
    before = _resident()
    source = open_source(tmp_path / name)
    piece = torch.ones(199_000)
    source.read({"2": Pieces((4 << 20,), piece.dtype, (Piece((1000,), piece),))})
    assert not piece.any()
    assert _resident() - before < 12 << 20  # of 64 MiB


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ------------------------------------------------------------------------------------------------ refusals


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def _raw(path: Path, content: Any) -> None:
    path.write_bytes(pickle.dumps(content, protocol=2))


def _bin_folder(path: Path, content: Any) -> None:
    path.mkdir()
    torch.save(content, path / "pytorch_model.bin")


def _meta(path: Path, content: Any) -> None:
    folders.write(path, {"a": torch.ones(2)})
    (path / "manifest.json").unlink(missing_ok=True)
    torch.save({"lnn_lightning": {"format": 1, "values": {}, "optimizer_groups": []}, "x": content}, path / "meta.pt")


def _index(path: Path, content: Any) -> None:
    folders.write(path, {"a": torch.ones(2)})
    _raw(path / ".metadata", content)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("lightning.ckpt", torch.save),
        ("old.ckpt", lambda content, path: torch.save(content, path, _use_new_zipfile_serialization=False)),
        ("raw.bin", lambda content, path: _raw(path, content)),
        ("zip.bin", torch.save),
        ("bins", lambda content, path: _bin_folder(path, content)),
        ("meta", lambda content, path: _meta(path, content)),
        ("index", lambda content, path: _index(path, content)),
    ],
)
def test_a_pickle_is_never_run(name: str, make: Callable[[Any, Path], None], tmp_path: Path) -> None:
    mark = tmp_path / "it ran"
    make({"state_dict": {"a": torch.ones(2)}, "hyper_parameters": Payload(mark)}, tmp_path / name)
    with pytest.raises(CheckpointError) as caught:
        open_source(tmp_path / name)
    assert name in str(caught.value)
    for out in ("out.ckpt", "out"):
        with pytest.raises(CheckpointError):
            export(tmp_path / name, tmp_path / out)
        assert not (tmp_path / out).exists()
    assert not mark.exists()


def test_the_payload_would_run(tmp_path: Path) -> None:
    torch.save(Payload(tmp_path / "it ran"), tmp_path / "file.ckpt")
    torch.load(tmp_path / "file.ckpt", weights_only=False)
    assert (tmp_path / "it ran").exists()


def _reindexed(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    def damage(path: Path) -> None:
        index = json.loads((path / INDEX).read_text())
        change(index["weight_map"])
        (path / INDEX).write_text(json.dumps(index))

    return damage


SECOND = "model-00002-of-00002.safetensors"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a shard is missing": (lambda path: (path / SECOND).unlink(), f"{SECOND} is missing"),
    "a shard is cut off": (lambda path: os.truncate(path / SECOND, 80), f"{SECOND} is damaged"),
    "a shard is another file": (lambda path: (path / SECOND).write_text("x" * 99), f"{SECOND} is damaged"),
    "an entry is wrong": (_reindexed(lambda index: index.update(scale="model-00001-of-00002.safetensors")), "'scale'"),
    "an entry is missing": (_reindexed(lambda index: index.pop("mask")), "'mask' is in"),
    "an entry is too much": (_reindexed(lambda index: index.update(more=SECOND)), "'more' is in"),
    "an entry leads out": (_reindexed(lambda index: index.update(scale="../x.safetensors")), f"{INDEX} is no index"),
    "the index is no index": (lambda path: (path / INDEX).write_text("[]"), f"{INDEX} is no index"),
    "the index is gone": (lambda path: (path / INDEX).unlink(), "has 2 safetensors files and no"),
    "all is gone": (lambda path: [each.unlink() for each in path.iterdir()], "has no weights that are known"),
    "the folder is gone": (shutil.rmtree, "There is nothing at"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_safetensors_are_named(name: str, tmp_path: Path) -> None:
    _hub(tmp_path / "hub", folders.tensors())
    damage, said = DAMAGES[name]
    damage(tmp_path / "hub")
    with pytest.raises(CheckpointError) as caught:
        open_source(tmp_path / "hub")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"model": {"a": 1}, "step": 3}, "holds no `state_dict` with tensors. It has 'model', 'step'."),
        ([torch.ones(2)], "holds no `state_dict` with tensors."),
    ],
)
def test_a_file_without_weights_is_named(content: Any, said: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "file.pt")
    with pytest.raises(CheckpointError) as caught:
        open_source(tmp_path / "file.pt")
    assert said in str(caught.value)
    os.truncate(tmp_path / "file.pt", 300)
    with pytest.raises(CheckpointError, match="file.pt"):
        open_source(tmp_path / "file.pt")
