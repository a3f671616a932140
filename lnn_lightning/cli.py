"""The `lnn-lightning` command: train, validate, test and predict from a YAML file."""

import os
import sys

from lightning.pytorch.cli import ArgsType, LightningCLI

import lnn_lightning  # noqa: F401  # registers the names of the strategies


def main(args: ArgsType = None) -> None:
    """Runs one of Lightning's subcommands on the model and the data that the YAML file names by `class_path`.

    Args:
        args: The command line, for calls from Python. Processes that Lightning launches for further devices run the
            program's own command line (`sys.argv`) instead, so give this for a single device only.
    """
    # `python -m` has the current directory on its path, a console script its own folder: `class_path: examples.gpt...`
    # must mean the same in both, and in the processes that the launcher starts by running the script once more.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    LightningCLI(save_config_kwargs={"overwrite": True}, args=args)


if __name__ == "__main__":
    main()
