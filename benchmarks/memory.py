"""Bytes that a rank holds under each memory technique, predicted and measured.

    python -m benchmarks.memory            # about two minutes on two cores
    python -m benchmarks.memory --only "zero 3"

A GPT of 6 layers of width 384 (examples/gpt.py), 128 bytes of context, 8 samples a rank, AdamW, on two processes. The
first rank is shown. Predicted is what `lnn-lightning memory` says; measured are the bytes of the tensors in two steps.
"""

import argparse
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from examples.gpt import ByteGPT
from lnn_lightning import Adafactor, PTDPStrategy
from lnn_lightning.commands.measuring import MeasureMemory
from lnn_lightning.commands.unlaunched import predict_memory
from lnn_lightning.precision import MeshHalfPrecision
from tests.helpers.ranks import launch_ranks
from tests.helpers.reference import quiet_trainer

COLUMNS = ("parameters", "gradients", "optimizer", "activations")
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "two data ranks": ({}, {}),
    "zero 1": ({"zero_stage": 1}, {}),
    "zero 2": ({"zero_stage": 2}, {}),
    "zero 3": ({"zero_stage": 3}, {}),
    "tensor": ({"tensor_parallel_size": 2}, {}),
    "tensor, sequence": ({"tensor_parallel_size": 2, "sequence_parallel": True}, {}),
    "1f1b of 4": ({"pipeline_parallel_size": 2, "microbatches": 4}, {}),
    "gpipe of 4": ({"pipeline_parallel_size": 2, "microbatches": 4, "schedule": "gpipe"}, {}),
    "recompute selective": ({"recompute": "selective"}, {}),
    "recompute full": ({"recompute": "full"}, {}),
    "adafactor": ({}, {"adafactor": True}),
    "adafactor, zero 3": ({"zero_stage": 3}, {"adafactor": True}),
    "bf16-true": ({}, {"precision": "bf16-true"}),
    "bf16, masters": ({}, {"masters": True}),
    "bf16, masters, zero 1": ({"zero_stage": 1}, {"masters": True}),
    "bf16-mixed": ({}, {"precision": "bf16-mixed"}),
}


class AdafactorGPT(ByteGPT):
    """The same with another optimizer."""

    def configure_optimizers(self) -> Any:
        return Adafactor(self.parameters(), lr=self.lr)


def parts(layout: dict[str, Any], options: dict[str, Any]) -> tuple[Trainer, ByteGPT, Any]:
    """A trainer, a module and a loader."""
    options = dict(options)
    kind = AdafactorGPT if options.pop("adafactor", False) else ByteGPT
    if options.pop("masters", False):
        options["plugins"] = [MeshHalfPrecision("bf16-true", master_weights=True)]
    torch.manual_seed(0)
    tokens = torch.randint(256, (64, 129))
    options |= {"max_steps": 2, "use_distributed_sampler": True}
    trainer = quiet_trainer(PTDPStrategy(**layout), 2, **options)
    return trainer, kind(block_size=128), DataLoader([(each[:-1], each[1:]) for each in tokens], batch_size=8)  # type: ignore[arg-type, var-annotated]


def measure(rank: int, ranks: int, layout: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """What this rank holds."""
    trainer, module, loader = parts(layout, options)
    callback = MeasureMemory()
    trainer.callbacks.append(callback)  # type: ignore[attr-defined]
    trainer.fit(module, loader)
    return callback.measured


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=list(WAYS), nargs="*", default=list(WAYS))
    print(f"| MiB, predicted / measured | {' | '.join(COLUMNS)} | sum |\n|{'---|' * (len(COLUMNS) + 2)}")
    for way in parser.parse_args().only:
        trainer, module, loader = parts(*WAYS[way])
        expected = predict_memory(trainer, module, train_dataloaders=loader).ranks[0]
        found = launch_ranks(measure, 2, *WAYS[way])[0]
        pairs = [(getattr(expected, column) or 0, found[column]) for column in COLUMNS]
        pairs.append((sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)))
        print(f"| {way} | {' | '.join(f'{a / 2**20:.1f} / {b / 2**20:.1f}' for a, b in pairs)} |", flush=True)


if __name__ == "__main__":
    main()
