"""Every shell script of the repository is clean under shellcheck."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def scripts() -> list[Path]:
    named = [path for pattern in ("*.sh", "*.sbatch") for path in ROOT.rglob(pattern)]
    own = [path for path in named if not any(part.startswith((".venv", "venv")) for part in path.parts)]
    return [*sorted(own), ROOT / ".ci" / "run"]


def test_shellcheck(tmp_path: Path) -> None:
    shellcheck = Path(sys.executable).parent / "shellcheck"
    found = scripts()
    assert {path.name for path in found} >= {"torchrun.sh", "slurm.sbatch", "run"}
    result = subprocess.run([shellcheck, *found], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    bad = tmp_path / "bad.sh"
    bad.write_text("#!/bin/sh\nrm -rf $1\n")
    assert subprocess.run([shellcheck, bad], capture_output=True).returncode == 1
