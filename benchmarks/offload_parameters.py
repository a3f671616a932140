"""What keeping parameters, gradients and activations in files saves and costs.

    python -m benchmarks.offload_parameters            # about three minutes on two cores

One process, residual MLP blocks. Each way runs in a process of its own, in turns; memory is the most that the process
held (VmHWM) above what it held before the module was made, less what making it took (the peak is counted from the first
step on); what files take in the page cache is beside it, as the most of them that was found there. Times are medians of
the steps behind the first, ratios to the first way of the same round.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

MIB = 2**20
WAYS: dict[str, tuple[str, ...]] = {
    "in memory": (),
    "activations": ("activations",),
    "parameters": ("optimizer", "parameters"),
    "parameters, gradients": ("optimizer", "parameters", "gradients"),
    "all": ("optimizer", "parameters", "gradients", "activations"),
}


def status(field: str) -> float:
    """A line of /proc/self/status, in MiB."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def measure(what: list[str], target: str, blocks: int, width: int, rows: int, steps: int) -> dict[str, float]:
    """Trains in this process."""
    import lightning.pytorch as pl
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    from lnn_lightning import PTDPStrategy
    from lnn_lightning.memory.offload import Offload
    from tests.helpers.reference import quiet_trainer

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.nn.functional.gelu(self.up(x)))

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block() for _ in range(blocks)])

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            for block in self.blocks:
                batch = block(batch)
            return batch.square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1e-3)

    class Clock(pl.Callback):
        def __init__(self) -> None:
            self.times: list[float] = []

        def on_train_batch_start(self, *_: Any) -> None:
            if not self.times:
                with open("/proc/self/clear_refs", "w") as file:
                    file.write("5")  # the peak is counted from here on
            self.times.append(time.perf_counter())

        def on_train_end(self, *_: Any) -> None:
            self.times.append(time.perf_counter())

    torch.manual_seed(0)
    before = status("VmRSS")
    model = Model()
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    offload = Offload(target, what) if what else None
    clock = Clock()
    trainer = quiet_trainer(PTDPStrategy(offload=offload, microbatches=1), 1, max_steps=steps, callbacks=[clock])
    data = torch.randn(steps * rows, width)
    trainer.fit(model, DataLoader(data, batch_size=rows))
    times = [b - a for a, b in zip(clock.times, clock.times[1:], strict=False)]
    return {"peak": status("VmHWM") - before, "time": statistics.median(times[1:]), "parameters": nbytes / MIB}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--target", default=tempfile.gettempdir())
    parser.add_argument("--way", choices=list(WAYS), help="measure one way in this process")
    given = parser.parse_args()
    if given.way:
        sizes = given.blocks, given.width, given.rows, given.steps
        print("RESULT", json.dumps(measure(list(WAYS[given.way]), given.target, *sizes)))
        return
    results: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(given.rounds):
        for way, found in results.items():
            command = [sys.executable, "-m", "benchmarks.offload_parameters", *sys.argv[1:], "--way", way]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            line = next(line for line in output.splitlines() if line.startswith("RESULT"))
            found.append(json.loads(line.removeprefix("RESULT")))
    base = results["in memory"]
    print(f"{given.blocks} blocks, {base[0]['parameters']:.0f} MiB of parameters, {given.rows} rows")
    print(f"{'in files':24} {'peak MiB':>9} {'time':>7}")
    for way, found in results.items():
        ratios = [one["time"] / other["time"] for one, other in zip(found, base, strict=True)]
        print(f"{way:24} {min(one['peak'] for one in found):9.0f} {min(ratios):6.2f}x")


if __name__ == "__main__":
    main()
