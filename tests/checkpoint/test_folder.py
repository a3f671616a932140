"""Replacing, removing and listing of checkpoint folders."""

import argparse
import datetime
import json
import os
import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from lnn_lightning.checkpoint import (
    CheckpointError,
    load_full_state_dict,
    load_metadata,
    load_tensors,
    save_checkpoint,
    tensor_names,
)
from lnn_lightning.checkpoint import folder as folders
from lnn_lightning.checkpoint.background import BackgroundWriter
from lnn_lightning.checkpoint.distributed import read_pieces
from lnn_lightning.checkpoint.manifest import MANIFEST, newest_first, read_manifest, verify
from lnn_lightning.checkpoint.pieces import Piece, Pieces, whole_tensor
from tests.helpers.ranks import run_ranks


@pytest.fixture
def one_rank() -> Any:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def _write(path: Path, value: float = 1.0) -> dict[str, torch.Tensor]:
    tensors = {"state_dict.a": torch.full((40, 30), value), "state_dict.b": torch.arange(7, dtype=torch.int64)}
    save_checkpoint(path, tensors, {"epoch": 1, "lnn_lightning": {"format": 2}})
    return tensors


def test_what_was_written_is_read(one_rank: None, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    tensors = _write(path)
    verify(path)
    assert tensor_names(path) == {key: (tuple(value.shape), value.dtype) for key, value in tensors.items()}
    for key, value in load_tensors(path, tensors).items():
        assert torch.equal(value, tensors[key])
    assert load_metadata(path)["epoch"] == 1
    assert set(load_full_state_dict(path)) == {"a", "b"}
    assert set(read_manifest(path).files) == {each.name for each in path.iterdir()} - {MANIFEST}
    with pytest.raises(CheckpointError, match="has no 'state_dict.c'"):
        load_tensors(path, ["state_dict.c"])


def _files(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


@pytest.mark.parametrize("damage", ["torn", "edited", "missing"])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "meta.pt", MANIFEST])
def test_a_damaged_file_is_named(one_rank: None, tmp_path: Path, name: str, damage: str) -> None:
    path = tmp_path / "a.ckpt"
    _write(path)
    file = path / name
    content = bytearray(file.read_bytes())
    if damage == "torn":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "edited":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    else:
        file.unlink()
    with pytest.raises(CheckpointError, match="damaged|missing|no complete checkpoint") as caught:
        verify(path)
    assert name in str(caught.value)


