"""Convolutional models written as torchvision writes them, and a count of what a forward leaves alive."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.zoo.vision import BasicBlock


class VGG(nn.Module):
    """VGG; a number: channels of a convolution, "M": a max-pool."""

    SMALL = (16, 16, "M", 32, 32, "M", 64, 64, 64, "M", 64, 64, 64, "M")
    SIXTEEN = (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M")

    def __init__(self, plan: Any = SMALL, classes: int = 10, batch_norm: bool = False) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for each in plan:
            if each == "M":
                layers.append(nn.MaxPool2d(kernel_size=2, stride=2))
            else:
                norm = [nn.BatchNorm2d(each)] if batch_norm else []
                layers += [nn.Conv2d(channels, each, 3, padding=1), *norm, nn.ReLU(inplace=True)]
                channels = each
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = nn.Sequential(
            nn.Linear(channels * 4, 128), nn.ReLU(True), nn.Dropout(0.1), nn.Linear(128, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


class ResNet(nn.Module):
    """ResNet of basic blocks."""

    def __init__(self, width: int = 16, blocks: tuple[int, ...] = (2, 2, 2), classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        layers: list[nn.Module] = []
        inside = width
        for stage, count in enumerate(blocks):
            outside = width * 2**stage
            for index in range(count):
                stride = 2 if stage and not index else 1
                shorter: nn.Module | None = None
                if stride != 1 or inside != outside:
                    shorter = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))
                layers.append(BasicBlock(inside, outside, stride, shorter))
                inside = outside
        self.layers = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(inside, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(self.maxpool(self.relu(self.bn1(self.conv1(x)))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class _Made(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                reference = StorageWeakRef(leaf.untyped_storage())
                self.storages[reference.cdata] = reference
        return out


def alive_after(forward: Callable[[], Any], before: Any) -> int:
    """Bytes that a forward made and that are alive behind it, whoever holds them; without what was there before."""
    known = {each.untyped_storage()._cdata for each in before}
    with _Made() as made:
        result = forward()
    alive = 0
    for cdata, reference in made.storages.items():
        if cdata not in known and not reference.expired():
            alive += torch.UntypedStorage._new_with_weak_ptr(cdata).nbytes()
    del result
    return alive
