"""Places that state is offloaded to: what is written is read, also through tensors mapped from the file."""

import os

import pytest
import torch

from lnn_lightning.memory.offload import FileStore, HostStore, Offload, OffloadError, open_store
from lnn_lightning.parallel.errors import LayoutError


def make(kind, folder):
    return HostStore() if kind == "host" else FileStore(folder, threads=2, direct=kind == "direct")


@pytest.mark.parametrize("kind", ["host", "direct", "cached"])
def test_what_is_written_is_read(tmp_path, kind):
    store = make(kind, tmp_path)
    assert not os.listdir(tmp_path)  # whatever becomes of this process, nothing stays behind
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.uint8):
        for numel in (1, 1000, 300_001):
            region, values = store.allocate(numel, dtype), (torch.randn(numel) * 50).to(dtype)
            buffer = store.buffer(numel, dtype)
            buffer.copy_(values)
            store.write(region, buffer).result()
            assert torch.equal(store.tensor(region), values)
            buffer.zero_()
            store.read(region, buffer).result()
            assert torch.equal(buffer, values)
            # parts, on borders of direct access and off them, from memory that cannot be read to directly
            for start, length in ((0, numel // 2), (4096, 8192), (33, 1001)):
                if start + length <= numel:
                    part = torch.empty(length, dtype=dtype)
                    store.read(region, part, start).result()
                    assert torch.equal(part, values[start : start + length])
                    store.write(region, part.fill_(3), start).result()
                    values[start : start + length] = 3
                    assert torch.equal(store.tensor(region), values)
            store.free(region)
    store.close()


@pytest.mark.parametrize("kind", ["direct", "cached"])
def test_a_mapped_tensor_and_the_file_agree_though_each_is_written_in_turn(tmp_path, kind):
    store = make(kind, tmp_path)
    region, other = store.allocate(1 << 20, torch.float32), store.allocate(5, torch.float32)
    mapped, buffer = store.tensor(region), store.buffer(1 << 20, torch.float32)
    for turn in range(3):
        store.write(region, buffer.fill_(turn)).result()
        assert (mapped == turn).all()
        mapped[turn::3] = -1.0
        store.read(region, buffer).result()
        assert torch.equal(buffer, mapped)
        store.release()
        assert torch.equal(buffer, mapped)
    store.tensor(other).fill_(2.0)
    store.close()
    assert torch.equal(buffer, mapped)  # what was handed out lives on


def test_what_is_looked_at_is_given_back(tmp_path):
    def resident():
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    store = FileStore(tmp_path)
    mapped = store.tensor(store.allocate(16 << 20, torch.float32))
    before = resident()
    mapped.fill_(1.0)
    taken = resident() - before
    store.release()
    assert taken > 60e6 and resident() - before < 4e6
    assert float(mapped[-1]) == 1.0
    store.close()


def test_refusals_name_the_folder_and_the_way_out(tmp_path):
    (tmp_path / "file").touch()
    for folder, says in (("nowhere", "does not exist"), ("file", "is no folder")):
        with pytest.raises(OffloadError, match=f"{folder}.*{says}"):
            open_store(Offload(target=tmp_path / folder), pin=False)
    with pytest.raises(OffloadError, match=r"full \(\d+.* GB are needed"):
        FileStore(tmp_path).allocate(10**15, torch.float32)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"what": {"optimiser"}}, "'optimiser' is none"),
        ({"what": []}, "got none"),
        ({"target": ""}, "empty path"),
        ({"chunk_size": 5000}, "multiple of 4096"),
        ({"threads": 0}, "at least 1"),
        ({"pin_memory": "yes"}, "'auto'"),
        ({"minimum_bandwidth": 100.0}, "folder as `target`"),
    ],
)
def test_settings_that_make_no_sense(settings, says):
    with pytest.raises(LayoutError, match=says):
        Offload(**settings)


def test_settings_take_lists_and_sets():
    assert Offload(what=["activations", "optimizer"]).what == Offload(what={"activations", "optimizer"}).what
    assert Offload(what="optimizer").has("optimizer") and not Offload().in_file


def test_few_files_are_open_however_many_tensors_there_are(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    monkeypatch.setattr("lnn_lightning.memory.offload.files.WINDOW", 1 << 20)
    store, kept = FileStore(f"~/{tmp_path.name}"), []
    before = len(os.listdir("/proc/self/fd"))
    regions = [store.allocate(20_000, torch.float32) for _ in range(30)]
    for number, region in reversed(list(enumerate(regions))):
        kept.append((number, store.tensor(region).fill_(number)))
    for number in range(30, 130):  # one after another, over the borders of what is mapped
        regions.append(store.allocate(20_000, torch.float32))
        kept.append((number, store.tensor(regions[-1]).fill_(number)))
    assert len(os.listdir("/proc/self/fd")) - before < 20
    store.release()
    buffer = store.buffer(20_000, torch.float32)
    for number, value in kept:
        store.read(regions[number], buffer).result()
        assert (value == number).all() and (buffer == number).all()
