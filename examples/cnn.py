"""A VGG-like network that reads digits, and digits that are drawn here: an ordinary LightningModule, no download."""

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

# Seven segments of a display: top, upper left, upper right, middle, lower left, lower right, bottom.
SEGMENTS = (
    "1110111",
    "0010010",
    "1011101",
    "1011011",
    "0111010",
    "1101011",
    "1101111",
    "1010010",
    "1111111",
    "1111011",
)
PLACES = (
    (slice(4, 7), slice(10, 22)),
    (slice(6, 15), slice(8, 11)),
    (slice(6, 15), slice(21, 24)),
    (slice(14, 17), slice(10, 22)),
    (slice(16, 26), slice(8, 11)),
    (slice(16, 26), slice(21, 24)),
    (slice(25, 28), slice(10, 22)),
)
SIZE = 32


class DigitVGG(LightningModule):
    """Three stages of two convolutions and a pool, as in VGG, and a layer that tells ten digits apart.

    Args:
        width: Channels of the first stage; each of the others has twice as many as the one before.
        lr: Learning rate.
    """

    def __init__(self, width: int = 32, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        layers: list[nn.Module] = []
        given = 1
        for made in (width, 2 * width, 4 * width):
            layers += [nn.Conv2d(given, made, 3, padding=1), nn.ReLU(), nn.Conv2d(made, made, 3, padding=1), nn.ReLU()]
            layers += [nn.MaxPool2d(2)]
            given = made
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(given * (SIZE // 8) ** 2, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Scores of the ten digits for each image (batch, 1, 32, 32)."""
        return self.classifier(self.features(images).flatten(1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        right = (self(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("val_accuracy", right, on_epoch=True, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class DrawnDigits(LightningDataModule):
    """Digits of a seven-segment display, moved, of different brightness, with noise.

    Args:
        samples: Images for training; a quarter as many more for validation.
        batch_size: Images per batch of one data-parallel rank.
        seed: For what is drawn; the same on every process.
    """

    def __init__(self, samples: int = 4096, batch_size: int = 64, seed: int = 0) -> None:
        super().__init__()
        self.samples = samples
        self.batch_size = batch_size
        self.seed = seed

    def train_dataloader(self) -> DataLoader:
        return DataLoader(draw(self.samples, self.seed), self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(draw(self.samples // 4, self.seed + 1), self.batch_size)


def draw(count: int, seed: int) -> TensorDataset:
    """Images (count, 1, 32, 32) and the digits on them."""
    random = torch.Generator().manual_seed(seed)
    digits = torch.randint(10, (count,), generator=random)
    patterns = torch.zeros(10, SIZE, SIZE)
    for digit, segments in enumerate(SEGMENTS):
        for on, place in zip(segments, PLACES, strict=True):
            if on == "1":
                patterns[digit][place] = 1
    moves = torch.randint(-4, 5, (count, 2), generator=random)
    images = torch.stack([patterns[d].roll((int(y), int(x)), (0, 1)) for d, (y, x) in zip(digits, moves, strict=True)])
    bright = torch.rand(count, 1, 1, generator=random) * 0.7 + 0.3
    images = images * bright + 0.3 * torch.randn(images.shape, generator=random)
    return TensorDataset(images.unsqueeze(1), digits)