def test_every_share_of_the_files_is_read_by_somebody(one_rank: None, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    _write(path)
    for name in ("__0_0.distcp", ".metadata", "meta.pt"):
        content = bytearray((path / name).read_bytes())
        content[-1] ^= 1
        (path / name).write_bytes(content)
        found = []
        for share in range(4):
            try:
                verify(path, share, 4)
            except CheckpointError as error:
                found.append(str(error))
        assert len(found) == 1 and name in found[0]
        content[-1] ^= 1
        (path / name).write_bytes(content)


def test_a_list_of_files_reaches_no_file_outside(one_rank: None, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    _write(path)
    raw = json.loads((path / MANIFEST).read_text())
    raw["files"]["../b"] = raw["files"]["meta.pt"]
    (path / MANIFEST).write_text(json.dumps(raw))
    (tmp_path / "b").write_bytes((path / "meta.pt").read_bytes())
    with pytest.raises(CheckpointError):
        verify(path)


@pytest.mark.parametrize(
    "value",
    [Path("a/b"), np.float32(1.5), np.int64(3), datetime.timedelta(1), argparse.Namespace(a=1), range(3), {1, 2}],
    ids=lambda value: type(value).__name__,
)
def test_values_that_hyperparameters_often_have(one_rank: None, tmp_path: Path, value: Any) -> None:
    save_checkpoint(tmp_path / "x", {}, {"hyper_parameters": {"it": value}})
    found = load_metadata(tmp_path / "x")["hyper_parameters"]["it"]
    assert found == value and type(found) is type(value)


def test_arrays_come_back_and_code_in_them_does_not(one_rank: None, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "x", {}, {"it": np.arange(3.0)})
    assert load_metadata(tmp_path / "x")["it"].tolist() == [0, 1, 2]
    with pytest.raises(CheckpointError, match="cannot be loaded safely"):
        save_checkpoint(tmp_path / "y", {}, {"it": np.array([_Payload(str(tmp_path / "ran"))])})
    assert not (tmp_path / "ran").exists()


class _Payload:
    """Runs code when it is unpickled."""

    def __init__(self, target: str) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (self.target,)


@pytest.mark.parametrize("name", [".metadata", "meta.pt", "__0_0.distcp"])
def test_nothing_is_unpickled(one_rank: None, tmp_path: Path, name: str) -> None:
    """A payload in any file of a folder is refused, and none of its code runs."""
    path, ran = tmp_path / "a.ckpt", tmp_path / "ran"
    _write(path)
    record = (path / name).read_bytes()
    if name == ".metadata":
        (path / name).write_bytes(pickle.dumps(_Payload(str(ran))))
    elif name == "meta.pt":
        torch.save({"epoch": _Payload(str(ran)), "lnn_lightning": {"format": 1}}, path / name)
    else:
        torch.save([_Payload(str(ran))] * 20, path / name)
        with open(path / name, "ab") as file:
            file.write(b"\0" * max(len(record) - file.tell(), 0))
    with pytest.raises(CheckpointError):
        load_metadata(path)
        load_full_state_dict(path)
    assert not ran.exists()
    pickle.loads(pickle.dumps(_Payload(str(ran))))
    assert ran.exists(), "the payload works where it is unpickled"


def test_replacing_leaves_no_moment_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is cut off, a complete folder is there or comes back: with an exchange in one move, and without."""
    for exchanges in (True, False):
        monkeypatch.setattr(folders, "_exchange", folders._exchange if exchanges else lambda *_: False)
        place = tmp_path / f"x{exchanges}.ckpt"
        calls = _moves(place, stop_at=99, monkeypatch=monkeypatch)
        assert (place / "content").read_text() == "new"
        for stop in range(calls):
            _moves(place, stop_at=stop, monkeypatch=monkeypatch)
            folders.repair(place)
            assert (place / "content").read_text() in ("old", "new"), (exchanges, stop)
        assert _files(tmp_path) == sorted({place.name, *[f"x{True}.ckpt"], *_hidden(tmp_path)})


def _hidden(path: Path) -> set[str]:
    return {each.name for each in path.iterdir() if each.name.startswith(".")}


class _Cut(BaseException):
    pass


def _moves(place: Path, stop_at: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Replaces a folder and is killed before one of the moves; how many there were."""
    for folder, text in ((place, "old"), (folders.beside(place), "new")):
        folders.remove(folder)
        folder.mkdir()
        (folder / "content").write_text(text)
    calls = 0

    def counted(real: Any) -> Any:
        def act(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            if calls == stop_at:
                raise _Cut
            calls += 1
            return real(*args, **kwargs)

        return act

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", counted(Path.rename))
        patch.setattr(folders.shutil, "rmtree", counted(folders.shutil.rmtree))
        patch.setattr(folders, "_exchange", counted(folders._exchange))
        try:
            folders.put_in_place(place)
        except _Cut:
            pass
    return calls


def test_a_removed_folder_is_never_half_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "a.ckpt"
    place.mkdir()

    def cut(*_: Any) -> None:
        raise _Cut

    with monkeypatch.context() as patch, pytest.raises(_Cut):
        patch.setattr(folders.shutil, "rmtree", cut)
        folders.remove(place)
    assert not place.exists()


def test_newest_first(one_rank: None, tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        _write(tmp_path / name)
        time.sleep(0.01)
    (tmp_path / "c" / MANIFEST).unlink()
    (tmp_path / "d").mkdir()
    assert [each.name for each in newest_first(tmp_path.iterdir())] == ["a", "b"]


def _in_pieces(rank: int, world_size: int, path: str) -> Any:
    """Two ranks write slices of a whole, one of them the same."""
    whole = torch.arange(60.0).view(6, 10)
    mine = [
        Piece((0, 5 * rank), whole[:, 5 * rank : 5 * rank + 3]),
        Piece((0, 5 * rank + 3), whole[:, 5 * rank + 3 :][:, :2]),
    ]
    same = whole_tensor(whole * 2)
    save_checkpoint(path, {"parts": Pieces((6, 10), whole.dtype, tuple(mine)), "same": same}, {})
    return rank


def test_slices_of_ranks_make_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "x"
    run_ranks(_in_pieces, 2, str(path))
    read = load_tensors(path, ["parts", "same"])
    assert torch.equal(read["parts"], torch.arange(60.0).view(6, 10))
    assert torch.equal(read["same"], torch.arange(60.0).view(6, 10) * 2)
    room = torch.zeros(2, 4)
    read_pieces(path, {"parts": Pieces((6, 10), room.dtype, (Piece((3, 4), room),))})
    assert torch.equal(room, read["parts"][3:5, 4:8])
    with pytest.raises(CheckpointError, match=r"\(6, 10\).*\(6, 9\)"):
        read_pieces(path, {"parts": Pieces((6, 9), room.dtype, (Piece((0, 0), room),))})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_any_slice_is_read_where_it_lies(dtype: torch.dtype, one_rank: None, tmp_path: Path) -> None:
    """Of tensors of all kinds and memory layouts, into memory of all kinds, other dtypes too."""
    torch.manual_seed(0)
    whole = {
        "plain": torch.randint(0, 2, (5, 7, 4)).to(dtype),
        "turned": torch.randint(0, 2, (7, 5, 4)).to(dtype).transpose(0, 1),
        "strided": torch.randint(0, 2, (5, 7, 8)).to(dtype)[..., ::2],
        "flat": torch.randint(0, 2, (9,)).to(dtype),
        "nothing": torch.zeros(0, 3).to(dtype),
        "scalar": torch.tensor(1).to(dtype),
    }
    path = tmp_path / "x"
    save_checkpoint(path, whole, {})
    for name, value in load_tensors(path, whole).items():
        assert value.dtype == dtype and torch.equal(value, whole[name]), name
    wide = torch.complex128 if dtype.is_complex else torch.float64
    read_pieces(path, {"plain": Pieces((5, 7, 4), dtype, (Piece((3, 2, 1), torch.zeros(2, 0, 1, dtype=dtype)),))})
    plain, strided = torch.zeros(2, 3, 2, dtype=dtype), torch.zeros(2, 3, 4, dtype=wide)[..., ::2]
    for room in (plain, strided, torch.zeros(2, 2, 3, dtype=dtype).mT):
        for name in ("plain", "turned", "strided"):
            read_pieces(path, {name: Pieces((5, 7, 4), dtype, (Piece((3, 2, 1), room),))})
            assert torch.equal(room, whole[name][3:5, 2:5, 1:3].to(room.dtype)), name


def test_torch_itself_reads_the_tensors(one_rank: None, tmp_path: Path) -> None:
    tensors = _write(tmp_path / "x")
    read = {name: torch.zeros_like(value) for name, value in tensors.items()}
    dcp.load(read, checkpoint_id=tmp_path / "x")
    for name, value in tensors.items():
        assert torch.equal(read[name], value)


def test_an_index_reaches_no_file_outside(one_rank: None, tmp_path: Path) -> None:
    path = tmp_path / "x"
    _write(path)
    index = pickle.loads((path / ".metadata").read_bytes())
    (path / "__0_0.distcp").rename(tmp_path / "y")
    for info in index.storage_data.values():
        info.relative_path = "../y"
    (path / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match="which is not in it: refused"):
        load_full_state_dict(path)


def _fails_on_one(rank: int, world_size: int, path: str) -> str:
    import lnn_lightning.checkpoint.manifest as manifest

    _write(Path(path))
    if rank == 1:

        def full(*_: Any) -> int:
            raise OSError(28, "No space left on device")

        manifest._Summing.write = full  # type: ignore[method-assign]
    tensors = {f"t{index}": torch.zeros(100) for index in range(8)}
    try:
        save_checkpoint(path, tensors, {})
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_disk_that_fills_up_on_one_rank_is_everyones_error(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for said in run_ranks(_fails_on_one, 2, str(path)):
        assert "Rank 1 says" in said and "No space left" in said and str(path) in said
    verify(path)
    assert set(tensor_names(path)) == {"state_dict.a", "state_dict.b"}
    assert _files(tmp_path) == ["x"]


def test_a_snapshot_stays_what_it_was() -> None:
    writer, value = BackgroundWriter(), torch.ones(4, 6)
    first = writer.snapshot({"a": Pieces((4, 12), value.dtype, (Piece((0, 6), value),))})
    value.add_(1)
    copy = first["a"].pieces[0].value
    assert torch.equal(copy, torch.ones(4, 6))
    second = writer.snapshot({"a": Pieces((4, 12), value.dtype, (Piece((0, 6), value),))})
    assert second["a"].pieces[0].value.data_ptr() == copy.data_ptr(), "memory is used again"
    assert torch.equal(copy, value)


def test_a_background_error_is_raised_by_who_waits() -> None:
    writer, done = BackgroundWriter(), []

    def fail() -> None:
        raise CheckpointError("the disk is gone")

    writer.afterwards(lambda: done.append("at once"))
    writer.start(fail)
    writer.afterwards(lambda: done.append("never"))
    with pytest.raises(CheckpointError, match="the disk is gone"):
        writer.wait()
    writer.wait()
    writer.start(lambda: time.sleep(0.05))
    writer.afterwards(lambda: done.append("behind"))
    assert done == ["at once"]
    writer.wait()
    assert done == ["at once", "behind"]
