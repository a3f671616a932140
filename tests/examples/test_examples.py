import math
import os
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from examples import generate
from examples.gpt import ByteGPT, warmup_cosine
from examples.text import TextFolder, Windows, find, place_of, read, split


def tiny(**changes: int | float) -> ByteGPT:
    return ByteGPT(**{"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 16, "warmup_steps": 2, **changes})  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Forty files in two folders, each with its own text, and some that don't count."""
    for index in range(40):
        path = tmp_path / "text" / "ab"[index % 2] / f"{index}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"file {index:02d}\n" * 50)
    for name in "a/data.bin", ".hidden/x.py", "site-packages/y.py":
        path = tmp_path / "text" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("not text of this folder")
    return tmp_path / "text"


class TestText:
    def test_each_file_is_on_one_side(self, folder: Path) -> None:
        files = find(folder, [".py"])
        train, val = split(files, folder, 0.2)
        assert len(files) == 40
        assert set(train) | set(val) == set(files)
        assert not set(train) & set(val)
        assert 2 <= len(val) <= 16

    def test_new_files_do_not_move_old_ones(self, folder: Path) -> None:
        _, before = split(find(folder, [".py"]), folder, 0.2)
        (folder / "new.py").write_text("new")
        _, after = split(find(folder, [".py"]), folder, 0.2)
        assert set(after) - {folder / "new.py"} == set(before)

    def test_no_text_is_in_both(self, folder: Path) -> None:
        data = TextFolder(str(folder), block_size=16, val_fraction=0.2)
        data.setup("fit")
        assert data.train is not None and data.val is not None
        sides = [bytes(windows.data.tolist()).split(b"\0") for windows in (data.train, data.val)]
        texts = [{text for text in side if text} for side in sides]
        assert texts[0] | texts[1] == {(f"file {index:02d}\n" * 50).encode() for index in range(40)}
        assert not texts[0] & texts[1]

    @pytest.mark.parametrize("fraction", [0.0, 1.0])
    def test_two_files_are_enough(self, tmp_path: Path, fraction: float) -> None:
        files = [tmp_path / "x.py", tmp_path / "y.py"]
        train, val = split(files, tmp_path, fraction)
        assert len(train) == len(val) == 1

    def test_one_file_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="at least two"):
            split([tmp_path / "x.py"], tmp_path, 0.1)

    def test_too_little_text_is_refused(self, folder: Path) -> None:
        with pytest.raises(ValueError, match="give more text"):
            TextFolder(str(folder), block_size=100_000).setup("fit")

    def test_the_place_of_a_file_never_changes(self) -> None:
        assert place_of(Path("json/decoder.py")) == pytest.approx(0.2311743, abs=1e-6)

    def test_targets_are_the_bytes_one_further_on(self, folder: Path) -> None:
        text = read(find(folder, [".py"])[:3])
        windows = Windows(text, torch.tensor([0, 5, 700]), block_size=16)
        for index, start in enumerate([0, 5, 700]):
            x, y = windows[index]
            assert x.dtype == y.dtype == torch.int64
            assert x.tolist() == text[start : start + 16].tolist()
            assert y.tolist() == text[start + 1 : start + 17].tolist()

    @pytest.mark.parametrize("samples", [None, 33])
    def test_windows_lie_in_the_text(self, folder: Path, samples: int | None) -> None:
        data = TextFolder(str(folder), block_size=16, batch_size=4, samples_per_epoch=samples)
        data.setup("fit")
        assert data.train is not None and data.val is not None
        for windows in data.train, data.val:
            assert len(windows) == (samples if samples and windows is data.train else (len(windows.data) - 1) // 16)
            assert all(len(x) == len(y) == 16 for x, y in windows)  # type: ignore[attr-defined]
        assert len(data.train_dataloader()) == len(data.train) // 4
        assert len(data.val_dataloader()) == math.ceil(len(data.val) / 4)

    def test_every_process_sees_the_same_windows(self, folder: Path) -> None:
        one, other = (TextFolder(str(folder), block_size=16, samples_per_epoch=9) for _ in range(2))
        for data in one, other:
            data.setup("fit")
        assert one.train is not None and other.train is not None and one.val is not None and other.val is not None
        assert torch.equal(one.train.starts, other.train.starts)
        assert torch.equal(one.val.starts, other.val.starts)

    def test_the_standard_library_is_there(self) -> None:
        files = find(TextFolder().folder, [".py"])
        assert len(files) > 100
        assert any(path.name == "decoder.py" for path in files)
        assert not any("site-packages" in path.parts for path in files)


class TestByteGPT:
    def test_default_size(self) -> None:
        with torch.device("meta"):
            model = ByteGPT()
        assert 9e6 < sum(p.numel() for p in model.parameters()) < 12e6

    def test_head_is_tied(self) -> None:
        model = tiny()
        assert model.head.weight is model.byte_embedding.weight

    def test_knows_nothing_at_the_start(self) -> None:
        torch.manual_seed(0)
        tokens = torch.randint(256, (4, 65))
        loss = tiny(n_embd=64, block_size=64).loss((tokens[:, :-1], tokens[:, 1:]))
        assert loss.item() == pytest.approx(math.log(256), abs=0.1)

    def test_sees_no_later_bytes(self) -> None:
        model = tiny()
        tokens = torch.randint(256, (1, 16))
        changed = tokens.clone()
        changed[0, 10:] = (changed[0, 10:] + 1) % 256
        assert torch.allclose(model(tokens)[:, :10], model(changed)[:, :10], atol=1e-6)
        assert not torch.allclose(model(tokens)[:, 10:], model(changed)[:, 10:], atol=1e-6)

    def test_learning_rate(self) -> None:
        factors = [warmup_cosine(step, 10, 100, 0.1) for step in range(120)]
        assert factors[0] == pytest.approx(1 / 11)
        assert max(factors) == factors[10] == 1
        assert factors[10:101] == sorted(factors[10:101], reverse=True)
        assert factors[100:] == pytest.approx([0.1] * 20)
        assert warmup_cosine(10**6, 10, math.inf, 0.1) == 1

    def test_heads_must_divide_the_width(self) -> None:
        with pytest.raises(ValueError, match="n_embd=16 is not divisible by n_head=3"):
            tiny(n_head=3)

    def test_trains_and_writes(self, folder: Path, tmp_path: Path) -> None:
        """The whole example on one device: the loss falls, and the checkpoint writes text."""
        torch.manual_seed(0)
        data = TextFolder(str(folder), block_size=16, batch_size=16, val_fraction=0.2)
        model = tiny(n_embd=32, lr=0.01)
        best = ModelCheckpoint(tmp_path / "run", monitor="val_bpb", save_last=True)
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=60,
            val_check_interval=30,
            check_val_every_n_epoch=None,
            callbacks=best,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, data)
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        assert metrics["val_bpb"] < 3
        assert metrics["val_loss"] == pytest.approx(metrics["val_bpb"] * math.log(2), rel=1e-5)
        decayed, plain = trainer.optimizers[0].param_groups
        assert decayed["weight_decay"] == 0.1 and plain["weight_decay"] == 0
        assert len(decayed["params"]) + len(plain["params"]) == len(list(model.parameters()))

        surprises = torch.cat(trainer.predict(model, data))  # type: ignore[arg-type]
        assert surprises.shape == (len(data.val),)  # type: ignore[arg-type]
        assert trainer.test(model, data, verbose=False)[0]["test_bpb"] == pytest.approx(
            surprises.mean().item(), rel=0.02
        )

        path = generate.find_checkpoint(tmp_path)
        assert path.parent == tmp_path / "run"
        written = generate.build(*generate.load(path))
        assert generate.generate(written, b"file 0", 40, temperature=0).count(b"file") >= 2


class TestGenerate:
    def test_from_parameters(self) -> None:
        model = tiny()
        copy = generate.build(
            model.state_dict(), {"_instantiator": "lightning.pytorch.cli.instantiate_module", **model.hparams}
        )
        text = generate.generate(copy, b"a longer prompt than the context", 20, seed=1)
        assert len(text) == 20
        assert text == generate.generate(copy, b"a longer prompt than the context", 20, seed=1)
        assert text != generate.generate(copy, b"a longer prompt than the context", 20, seed=2)
        assert generate.generate(copy, b"", 5, temperature=0) == generate.generate(copy, b"\0", 5, temperature=0)

    def test_finds_the_newest_checkpoint(self, tmp_path: Path) -> None:
        for age, name in enumerate(["new", "old"]):
            path = tmp_path / f"version_{name}" / "last.ckpt"
            path.mkdir(parents=True)
            (path / "inner.ckpt").touch()
            os.utime(path, (1000 - age, 1000 - age))
        assert generate.find_checkpoint(tmp_path) == tmp_path / "version_new" / "last.ckpt"
        assert generate.find_checkpoint(path) == path

    def test_no_checkpoint(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="no checkpoint"):
            generate.find_checkpoint(tmp_path)

    def test_distributed_checkpoint(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A folder is read by the package's own functions."""
        checkpoint = pytest.importorskip("lnn_lightning.checkpoint")
        model = tiny()
        monkeypatch.setattr(checkpoint, "load_full_state_dict", lambda path: model.state_dict(), raising=False)
        monkeypatch.setattr(
            checkpoint, "load_metadata", lambda path: {"hyper_parameters": dict(model.hparams)}, raising=False
        )
        copy = generate.build(*generate.load(tmp_path))
        tokens = torch.randint(256, (2, 16))
        assert torch.equal(copy(tokens), model.eval()(tokens))
