"""A rank of two hosts that averages gradients between them, and counts what its host sends.

python -m tests.communication.between_hosts RANK ADDRESS PORT FOLDER
"""

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from lnn_lightning.communication import Hierarchical, PowerSGD
from lnn_lightning.communication.compression import Ranks

WORLD = 4
SHAPE = (1024, 512)
STEPS = 5


def sent_by_host() -> int:
    """Bytes on the link to the other host."""
    (link,) = (path for path in Path("/sys/class/net").iterdir() if path.name.startswith("v"))
    return int((link / "statistics" / "tx_bytes").read_text())


def main(rank: int, address: str, port: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://{address}:{port}", rank=rank, world_size=WORLD)
    found = {}
    for name, settings in (("exact", Hierarchical(inner=PowerSGD(4))), ("low rank", Hierarchical(outer=PowerSGD(4)))):
        compressor = settings.compressor(Ranks(dist.group.WORLD))  # type: ignore[arg-type]
        compressor.reduce({"w": torch.ones(SHAPE)})
        dist.barrier()
        before, counted = sent_by_host(), compressor.levels["outer"].sent
        for step in range(STEPS):
            compressor.reduce({"w": torch.randn(SHAPE, generator=torch.Generator().manual_seed(10 * step + rank))})
        dist.barrier()
        found[name] = sent_by_host() - before, compressor.levels["outer"].sent - counted
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
