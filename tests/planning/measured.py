"""Trainings that are measured on ranks and predicted here."""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from examples.gpt import ByteGPT
from lnn_lightning import PTDPStrategy
from lnn_lightning.commands.measuring import MeasureMemory
from lnn_lightning.commands.unlaunched import predict_memory
from lnn_lightning.planning.memory import Prediction
from lnn_lightning.precision import MeshHalfPrecision
from tests.helpers.reference import quiet_trainer


class Llama(LightningModule):
    """transformers' Llama, as it is."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=128,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            use_cache=False,
        )
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def fit_of(name: str, ranks: int, layout: dict[str, Any], options: dict[str, Any]) -> tuple[Trainer, Any, Any]:
    """A trainer, a module and its loader."""
    options = dict(options)
    if options.pop("masters", False):
        options["plugins"] = [MeshHalfPrecision("bf16-true", master_weights=True)]
    torch.manual_seed(0)
    tokens = torch.randint(128, (64, 33))
    data = [(each[:-1], each[1:]) for each in tokens]
    module = Llama() if name == "llama" else ByteGPT(n_layer=4, n_head=4, n_embd=64, block_size=32)
    options |= {"max_steps": 2, "use_distributed_sampler": True}
    trainer = quiet_trainer(PTDPStrategy(**layout), ranks, **options)
    return trainer, module, DataLoader(data, batch_size=8)  # type: ignore[arg-type, var-annotated]


def measure(
    rank: int, ranks: int, name: str, runs: list[tuple[dict[str, Any], dict[str, Any]]]
) -> list[dict[str, Any]]:
    """What this rank holds in each of the runs."""
    results = []
    for layout, options in runs:
        trainer, module, loader = fit_of(name, ranks, layout, options)
        callback = MeasureMemory()
        trainer.callbacks.append(callback)  # type: ignore[attr-defined]
        trainer.fit(module, loader)
        results.append(callback.measured)
    return results


def predicted(name: str, ranks: int, layout: dict[str, Any], options: dict[str, Any]) -> Prediction:
    """What the ranks would hold, from this process alone."""
    trainer, module, loader = fit_of(name, ranks, layout, options)
    return predict_memory(trainer, module, train_dataloaders=loader)
