"""What Gist keeps of a forward, and what it costs.

    python -m benchmarks.gist            # some minutes on one core
    python -m benchmarks.gist --quick    # seconds

Bytes: all memory that a forward makes and that is alive behind it, whoever holds it. Gradients: the largest relative
error of a parameter's. Time: CPU time of forward and backward beside the plain one, taken in turns, the best of some.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lnn_lightning import Gist
from lnn_lightning.memory.gist import GistOperations
from lnn_lightning.memory.saved_tensors import SavedTensors
from tests.helpers.convolutional import VGG, ResNet, alive_after

SETTINGS: dict[str, Gist | None] = {
    "plain": None,
    "lossless": Gist(),
    "lossless, nothing made again": Gist(rebuild=False),
    "fp16": Gist(dpr="fp16"),
    "fp8": Gist(dpr="fp8"),
}


def measure(name: str, module: nn.Module, size: int, rounds: int) -> None:
    """Prints the rows of a model."""
    images, labels = torch.randn(8, 3, size, size), torch.arange(8)
    there = [*module.parameters(), *module.buffers(), images]
    forwards = {which: forward_of(gist, module, images, labels) for which, gist in SETTINGS.items()}
    bytes_of = {which: alive_after(forward, there) for which, forward in forwards.items()}
    gradients = {which: backward(module, forward) for which, forward in forwards.items()}
    seconds = dict.fromkeys(SETTINGS, float("inf"))
    for _ in range(rounds):
        for which, forward in forwards.items():
            start = time.process_time()
            backward(module, forward)
            seconds[which] = min(seconds[which], time.process_time() - start)
    for which in SETTINGS:
        error = max(
            float((found - reference).norm() / (reference.norm() + 1e-4))
            for found, reference in zip(gradients[which], gradients["plain"], strict=True)
        )
        ratio, slower = bytes_of["plain"] / bytes_of[which], seconds[which] / seconds["plain"]
        print(f"{name:<10} {which:<29} {bytes_of[which] / 1e6:8.1f} {ratio:6.2f} {slower:6.2f}   {error:.1e}")


def forward_of(gist: Gist | None, module: nn.Module, images: Tensor, labels: Tensor) -> Callable[[], Tensor]:
    """The forward under a setting."""
    if gist is None:
        return lambda: F.cross_entropy(module(images), labels)
    operations = GistOperations(gist)
    saved = SavedTensors(encoders=operations.encoders())
    operations.attach(saved)

    def forward() -> Tensor:
        with saved.forward(0, 0), operations.forward(0, 0):
            return F.cross_entropy(module(images), labels)

    return forward


def backward(module: nn.Module, forward: Callable[[], Tensor]) -> list[Tensor]:
    """Forward and backward; the gradients."""
    torch.manual_seed(0)
    module.zero_grad()
    forward().backward()
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{'model':<10} {'setting':<29} {'MB kept':>8} {'ratio':>6} {'time':>6}   gradient error")
    models: dict[str, nn.Module] = (
        {"VGG": VGG(), "ResNet": ResNet()} if quick else {"VGG-16": VGG(VGG.SIXTEEN), "ResNet-18": ResNet(64, (2,) * 4)}
    )
    for name, module in models.items():
        measure(name, module, 64 if name.startswith("VGG") else 96, 2 if quick else 6)


if __name__ == "__main__":
    main()
