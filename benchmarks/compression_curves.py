"""What compression does to the demo's loss, and the picture of it.

    python -m benchmarks.compression_curves train runs/curves                 # every curve: an hour on two cores
    python -m benchmarks.compression_curves train runs/curves --only none "PowerSGD, rank 4" --seeds 1 2
    python -m benchmarks.compression_curves table runs/curves
    python -m benchmarks.compression --only demo --save runs/times.json       # seconds a step on a slow link
    python -m benchmarks.compression_curves draw runs/curves --times runs/times.json    # needs matplotlib

The training is that of configs/gpt_single.yaml (data, model, 600 steps, the batch of 32 in two halves), in the Trainer
with `PTDPStrategy(data_parallel_size=2, gradient_compression=...)`. Each contestant and seed leaves one JSON file. The
picture's seconds are steps times the lowest time of a step on the link, not a clock beside the training.
"""

import argparse
import contextlib
import io
import json
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lnn_lightning import PTDPStrategy
from lnn_lightning.communication import Cast, Compression, LocalSGD, OneBit, PowerSGD, Quantized, TopK
from tests.helpers.ranks import launch_ranks

STEPS, EVERY = 600, 50

NONE = "none"
CONTESTANTS: dict[str, Compression | None] = {
    NONE: None,
    "PowerSGD, rank 4": PowerSGD(rank=4),
    "PowerSGD, rank 16, bf16 factors": PowerSGD(rank=16, start_step=50, factors="bf16"),
    "PowerSGD, rank 32, bf16 factors": PowerSGD(rank=32, factors="bf16"),
    "TopK, 1%": TopK(density=0.01),
    "OneBit": OneBit(start_step=50),
    "Quantized, 8 bits": Quantized(bits=8),
    "Quantized, 4 bits": Quantized(bits=4),
    "Cast, bf16": Cast("bf16"),
    "LocalSGD, every 8": LocalSGD(every=8, start_step=50),
}


class Curve(pl.Callback):
    """Validation loss by step."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.losses: list[float] = []

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.steps.append(trainer.global_step)
            self.losses.append(float(trainer.callback_metrics["val_loss"]))


def train(
    rank: int, world_size: int, compression: Compression | None, seed: int, steps: int, every: int
) -> dict[str, Any]:
    """One training of the demo; runs on each rank."""
    from examples.gpt import ByteGPT
    from examples.text import TextFolder

    pl.seed_everything(seed, verbose=False)
    curve = Curve()
    strategy = PTDPStrategy(data_parallel_size=world_size, gradient_compression=compression)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy,
        max_steps=steps,
        val_check_interval=every,
        check_val_every_n_epoch=None,
        limit_val_batches=16,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[curve],
    )
    module = ByteGPT(n_layer=4, n_head=4, n_embd=128, block_size=128, lr=0.004, warmup_steps=50)
    start = time.perf_counter()
    trainer.fit(module, datamodule=TextFolder(block_size=128, batch_size=32 // world_size))
    traffic = strategy._compressors.traffic if strategy._compressors is not None else None
    return {
        "steps": curve.steps,
        "losses": curve.losses,
        "seconds": time.perf_counter() - start,
        "bytes": traffic.payload if traffic is not None else None,
        "plain": traffic.plain if traffic is not None else None,
    }


def run(name: str, compression: Compression | None, seed: int, folder: Path, steps: int, every: int) -> dict[str, Any]:
    """Trains and keeps the curve."""
    with contextlib.redirect_stdout(io.StringIO()):
        found = launch_ranks(train, 2, compression, seed, steps, every, timeout=3600)[0]
    found |= {"name": name, "seed": seed, "settings": repr(compression)}
    folder.mkdir(parents=True, exist_ok=True)
    slug = "".join(c if c.isalnum() else "_" for c in name)
    (folder / f"{slug}-{seed}.json").write_text(json.dumps(found))
    return found


# ------------------------------------------------------------------------------------------------ what came of it


def kept(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Curves by contestant, one for each seed, the best contestant first."""
    curves: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text())
        curves.setdefault(found["name"], []).append(found)
    return dict(sorted(curves.items(), key=lambda item: final(item[1])))


def final(curves: list[dict[str, Any]]) -> float:
    """Loss behind the last step, of the first seed."""
    return curves[0]["losses"][-1]


