"""A rank of two hosts that averages gradients between them, and counts what its host sends.

python -m tests.communication.between_hosts RANK ADDRESS PORT FOLDER
"""

import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

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


def start(host: int, *args: Any) -> int:
    """Both ranks; 0 if they ended well."""
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=main, args=(2 * host + each, *args)) for each in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    return max(abs(each.exitcode or 0) for each in ranks)


if __name__ == "__main__":
    sys.exit(start(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])))
