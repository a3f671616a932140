"""Hand-written vision models."""

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from tests.zoo.base import Case, Lit, images, mapped

CLASSES = 5


class Classifier(Lit):
    """Images in, cross entropy out; the models differ in `forward`."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss


# ---------------------------------------------------------------- ResNet, in torchvision's manner


class BasicBlock(nn.Module):
    def __init__(self, inplanes: int, planes: int, stride: int = 1, downsample: nn.Module | None = None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.inplanes = 8
        self.conv1 = nn.Conv2d(3, 8, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = self._make_layer(8, 2)
        self.layer2 = self._make_layer(12, 2, stride=2)
        self.layer3 = self._make_layer(16, 2, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(16, CLASSES)

    def _make_layer(self, planes: int, blocks: int, stride: int = 1) -> nn.Sequential:
        downsample = None
        if stride != 1 or self.inplanes != planes:
            downsample = nn.Sequential(nn.Conv2d(self.inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))
        layers = [BasicBlock(self.inplanes, planes, stride, downsample)]
        self.inplanes = planes
        layers += [BasicBlock(planes, planes) for _ in range(1, blocks)]
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(torch.flatten(self.avgpool(x), 1))


# ---------------------------------------------------------------- U-Net


def double_conv(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.GroupNorm(2, outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.GroupNorm(2, outputs),
        nn.ReLU(inplace=True),
    )


class UNet(Lit):
    """Concatenating skips from every level over the bottom; the target is an image."""

    def __init__(self) -> None:
        super().__init__()
        widths = [4, 6, 8]
        self.downs = nn.ModuleList([double_conv(i, o) for i, o in zip([3, *widths[:-1]], widths, strict=True)])
        self.pool = nn.MaxPool2d(2)
        self.bottom = double_conv(8, 12)
        self.ups = nn.ModuleList([nn.ConvTranspose2d(i, o, 2, 2) for i, o in [(12, 8), (8, 6), (6, 4)]])
        self.decoders = nn.ModuleList([double_conv(2 * w, w) for w in reversed(widths)])
        self.out = nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.downs:
            x = down(x)
            skips.append(x)
            x = self.pool(x)
        x = self.bottom(x)
        for up, decoder, skip in zip(self.ups, self.decoders, reversed(skips), strict=True):
            x = decoder(torch.cat([skip, up(x)], dim=1))
        return self.out(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        loss = F.mse_loss(self(x), torch.tanh(x))
        self.log("train_loss", loss)
        return loss


class DiffusionUNet(Lit):
    """In the manner of lucidrains: nested lists of blocks, the last level without down-sampling, a time embedding."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.init_conv = nn.Conv2d(3, width, 3, padding=1)
        self.time_mlp = nn.Sequential(nn.Linear(1, 8), nn.GELU(), nn.Linear(8, 8))
        self.downs = nn.ModuleList([])
        self.ups = nn.ModuleList([])
        for level in range(3):
            last = level == 2
            down = None if last else nn.Conv2d(width, width, 4, 2, 1)
            self.downs.append(nn.ModuleList([TimeBlock(width), TimeBlock(width), down]))
        self.mid = TimeBlock(width)
        for level in range(3):
            last = level == 2
            up = None if last else nn.ConvTranspose2d(width, width, 2, 2)
            self.ups.append(nn.ModuleList([TimeBlock(2 * width, width), up]))
        self.final = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x = self.init_conv(x)
        t = self.time_mlp(time[:, None])
        skips = []
        for block1, block2, down in self.downs:
            x = block2(block1(x, t), t)
            skips.append(x)
            if down is not None:
                x = down(x)
        x = self.mid(x, t)
        for block, up in self.ups:
            x = block(torch.cat((x, skips.pop()), dim=1), t)
            if up is not None:
                x = up(x)
        return self.final(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.mse_loss(self(x, y.to(x.dtype)), torch.sin(x))
        self.log("train_loss", loss)
        return loss


class TimeBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int | None = None) -> None:
        super().__init__()
        outputs = outputs or inputs
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm = nn.GroupNorm(2, outputs)
        self.time = nn.Linear(8, outputs)
        self.res = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.res(x) + F.silu(self.norm(self.conv(x)) + self.time(t)[:, :, None, None])


# ---------------------------------------------------------------- vision transformers


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


class LayerScale(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(0.5 * torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class ViTBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim)
        self.ls1, self.ls2 = LayerScale(dim), LayerScale(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.drop_path = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.ls1(self.attn(self.norm1(x))))
        return x + self.drop_path(self.ls2(self.mlp(self.norm2(x))))


class PatchEmbed(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, dim, 4, 4)
        self.norm = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.proj(x).flatten(2).transpose(1, 2))


