"""AdamW with its state in memory and in a file, beside DeepSpeed's CPU offload: time of a step and peak memory.

    python benchmarks/offload.py [--millions 294] [--tokens 96] [--steps 6] [--folder /tmp]

Each row runs in a process of its own, one after another. `compute` is forward and backward alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WIDTH = 2048
KINDS = {
    "compute": "forward and backward alone",
    "memory": "AdamW(fused=True) in memory",
    "synchronous": "offloaded, overlap=False",
    "overlapped": "offloaded, overlap=True",
    "clipped": "offloaded, overlap=True, clipping by norm",
    "deepspeed": "DeepSpeed, ZeRO 2 with CPUAdam",
}


def memory(field: str) -> float:
    """GB that this process holds, by /proc/self/status."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1e6 for line in status if line.startswith(field))


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def blocks(millions: int) -> Any:
    from torch import nn

    count = max(round(millions * 1e6 / (8 * WIDTH**2)), 1)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

        def forward(self, x: Any) -> Any:
            return x + self.down(nn.functional.gelu(self.up(x)))

    return nn.ModuleList(Block() for _ in range(count))


def with_trainer(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    import lightning.pytorch as pl
    import torch

    from lnn_lightning import Offload, PTDPStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.starts = blocks(options.millions), []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1:
                reset_peak()  # what tracing took is over
            self.starts.append(time.perf_counter())
            for block in self.blocks:
                batch = block(batch)
            return batch.square().mean()

        def configure_optimizers(self) -> Any:
            fused = True if kind == "memory" else None
            if kind == "compute":
                return torch.optim.SGD([next(self.parameters())], 0.0)
            return torch.optim.AdamW(self.parameters(), 1e-4, fused=fused)

    torch.manual_seed(0)
    module = Module()
    base = memory("VmRSS") - sum(p.numel() for p in module.parameters()) * 4e-9
    offload = None
    if kind in ("synchronous", "overlapped", "clipped"):
        offload = Offload(options.folder, overlap=kind != "synchronous")
    trainer = pl.Trainer(
        strategy=PTDPStrategy(offload=offload),
        accelerator="cpu",
        devices=1,
        max_steps=options.steps,
        gradient_clip_val=1.0 if kind == "clipped" else None,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches = torch.randn(options.steps + 1, options.tokens, WIDTH)
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
    module.starts.append(time.perf_counter())
    return report(module, module.starts, base)


def with_deepspeed(options: argparse.Namespace) -> dict[str, Any]:
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555", "LOCAL_SIZE": "1"}
    import deepspeed
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = blocks(options.millions)

        def forward(self, batch: Any) -> Any:
            for block in self.blocks:
                batch = block(batch)
            return batch.square().mean()

    torch.manual_seed(0)
    module = Model()
    base = memory("VmRSS") - sum(p.numel() for p in module.parameters()) * 4e-9
    config = {
        "train_micro_batch_size_per_gpu": options.tokens,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "zero_force_ds_cpu_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=DeepSpeedCPUAdam(module.parameters(), 1e-4), config=config, dist_init_required=True
    )
    starts = []
    for step in range(options.steps):
        if step == 1:
            reset_peak()
        starts.append(time.perf_counter())
        loss = engine(torch.randn(options.tokens, WIDTH))
        engine.backward(loss)
        engine.step()
    starts.append(time.perf_counter())
    return report(module, starts, base)


def report(module: Any, starts: list[float], base: float) -> dict[str, Any]:
    import torch

    steps = sorted(b - a for a, b in zip(starts[2:], starts[3:], strict=False))
    numel = sum(p.numel() for p in module.parameters())
    total = float(sum(p.detach().double().sum() for p in module.parameters()))
    return {
        "step": steps[len(steps) // 2],
        "best": steps[0],
        "parameters": numel,
        "above": memory("VmHWM") - base - numel * 8e-9,
        "peak": memory("VmHWM"),
        "sum": total,
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=294)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--deepspeed-python", default=sys.executable, help="interpreter that has DeepSpeed")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--only", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only is not None:
        found = with_deepspeed(options) if options.only == "deepspeed" else with_trainer(options.only, options)
        print("RESULT " + json.dumps(found))
        return
    results: dict[str, dict[str, Any]] = {}
    given = ["--millions", str(options.millions), "--tokens", str(options.tokens), "--steps", str(options.steps)]
    for kind in options.kinds:
        python = options.deepspeed_python if kind == "deepspeed" else sys.executable
        command = [python, __file__, "--only", kind, "--folder", options.folder, *given]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if not lines:
            print(f"{KINDS[kind]}: did not run ({(done.stderr.strip().splitlines() or ['no message'])[-1]})")
            continue
        results[kind] = json.loads(lines[0].removeprefix("RESULT "))
        print(f"{KINDS[kind]}: {results[kind]}", flush=True)
    reference = results.get("memory")
    print(f"\n{'':44}{'step':>8}{'ratio':>8}{'peak RSS':>10}{'ratio':>8}{'above p + g':>13}")
    for kind, found in results.items():
        ratio = [found[key] / reference[key] if reference else float("nan") for key in ("step", "peak")]
        print(
            f"{KINDS[kind]:44}{found['step']:7.2f}s{ratio[0]:8.2f}{found['peak']:8.2f}GB{ratio[1]:8.2f}"
            f"{found['above']:11.2f}GB"
        )


if __name__ == "__main__":
    main()
