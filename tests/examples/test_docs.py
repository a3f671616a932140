"""The commands in the documentation run as they stand, with a smaller model and two processes."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from tests.test_cli import ROOT, run, workplace

__all__ = ["workplace"]


SMALL_LAYOUTS = {
    "gpt_pipeline.yaml": {"pipeline_parallel_size": 2, "data_parallel_size": 1},
    "gpt_ptdp.yaml": {"pipeline_parallel_size": 1, "tensor_parallel_size": 2},
}
"""Processes cost seconds each to start here: two of them for a run."""


def commands(page: Path) -> list[str]:
    """Command lines of a page's bash blocks."""
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def small_configs(folder: Path) -> None:
    """The configs of the checkout with a model and a text that take no time."""
    (folder / "configs").mkdir()
    for path in (ROOT / "configs").glob("gpt_*.yaml"):
        config = yaml.safe_load(path.read_text())
        config["model"]["init_args"] |= {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 16}
        config["data"]["init_args"] |= {"folder": "text", "block_size": 16}
        config["trainer"] |= {"limit_val_batches": 2}
        if path.name in SMALL_LAYOUTS:
            config["trainer"]["devices"] = 2
            config["trainer"]["strategy"]["init_args"] |= SMALL_LAYOUTS[path.name]
        (folder / "configs" / path.name).write_text(yaml.safe_dump(config))


@pytest.mark.slow
def test_commands_of_the_page_on_checkpoints(workplace: Path) -> None:  # noqa: F811
    small_configs(workplace)
    shutil.rmtree(workplace / "runs", ignore_errors=True)
    done = []
    for line in commands(ROOT / "docs/checkpoints.md"):
        program, *words = shlex.split(line)
        if program == "python" and words[:2] == ["-m", "examples.generate"]:
            continue  # tried by the examples' own tests
        assert program == "lnn-lightning", line
        run(workplace, *words)
        done.append(words[0])
    assert {"fit", "validate", "export"} <= set(done)