def table(folder: Path) -> str:
    """Losses of the first seed at a third, two thirds and the end; those at the end beside none's, of each seed."""
    curves = kept(folder)
    none = {curve["seed"]: curve["losses"][-1] for curve in curves[NONE]}
    marks = [STEPS // 3, 2 * STEPS // 3, STEPS]
    lines = [
        f"| | gradients / handed over | {' | '.join(f'step {mark}' for mark in marks)} | to none, by seed |",
        "|---" * (len(marks) + 3) + "|",
    ]
    for name, each in curves.items():
        losses = [f"{each[0]['losses'][each[0]['steps'].index(mark)]:.3f}" for mark in marks]
        ratio = f"{each[0]['plain'] / each[0]['bytes']:.1f}" if each[0]["bytes"] else ""
        worse = [f"{100 * (c['losses'][-1] / none[c['seed']] - 1):+.2f}%" for c in each if c["seed"] in none]
        lines.append(f"| {name} | {ratio} | {' | '.join(losses)} | {', '.join(worse)} |")
    return "\n".join(lines)


def apart(heights: list[float], gap: float) -> list[float]:
    """Heights of labels, from below, moved up where they would lie on each other."""
    moved: list[float] = []
    for height in heights:
        moved.append(max(height, moved[-1] + gap) if moved else height)
    return moved


def draw(folder: Path, times: dict[str, float], picture: Path) -> None:
    """Loss over steps, and over seconds on the link."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "curves"  # the same file each time
    curves = {name: each[0] for name, each in kept(folder).items() if name in times}
    figure, (by_step, by_time) = pyplot.subplots(1, 2, figsize=(11, 4.6), sharey=True)
    colours = dict(zip(curves, pyplot.get_cmap("tab10").colors, strict=False))
    lowest = min(min(curve["losses"]) for curve in curves.values())
    highest = max(curve["losses"][-1] for curve in curves.values())
    labels = apart([curve["losses"][-1] for curve in curves.values()], 0.032)
    for (name, curve), label in zip(curves.items(), labels, strict=True):
        style = {"color": "black" if name == NONE else colours[name], "linewidth": 2.2 if name == NONE else 1.4}
        by_step.plot(curve["steps"], curve["losses"], **style)
        begin = getattr(CONTESTANTS[name], "start_step", 0)
        seconds = [min(step, begin) * times[NONE] + max(step - begin, 0) * times[name] for step in curve["steps"]]
        by_time.plot(seconds, curve["losses"], **style)
        by_time.plot(seconds[-1], curve["losses"][-1], "o", color=style["color"], markersize=4)
        by_step.annotate(
            name.removesuffix(" factors"),
            (curve["steps"][-1], curve["losses"][-1]),
            (STEPS * 1.06, label),
            arrowprops={"arrowstyle": "-", "color": style["color"], "linewidth": 0.5, "shrinkA": 0, "relpos": (0, 0.5)},
            color=style["color"],
            fontsize=9,
            va="center",
            annotation_clip=False,
        )
    by_step.set(xlabel="optimizer step", ylabel="validation loss (nats a byte)", ylim=(lowest - 0.05, highest + 0.7))
    by_step.set_title("at equal steps", fontsize=10)
    by_time.set(xlabel="seconds, with the step times of a 100 Mbit/s link")
    by_time.set_title("at equal time on a slow link (dots: step 600)", fontsize=10)
    for axes in by_step, by_time:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    by_step.set_xlim(0, STEPS)
    by_time.set_xlim(left=0)
    figure.subplots_adjust(left=0.06, right=0.985, top=0.92, bottom=0.12, wspace=0.55)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110, metadata={"Date": None} if picture.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["train", "table", "draw"])
    parser.add_argument("folder", type=Path, help="where the curves are kept")
    parser.add_argument("--only", nargs="+", default=list(CONTESTANTS), help="contestants to train")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--times", type=Path, help="of benchmarks.compression --save")
    parser.add_argument("--picture", type=Path, default=Path("docs/images/compression_curves.svg"))
    options = parser.parse_args()
    if options.action == "train":
        for seed in options.seeds:
            for name in options.only:
                found = run(name, CONTESTANTS[name], seed, options.folder, options.steps, options.steps // 12)
                print(f"{name}, seed {seed}: {found['losses'][-1]:.4f} after {found['seconds']:.0f} s", flush=True)
    elif options.action == "table":
        print(table(options.folder))
    else:
        draw(options.folder, json.loads(options.times.read_text()), options.picture)


if __name__ == "__main__":
    main()