class TimmViT(Classifier):
    """timm's structure: `blocks` is a Sequential that is called whole; class token and positions are glue."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 17, dim))
        self.pos_drop = nn.Dropout(p=0.0)
        self.norm_pre = nn.Identity()
        self.blocks = nn.Sequential(*[ViTBlock(dim) for _ in range(4)])
        self.norm = nn.LayerNorm(dim)
        self.fc_norm = nn.Identity()
        self.head_drop = nn.Dropout(0.0)
        self.head = nn.Linear(dim, CLASSES)

    def _pos_embed(self, x: Tensor) -> Tensor:
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        return self.pos_drop(x + self.pos_embed)

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.norm_pre(self._pos_embed(self.patch_embed(x)))
        return self.norm(self.blocks(x))

    def forward_head(self, x: Tensor) -> Tensor:
        return self.head(self.head_drop(self.fc_norm(x[:, 0])))

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


class ClsToken(Classifier):
    """CaiT's idea: the class token, a bare parameter, enters only before the last blocks."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, 4)
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 16, dim))
        self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, dim))
        self.blocks = nn.ModuleList([ViTBlock(dim) for _ in range(3)])
        self.token_blocks = nn.ModuleList([ViTBlock(dim) for _ in range(3)])
        self.scale = nn.Parameter(torch.ones(()))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        token = self.cls_token.expand(x.size(0), -1, -1)
        for block in self.token_blocks:
            token = token + block(torch.cat([token, x], dim=1))[:, :1]
        return self.head(self.norm(token[:, 0] * self.scale))


class WindowBlock(nn.Module):
    """Swin's block: attention in windows, every other one shifted."""

    def __init__(self, dim: int, shift: int, window: int = 2) -> None:
        super().__init__()
        self.shift, self.window = shift, window
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        B, H, W, C = x.shape
        w = self.window
        h = self.norm1(x)
        if self.shift:
            h = torch.roll(h, (-self.shift, -self.shift), (1, 2))
        h = h.view(B, H // w, w, W // w, w, C).permute(0, 1, 3, 2, 4, 5).reshape(-1, w * w, C)
        h = self.attn(h).view(B, H // w, W // w, w, w, C).permute(0, 1, 3, 2, 4, 5).reshape(B, H, W, C)
        if self.shift:
            h = torch.roll(h, (self.shift, self.shift), (1, 2))
        x = x + h
        return x + self.mlp(self.norm2(x))


class PatchMerging(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * dim)
        self.reduction = nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)], dim=-1)
        return self.reduction(self.norm(x))


class SwinStage(nn.Module):
    def __init__(self, dim: int, depth: int, downsample: bool) -> None:
        super().__init__()
        self.downsample = PatchMerging(dim // 2) if downsample else nn.Identity()
        self.blocks = nn.Sequential(*[WindowBlock(dim, shift=i % 2) for i in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.downsample(x))


class Swin(Classifier):
    """Stages within stages: the trunk's elements hold trunks."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 8, 2, 2)
        self.layers = nn.Sequential(SwinStage(8, 2, False), SwinStage(16, 4, True), SwinStage(32, 2, True))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(self.patch_embed(x).permute(0, 2, 3, 1))
        return self.head(self.norm(x).mean(dim=(1, 2)))


class MixerBlock(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.net = nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.net(self.norm(x))).transpose(1, 2)


class Mixer(Classifier):
    """Every block returns a transposed view: what crosses the cut is not contiguous."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, 4)
        self.blocks = nn.ModuleList([MixerBlock(dim) for _ in range(6)])
        self.head = nn.Linear(dim, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=1))


_images = images(16, CLASSES)

CASES = [
    Case("resnet", ResNet, _images, 6, "torchvision's ResNet with BatchNorm and in-place additions", per_sample=False),
    Case("unet", UNet, _images, 7, "concatenated skips over the cut; a loss that needs the inputs"),
    Case("diffusion_unet", DiffusionUNet, _images, 6, "nested ModuleLists with None in them; time embedding"),
    Case("timm_vit", TimmViT, _images, 4, "blocks in a Sequential called whole; glue parameters before it"),
    Case("cls_token", ClsToken, _images, 6, "a glue parameter that enters in the middle"),
    Case("swin", Swin, _images, 8, "hierarchical stages"),
    Case("mixer", Mixer, mapped(_images, list), 6, "non-contiguous values between blocks; list batches"),
]
