"""Text from a folder on this machine, as windows of bytes. Downloads nothing."""

import hashlib
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

END_OF_FILE = b"\0"  # stands before and after each file: text has no such byte
NOT_TEXT_OF_THE_FOLDER = {"site-packages", "dist-packages", "__pycache__"}


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text: `block_size` bytes, and the same bytes one further on.

    Args:
        data: The whole text, uint8, one dimension.
        starts: Where each window begins.
        block_size: Bytes per window.
    """

    def __init__(self, data: Tensor, starts: Tensor, block_size: int) -> None:
        self.data = data
        self.starts = starts
        self.block_size = block_size

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = int(self.starts[index])
        window = self.data[start : start + self.block_size + 1].long()
        return window[:-1], window[1:]


class TextFolder(LightningDataModule):
    """The text files of a folder, split by file into training (90%) and validation.

    Args:
        folder: Any folder with text files, searched to its depths. None: the source of this Python's standard library.
        suffixes: Which files count as text.
        block_size: Bytes per window: the context of the model.
        batch_size: Windows per batch of one data-parallel rank.
        samples_per_epoch: Windows drawn at random (the same in every epoch) for training. None: the whole text once,
            window by window.
        val_fraction: Share of the files that is kept for validation.
        num_workers: Processes that load data; 0 loads in the training process.
        seed: For the windows that are drawn.
    """

    def __init__(
        self,
        folder: str | None = None,
        suffixes: tuple[str, ...] = (".py",),
        block_size: int = 256,
        batch_size: int = 16,
        samples_per_epoch: int | None = None,
        val_fraction: float = 0.1,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.folder = Path(folder) if folder is not None else Path(sysconfig.get_paths()["stdlib"])
        self.suffixes = suffixes
        self.block_size = block_size
        self.batch_size = batch_size
        self.samples_per_epoch = samples_per_epoch
        self.val_fraction = val_fraction
        self.num_workers = num_workers
        self.seed = seed
        self.train: Windows | None = None
        self.val: Windows | None = None

    def setup(self, stage: str) -> None:
        if self.train is not None:
            return
        train_files, val_files = split(find(self.folder, self.suffixes), self.folder, self.val_fraction)
        train, val = read(train_files), read(val_files)
        draw = torch.Generator().manual_seed(self.seed)
        starts = every_start(train, self.block_size)
        if self.samples_per_epoch is not None:
            starts = torch.randint(len(train) - self.block_size, (self.samples_per_epoch,), generator=draw)
        self.train = Windows(train, starts, self.block_size)
        # Shuffled once and for all, so that the first few batches are a fair sample: see `limit_val_batches`.
        starts = every_start(val, self.block_size)
        starts = starts[torch.randperm(len(starts), generator=draw)]
        self.val = Windows(val, starts, self.block_size)

    def train_dataloader(self) -> DataLoader:
        return self._loader(self.train, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return self._loader(self.val)

    def test_dataloader(self) -> DataLoader:
        return self._loader(self.val)

    def predict_dataloader(self) -> DataLoader:
        return self._loader(self.val)

    def _loader(self, windows: Windows | None, shuffle: bool = False, drop_last: bool = False) -> DataLoader:
        if windows is None:
            raise RuntimeError("TextFolder.setup() has not been called yet.")
        return DataLoader(
            windows, batch_size=self.batch_size, shuffle=shuffle, drop_last=drop_last, num_workers=self.num_workers
        )


def find(folder: Path, suffixes: Iterable[str]) -> list[Path]:
    """The text files below a folder, in one order on every machine, without hidden and installed ones."""
    suffixes = set(suffixes)
    files = []
    for path in folder.rglob("*"):
        parts = path.relative_to(folder).parts
        hidden = any(part.startswith(".") or part in NOT_TEXT_OF_THE_FOLDER for part in parts)
        if path.suffix in suffixes and not hidden and path.is_file():
            files.append(path)
    return sorted(files, key=lambda path: path.relative_to(folder).as_posix())


def split(files: list[Path], folder: Path, val_fraction: float) -> tuple[list[Path], list[Path]]:
    """Files for training and for validation. A file's name decides, so new files don't move the old ones."""
    if len(files) < 2:
        raise ValueError(f"{folder} has {len(files)} text file(s); at least two are needed: one is for validation.")
    places = {path: place_of(path.relative_to(folder)) for path in files}
    # Of very few files the names may put all on one side: one is moved then.
    edge = sorted(places.values())
    limit = min(max(val_fraction, edge[0]), edge[-2])
    return [p for p in files if places[p] > limit], [p for p in files if places[p] <= limit]


def place_of(name: Path) -> float:
    """A number in [0, 1), even over all names and always the same for one."""
    digest = hashlib.sha256(name.as_posix().encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def read(files: Iterable[Path]) -> Tensor:
    """All files as one uint8 tensor."""
    text = END_OF_FILE + b"".join(path.read_bytes() + END_OF_FILE for path in files)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def every_start(data: Tensor, block_size: int) -> Tensor:
    """Starts of the windows that cover a text once, side by side."""
    if len(data) <= block_size:
        raise ValueError(f"{len(data)} bytes of text are too few for a window of {block_size}; give more text.")
    return torch.arange(0, len(data) - block_size, block_size)
