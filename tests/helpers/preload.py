"""Imported once by the fork server of `ranks`, so that every rank starts with it in memory.

Nothing here may start threads or run a backward pass: forked processes could not use autograd any more.
"""

import contextlib
import importlib

MODULES = [
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "torch._subclasses.fake_tensor",
    "torch._decomp",
    "torch._refs",
    "torch._dynamo",
    "torchmetrics",
    "lightning.pytorch",
    "transformers",
    *(
        f"transformers.models.{name}.modeling_{name}"
        for name in ("t5", "llama", "gpt2", "bert", "vit", "mixtral", "albert")
    ),
    "lnn_lightning",
]

for name in MODULES:
    with contextlib.suppress(Exception):  # the rank that needs it will say what is wrong
        importlib.import_module(name)
