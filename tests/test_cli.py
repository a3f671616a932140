import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lnn_lightning.cli import main

ROOT = Path(__file__).parents[1]
TINY = [
    *("--model.n_layer=2", "--model.n_head=2", "--model.n_embd=16", "--model.block_size=16"),
    *("--data.folder=text", "--data.block_size=16", "--data.batch_size=4"),
]
ONE_DEVICE = ["--trainer.strategy=auto", "--trainer.devices=1"]


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A folder to run in: the examples of the checkout and a little text. The package itself is not in it."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "text").mkdir()
    for index in range(20):
        (tmp_path / f"text/{index}.py").write_text(f"print({index})\n" * 100)
    return tmp_path


def run(workplace: Path, *args: str) -> str:
    """Runs the console script of this environment, or what pip would write where the package isn't installed."""
    script = Path(sys.executable).with_name("lnn-lightning")
    environment = dict(os.environ)
    if not script.exists():
        script = workplace / "bin/lnn-lightning"
        script.parent.mkdir(exist_ok=True)
        script.write_text("import sys\nfrom lnn_lightning.cli import main\nsys.exit(main())\n")
        packages = workplace / "packages"
        if not packages.exists():
            packages.mkdir()
            (packages / "lnn_lightning").symlink_to(ROOT / "lnn_lightning")
        environment["PYTHONPATH"] = str(packages)
    done = subprocess.run(
        [sys.executable, script, *args],
        cwd=workplace,
        env=environment,
        text=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def here(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same folder, for runs in this process."""
    monkeypatch.chdir(workplace)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(ROOT))])
    monkeypatch.setattr(sys, "argv", ["lnn-lightning"])
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    return workplace


@pytest.mark.parametrize("name", ["gpt_pipeline", "gpt_single"])
def test_configs_are_understood(here: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["fit", f"--config={ROOT}/configs/{name}.yaml", "--print_config"])
    assert not stop.value.code
    config, written = (
        yaml.safe_load(capsys.readouterr().out),
        yaml.safe_load(Path(f"{ROOT}/configs/{name}.yaml").read_text()),
    )
    assert config["model"]["class_path"] == "examples.gpt.ByteGPT"
    assert config["trainer"]["max_steps"] == written["trainer"]["max_steps"]
    if name == "gpt_pipeline":
        arguments = written["trainer"]["strategy"]["init_args"]
        assert arguments.items() <= config["trainer"]["strategy"]["init_args"].items()


def test_configs_differ_in_layout_only() -> None:
    pipeline, single = (yaml.safe_load((ROOT / f"configs/gpt_{n}.yaml").read_text()) for n in ("pipeline", "single"))
    replicas = pipeline["trainer"]["strategy"]["init_args"]["data_parallel_size"]
    data = pipeline["data"]["init_args"]
    data["batch_size"] *= replicas
    for config in pipeline, single:
        for key in "strategy", "devices", "logger":
            del config["trainer"][key]
    assert pipeline == single


@pytest.mark.parametrize("subcommand", ["fit", "validate", "test", "predict"])
def test_fast_dev_run(here: Path, subcommand: str) -> None:
    config = f"--config={ROOT}/configs/gpt_pipeline.yaml"
    main([subcommand, config, *ONE_DEVICE, *TINY, "--trainer.fast_dev_run=1"])


@pytest.mark.slow
def test_launched_processes_run_the_console_script_again_and_a_run_can_be_repeated(workplace: Path) -> None:
    args = (
        f"--config={ROOT}/configs/gpt_single.yaml",
        *TINY,
        *("--trainer.strategy=ddp", "--trainer.devices=2", "--trainer.max_steps=2", "--trainer.val_check_interval=2"),
        "--trainer.logger.init_args.version=0",
    )
    run(workplace, "fit", *args)
    run(workplace, "fit", *args, "--model.lr=0.5")
    saved = yaml.safe_load((workplace / "runs/gpt_single/version_0/config.yaml").read_text())
    assert saved["model"]["init_args"]["lr"] == 0.5
    assert int(saved["trainer"]["devices"]) == 2
