"""A picture of the load of experts over time: one row an expert, one column a time, block below block.

White is an even share, blue less, red more; each step of the scale is a factor of two, and a quarter or four times the
share is as far as it goes.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping
from html import escape

import torch
from torch import Tensor

_COLUMNS = 256
_BLUE, _WHITE, _RED = (33, 102, 172), (247, 247, 247), (178, 24, 43)
_MARGIN, _GAP, _TEXT = 16, 8, 220
_FURTHEST = 2.0
"""Factors of two from an even share."""


class LoadHistory:
    """Loads of experts as they were noted; neighbours in time are averaged once there are many.

    Attributes:
        steps: where the columns begin.
        last: the latest step noted.
    """

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.last = 0
        self._columns: dict[str, list[Tensor]] = {}
        self._each, self._open = 1, 0

    def add(self, step: int, loads: Mapping[str, Tensor]) -> None:
        """Notes the load of each expert of each block at a step; the blocks are the same every time."""
        self.last = step
        shares = {name: _shares(load.double().cpu()) for name, load in loads.items()}
        if self._open == 0:
            self.steps.append(step)
        for name, share in shares.items():
            columns = self._columns.setdefault(name, [])
            if self._open == 0:
                columns.append(share)
            else:
                columns[-1] = (columns[-1] * self._open + share) / (self._open + 1)
        self._open = (self._open + 1) % self._each
        if len(self.steps) > _COLUMNS and self._open == 0:
            self._halve()

    def _halve(self) -> None:
        """Pairs of columns become one; the last may be left over and half full."""
        whole = len(self.steps) % 2 == 0
        for name, columns in self._columns.items():
            pairs = [torch.stack(columns[index : index + 2]).mean(0) for index in range(0, len(columns), 2)]
            self._columns[name] = pairs
        self.steps = self.steps[::2]
        self._open = 0 if whole else self._each
        self._each *= 2

    def shares(self) -> dict[str, Tensor]:
        """Block -> load over an even share, [experts, columns]."""
        return {name: torch.stack(columns, 1) for name, columns in self._columns.items()}

    def image(self) -> Tensor:
        """The picture, [3, height, width] uint8."""
        panels = list(self.shares().values())
        width = max((panel.shape[1] for panel in panels), default=1)
        across = max(512 // width, 1)
        rows = [_coloured(panel, across, _row_height(len(panel))) for panel in panels]
        gap = torch.full((3, _GAP, width * across), 255, dtype=torch.uint8)
        parts = [part for row in rows for part in (row, gap)][:-1]
        return torch.cat(parts, 1) if parts else gap

    def svg(self) -> str:
        """The picture with names and steps."""
        image = self.image()
        _, height, width = image.shape
        total = width + _TEXT + 2 * _MARGIN, height + 4 * _MARGIN
        text, top = [], _MARGIN
        for name, panel in self.shares().items():
            high = len(panel) * _row_height(len(panel))
            label = escape(f"{name} ({len(panel)})")
            text.append(f'<text x="{width + 2 * _MARGIN}" y="{top + high / 2 + 4:.0f}">{label}</text>')
            top += high + _GAP
        foot = height + 2 * _MARGIN + 8
        first = self.steps[0] if self.steps else 0
        text.append(f'<text x="{_MARGIN}" y="{foot}">step {first}</text>')
        text.append(f'<text x="{_MARGIN + width}" y="{foot}" text-anchor="end">step {self.last}</text>')
        legend = "load of each expert: white an even share, blue down to a quarter of it, red up to four times"
        text.append(f'<text x="{_MARGIN}" y="{foot + _MARGIN}">{legend}</text>')
        data = base64.b64encode(png(image)).decode()
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{total[0]}" height="{total[1]}" '
            'font-family="sans-serif" font-size="11">\n'
            f'<rect width="100%" height="100%" fill="white"/>\n<image x="{_MARGIN}" y="{_MARGIN}" width="{width}" '
            f'height="{height}" href="data:image/png;base64,{data}"/>\n' + "\n".join(text) + "\n</svg>\n"
        )


def png(image: Tensor) -> bytes:
    """A picture [3, height, width] uint8 as a PNG file."""
    _, height, width = image.shape
    rows = image.permute(1, 2, 0).reshape(height, -1)
    lines = torch.cat([rows.new_zeros((height, 1)), rows], 1)  # each line begins with the number of its filter: none
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(bytes(lines.flatten().tolist()), 9)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", body) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _shares(load: Tensor) -> Tensor:
    """Loads over an even share; an even share each where there is no load."""
    total = load.sum()
    return load * len(load) / total if total > 0 else torch.ones_like(load)


def _row_height(experts: int) -> int:
    return max(min(160 // experts, 16), 2)


def _coloured(shares: Tensor, across: int, down: int) -> Tensor:
    """[experts, columns] -> [3, experts * down, columns * across] uint8."""
    far = (shares.clamp_min(2.0**-_FURTHEST).log2() / _FURTHEST).clamp(-1, 1)
    blue, white, red = (torch.tensor(colour, dtype=far.dtype).view(3, 1, 1) for colour in (_BLUE, _WHITE, _RED))
    colour = white + far.clamp_min(0) * (red - white) + (-far).clamp_min(0) * (blue - white)
    return colour.round().to(torch.uint8).repeat_interleave(down, 1).repeat_interleave(across, 2)
