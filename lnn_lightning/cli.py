"""The `lnn-lightning` command: train, validate, test and predict from a YAML file; export checkpoints; count memory."""

import argparse
import os
import sys
from collections.abc import Sequence

from lightning.pytorch.cli import ArgsType, LightningCLI

import lnn_lightning  # noqa: F401  # registers the names of the strategies
from lnn_lightning.checkpoint import CheckpointError
from lnn_lightning.checkpoint.export import export
from lnn_lightning.commands.memory import memory

_OTHERS = (
    "lnn-lightning export CKPT OUT: writes a checkpoint for others (see lnn-lightning export --help). "
    "lnn-lightning memory --config FILE: what each rank needs (see lnn-lightning memory --help)"
)


def main(args: ArgsType = None) -> None:
    """Runs one of Lightning's subcommands on the model and the data that the YAML file names by `class_path`.

    `export` and `memory` are two more.

    Args:
        args: The command line, for calls from Python. Processes that Lightning launches for further devices run the
            program's own command line (`sys.argv`) instead, so give this for a single device only.
    """
    words = sys.argv[1:] if args is None else args
    if isinstance(words, list) and words[:1] == ["export"]:
        _export(words[1:])
        return
    # `python -m` has the current directory on its path, a console script its own folder: `class_path: examples.gpt...`
    # must mean the same in both, and in the processes that the launcher starts by running the script once more.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    if isinstance(words, list) and words[:1] == ["memory"]:
        sys.exit(memory(words[1:]))
    LightningCLI(save_config_kwargs={"overwrite": True}, parser_kwargs={"epilog": _OTHERS}, args=args)


def _export(args: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        "lnn-lightning export",
        description="Writes a checkpoint of any layout as one Lightning file, which a Trainer without this package "
        "resumes, or as safetensors, which transformers' `from_pretrained` reads.",
    )
    parser.add_argument("checkpoint", metavar="CKPT", help="a checkpoint folder, or (to safetensors) a .ckpt file")
    parser.add_argument("out", metavar="OUT", help="model.ckpt, model.safetensors, or a folder for safetensors")
    parser.add_argument("--format", choices=("lightning", "safetensors"), help="if not the one that OUT ends in")
    parser.add_argument("--max-shard-size", metavar="SIZE", help="of a file in a folder of safetensors (5GB)")
    parser.add_argument("--prefix", default="", help="take only tensors whose names begin so, without it: model.")
    parser.add_argument("--config", metavar="FILE", help="copied to OUT/config.json")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export")
    given = vars(parser.parse_args(args))
    try:
        print(export(given.pop("checkpoint"), given.pop("out"), **given))
    except (CheckpointError, OSError) as error:
        parser.exit(1, f"lnn-lightning export: {error}\n")


if __name__ == "__main__":
    main()
