"""Writes text with a trained ByteGPT, in one process, whatever layout it was trained in.

python -m examples.generate runs/gpt --prompt "def main(" --bytes 400
"""

import argparse
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.gpt import ByteGPT
from examples.text import END_OF_FILE

ROUTER = ".router.weight"  # of a feed-forward module that became experts


def find_checkpoint(path: Path) -> Path:
    """The checkpoint at `path`, or the newest one below it."""
    if path.is_file() or path.suffix == ".ckpt":
        return path
    checkpoints = [found for found in path.rglob("*.ckpt") if not any(p.suffix == ".ckpt" for p in found.parents)]
    if not checkpoints:
        raise FileNotFoundError(f"There is no checkpoint in {path}.")
    return max(checkpoints, key=lambda found: found.stat().st_mtime)


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Parameters and hyper-parameters of a checkpoint: a distributed one (a folder) or Lightning's own (a file)."""
    if path.is_dir():
        from lnn_lightning.checkpoint import load_full_state_dict, load_metadata

        return load_full_state_dict(path), load_metadata(path)["hyper_parameters"]
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    return checkpoint["state_dict"], checkpoint["hyper_parameters"]


def build(state_dict: Mapping[str, Tensor], hyper_parameters: Mapping[str, Any], top_k: int = 2) -> ByteGPT:
    """A ByteGPT with these parameters, ready to write; if it was upcycled, each byte goes to `top_k` experts."""
    known = inspect.signature(ByteGPT.__init__).parameters
    model = ByteGPT(**{name: value for name, value in hyper_parameters.items() if name in known})
    routers = {name: value for name, value in state_dict.items() if name.endswith(ROUTER)}
    if routers:
        from lnn_lightning import Upcycle
        from lnn_lightning.parallel.expert.upcycle import upcycle

        for name, router in routers.items():
            upcycle(model, Upcycle(name.removesuffix(ROUTER), experts=len(router), top_k=top_k))
    model.load_state_dict(state_dict)
    return model.eval()


@torch.inference_mode()
def generate(model: ByteGPT, prompt: bytes, length: int, temperature: float = 0.8, seed: int = 0) -> bytes:
    """The bytes that the model writes after a prompt; at temperature 0 always the likeliest."""
    random = torch.Generator().manual_seed(seed)
    tokens = list(prompt or END_OF_FILE)
    for _ in range(length):
        logits = model(torch.tensor([tokens[-model.block_size :]]))[0, -1]
        if temperature == 0:
            tokens.append(int(logits.argmax()))
        else:
            odds = torch.softmax(logits / temperature, dim=-1)
            tokens.append(int(torch.multinomial(odds, 1, generator=random)))
    return bytes(tokens[-length:]) if length else b""


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes text with a trained ByteGPT.")
    parser.add_argument("path", type=Path, help="a checkpoint, or a folder whose newest checkpoint is taken")
    parser.add_argument("--prompt", default="import ", help="how the text begins")
    parser.add_argument("--bytes", type=int, default=400, help="how much to write")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest byte")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--top-k", type=int, default=2, help="experts a byte goes to, if the model was upcycled")
    args = parser.parse_args()

    path = find_checkpoint(args.path)
    print(f"A sample from {path}:\n", file=sys.stderr)
    model = build(*load(path), args.top_k)
    text = args.prompt.encode() + generate(model, args.prompt.encode(), args.bytes, args.temperature, args.seed)
    print(text.replace(END_OF_FILE, b"\n").decode(errors="replace"))


if __name__ == "__main__":
    main()
