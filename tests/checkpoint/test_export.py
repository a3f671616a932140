import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lnn_lightning.checkpoint import CheckpointError
from lnn_lightning.checkpoint import export as export_module
from lnn_lightning.checkpoint.export import export, in_order, size_of
from lnn_lightning.checkpoint.hub import INDEX
from lnn_lightning.checkpoint.sources import open_source
from lnn_lightning.cli import main
from tests.checkpoint import folders
from tests.helpers.ranks import run_ranks

TIED = {"head.weight": "net.10.weight"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("folder") / "half.ckpt"
    score = {"best_model_score": torch.tensor([0.5, 0.25])[1]}  # a view: all of its storage is stored
    folders.write(path, folders.tensors(), TIED, callbacks={"best": score}, MeshMixedPrecision={"scale": 8.0})
    return path


def test_a_lightning_file_is_what_torch_would_have_saved(checkpoint: Path, tmp_path: Path) -> None:
    said = export(checkpoint, tmp_path / "new" / "plain.ckpt")
    assert "9 tensors of the module and 0 optimizer(s)" in said
    found = torch.load(tmp_path / "new/plain.ckpt", weights_only=True, mmap=True)
    state = folders.tensors()
    assert found.keys() == {"pytorch-lightning_version", "callbacks", "MixedPrecision", "state_dict"}
    assert found["callbacks"]["best"]["best_model_score"] == 0.25 and found["MixedPrecision"] == {"scale": 8.0}
    tied = found["state_dict"].pop("head.weight")
    assert tied.data_ptr() == found["state_dict"]["net.10.weight"].data_ptr()
    assert found["state_dict"].keys() == state.keys()
    for key, value in state.items():
        assert found["state_dict"][key].dtype == value.dtype and torch.equal(found["state_dict"][key], value), key
    with zipfile.ZipFile(tmp_path / "new/plain.ckpt") as archive:
        assert archive.testzip() is None  # checksums are right, so other programs read it, too
        assert sum("/data/" in name for name in archive.namelist()) == len(state) + 1


def test_safetensors_are_what_the_library_reads(checkpoint: Path, tmp_path: Path) -> None:
    state = folders.tensors()
    export(checkpoint, tmp_path / "all.safetensors")
    found = load_file(tmp_path / "all.safetensors")
    assert found.keys() == state.keys()  # the tied one once
    assert all(found[key].dtype == value.dtype and torch.equal(found[key], value) for key, value in state.items())
    with safe_open(tmp_path / "all.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    save_file(found, tmp_path / "again.safetensors", {"format": "pt"})
    sizes = [os.path.getsize(tmp_path / f"{name}.safetensors") for name in ("all", "again")]
    assert sizes[0] == sizes[1]
    for name in ("export", "export.v2"):
        export(checkpoint, tmp_path / name)
        assert [each.name for each in (tmp_path / name).iterdir()] == ["model.safetensors"]


def test_shards_and_their_index(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text("{}")
    said = export(checkpoint, tmp_path / "hub", max_shard_size="500", prefix="net.", config=tmp_path / "c.json")
    assert "3 tensors" in said and "5 without the prefix left out" in said
    files = {each.name for each in (tmp_path / "hub").iterdir()}
    assert files == {"config.json", INDEX, *(f"model-0000{n}-of-00002.safetensors" for n in (1, 2))}
    index = json.loads((tmp_path / "hub" / INDEX).read_text())
    assert index["metadata"]["total_size"] == 12 * 10 * 4 + 9 * 7 * 3 * 2 + 9 * 8
    state = {key.removeprefix("net."): value for key, value in folders.tensors().items() if key.startswith("net.")}
    assert list(index["weight_map"]) == sorted(state)
    for key, value in state.items():
        assert torch.equal(load_file(tmp_path / "hub" / index["weight_map"][key])[key], value)
    assert open_source(tmp_path / "hub").tensors().keys() == state.keys()
    export(checkpoint, tmp_path / "head.safetensors", prefix="head.")  # the name that the checkpoint has it not under
    assert torch.equal(load_file(tmp_path / "head.safetensors")["weight"], folders.tensors()["net.10.weight"])


def test_an_optimizer_is_numbered_as_torch_numbers_it(tmp_path: Path) -> None:
    """Parameters in the order of the groups; a frozen one has a number and no state; numbers are not in the order."""
    blanks = export_module.Blanks()
    known: dict[str, Any] = {f"optimizer.0.{name}.exp_avg": ((2,), torch.float32) for name in ("a.b", "c")}
    ours = {
        "values": {"optimizer.0.c.step": torch.tensor(3.0), "state_dict.x": None},
        "optimizer_groups": [[{"lr": 0.5, "params": ["c"]}, {"lr": 0.25, "params": ["frozen", "a.b"]}]],
    }
    content = export_module.plain_checkpoint({"lnn_lightning": ours, "lr_schedulers": []}, known, blanks)
    assert content["state_dict"] == {"x": None}
    optimizer = content["optimizer_states"][0]
    assert optimizer["param_groups"] == [{"lr": 0.5, "params": [0]}, {"lr": 0.25, "params": [1, 2]}]
    leaves = {number: list(state) for number, state in optimizer["state"].items()}
    assert leaves == {0: ["exp_avg", "step"], 2: ["exp_avg"]}


def _export_large(rank: int, world_size: int, folder: str, out: str, format: str) -> int:
    export_module._AT_ONCE = 4 << 20
    export(folder, f"{out}/small", format="safetensors", prefix="small")  # what is imported and opened once
    Path("/proc/self/clear_refs").write_text("5")
    before = _peak()
    export(folder, f"{out}/large", format=format, max_shard_size=None)  # type: ignore[arg-type]
    return _peak() - before


def _peak() -> int:
    return next(
        int(line.split()[1]) << 10 for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line
    )


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the most memory used cannot be measured")
def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    state = {f"{index}": torch.full((1 << 20,), float(index)) for index in range(32)} | {"small": torch.ones(2)}
    folders.write(tmp_path / "folder", state)
    for format in ("lightning", "safetensors"):
        used = run_ranks(_export_large, 1, str(tmp_path / "folder"), str(tmp_path / format), format)[0]
        print(f"{format}: {used / 2**20:.0f} MiB for 128 MiB")
        assert used < 48 << 20


def test_nothing_is_written_where_it_must_not(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file.ckpt").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/mine").touch()
    refused: list[tuple[str, dict[str, Any], str]] = [
        ("file.ckpt", {}, "exists. Choose another place, or --overwrite"),
        ("folder", {"overwrite": True}, "is a folder that is no export"),
        ("folder", {"overwrite": True, "format": "lightning"}, "is a folder that is no export"),
        ("new.ckpt", {"prefix": "net."}, "--prefix is for safetensors"),
        ("new.ckpt", {"max_shard_size": "5GB"}, "--max-shard-size is for a folder"),
        ("new.safetensors", {"config": "x"}, "--config is for a folder"),
        ("new", {"config": "x"}, "There is no file x"),
        ("new", {"max_shard_size": "five"}, "'five' is no size"),
        ("new", {"prefix": "nat."}, "No tensor of .* begins with 'nat.'; the first is"),
    ]
    for name, options, said in refused:
        with pytest.raises(CheckpointError, match=said):
            export(checkpoint, tmp_path / name, **options)
    for out in (checkpoint, checkpoint / "x.ckpt", checkpoint.parent):
        with pytest.raises(CheckpointError, match="is the checkpoint itself, in it or around it"):
            export(checkpoint, out, overwrite=True)
    torch.save({"state_dict": folders.tensors()}, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match="only that becomes a Lightning file"):
        export(tmp_path / "weights.pt", tmp_path / "new.ckpt")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file.ckpt", "folder", "weights.pt"]
    assert (tmp_path / "file.ckpt").read_text() == "mine"
    export(checkpoint, tmp_path / "file.ckpt", overwrite=True)
    export(tmp_path / "weights.pt", tmp_path / "hub")
    export(tmp_path / "hub", tmp_path / "hub2")
    export(tmp_path / "hub2", tmp_path / "hub", overwrite=True, max_shard_size=400)
    assert (tmp_path / "hub" / INDEX).exists() and not (tmp_path / "hub/model.safetensors").exists()


def test_a_damaged_checkpoint_is_refused_by_the_name_of_the_file(tmp_path: Path) -> None:
    folders.write(tmp_path / "folder", folders.tensors())
    data = next((tmp_path / "folder").glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    for out in ("x.ckpt", "x.safetensors"):
        with pytest.raises(CheckpointError, match=data.name):
            export(tmp_path / "folder", tmp_path / out)


def test_the_command(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["export", str(checkpoint), str(tmp_path / "a.ckpt")])
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'a.ckpt'}: 9 tensors")
    options = ["--prefix", "net.", "--max-shard-size", "1KB", "--overwrite"]
    main(["export", str(checkpoint), str(tmp_path / "hub"), *options])
    assert load_file(tmp_path / "hub/model.safetensors").keys() == {"10.weight", "2.weight", "2.bias"}
    for args, code, said in (
        (["export", str(checkpoint), str(tmp_path / "a.ckpt")], 1, "a.ckpt exists"),
        (["export", str(tmp_path / "nothing"), str(tmp_path / "b.ckpt")], 1, "nothing"),
        (["export", "--help"], 0, "--max-shard-size SIZE"),
        (["--help"], 0, "lnn-lightning export"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(args)
        assert stop.value.code == code
        captured = capsys.readouterr()
        assert said in (captured.err if code else captured.out)


def test_sizes_and_orders() -> None:
    assert [size_of(text) for text in ("5GB", "200 MB", "1.5kb", "2GiB", 7, "12")] == [
        *(5 * 10**9, 200 * 10**6, 1500, 2 << 30, 7, 12)
    ]
    for text in ("", "GB", "-1GB", "5XB", "1..5GB", "0"):
        with pytest.raises(CheckpointError, match="is no size"):
            size_of(text)
    assert in_order(["l.10.w", "l.2.w", "a", "l.b"]) == ["a", "l.2.w", "l.10.w", "l.b"]
