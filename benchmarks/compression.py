"""What compressing gradients gains on a slow link, and what it costs on a fast one.

    python -m benchmarks.compression            # all tables, about eight minutes on two cores; needs root, ip, tc
    python -m benchmarks.compression --quick    # about half of that
    python -m benchmarks.compression --only loopback --rounds 9    # needs no root
    python -m benchmarks.compression --only link --contestants none "PowerSGD, rank 4" --profile    # where time goes

Two hosts with a rank each: network namespaces joined by a veth pair, which a token bucket limits to 100 Mbit/s at both
ends. The model is the demo's GPT (`examples.gpt.ByteGPT`) in its own size (6 layers of width 384) with one window of
256 bytes a rank, and in the smaller size that the demo trains; AdamW. A step is forward, backward with the reduction,
and optimizer. All contestants live at the same time in torch's DistributedDataParallel and take turns within one run,
so that they meet the same machine. `accounted` is what `traffic` says this rank sends, `crossed` what the interface of
its host sent, headers and acknowledgements included. `loopback` is the same without namespaces and limit. A last table
has the whole Trainer on the limited link, by `PTDPStrategy` and by Lightning's `DDPStrategy`.
"""

import argparse
import contextlib
import cProfile
import io
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from examples.gpt import ByteGPT
from lnn_lightning import PTDPStrategy
from lnn_lightning.communication import (
    Cast,
    Compression,
    Compressors,
    LocalSGD,
    OneBit,
    PowerSGD,
    Quantized,
    SignSGD,
    TopK,
    attach,
)
from lnn_lightning.communication.local import LocalSteps
from tests.helpers.hosts import Host, finish, start, two_hosts
from tests.helpers.ranks import free_port, torchrun_environment

LINK = "100mbit"
MODELS: dict[str, dict[str, int]] = {
    "defaults": {},
    "demo": {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 128},
}
NONE = "none"
WARM_UP = 3
"""Steps before the first round: DDP arranges its buckets behind the first, torch's PowerSGD begins with the third."""


# ------------------------------------------------------------------------------------------------ contestants


@dataclass(frozen=True)
class Contestant:
    """A way of reducing gradients.

    Attributes:
        compression: ours.
        hook: torch's: (state, hook).
        synchronised: False: gradients are not reduced at all.
        bucket_mb: DDP's bucket; None: 25.
        steps: of a turn.
    """

    compression: Compression | None = None
    hook: Callable[[], tuple[Any, Any]] | None = None
    synchronised: bool = True
    bucket_mb: int | None = None
    steps: int = 1


def torch_power_sgd() -> tuple[Any, Any]:
    return powerSGD_hook.PowerSGDState(None, 4, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook


CONTESTANTS: dict[str, Contestant] = {
    NONE: Contestant(),
    "nothing sent": Contestant(synchronised=False),
    "torch: fp16_compress_hook": Contestant(hook=lambda: (None, default_hooks.fp16_compress_hook)),
    "torch: powerSGD_hook, rank 4, one bucket": Contestant(hook=torch_power_sgd, bucket_mb=1000),
    "PowerSGD, rank 1": Contestant(PowerSGD(rank=1)),
    "PowerSGD, rank 4": Contestant(PowerSGD(rank=4)),
    "PowerSGD, rank 16, bf16 factors": Contestant(PowerSGD(rank=16, factors="bf16")),
    "PowerSGD, rank 32, bf16 factors": Contestant(PowerSGD(rank=32, factors="bf16")),
    "PowerSGD, rank 96, bf16 factors": Contestant(PowerSGD(rank=96, factors="bf16")),
    "TopK, 1%": Contestant(TopK(density=0.01)),
    "TopK, 0.1%": Contestant(TopK(density=0.001)),
    "OneBit": Contestant(OneBit()),
    "SignSGD": Contestant(SignSGD()),
    "Quantized, 8 bits": Contestant(Quantized(bits=8)),
    "Quantized, 4 bits": Contestant(Quantized(bits=4)),
    "Cast, bf16": Contestant(Cast("bf16")),
    "Cast, fp16": Contestant(Cast("fp16")),
    "Cast, fp8": Contestant(Cast("fp8")),
    "LocalSGD, every 8": Contestant(LocalSGD(every=8), steps=8),
}

TORCH_FAILS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "bf16_compress_hook": lambda: (None, default_hooks.bf16_compress_hook),
    "quantization_pertensor_hook": lambda: (dist.group.WORLD, quantization_hooks.quantization_pertensor_hook),
    "quantization_perchannel_hook": lambda: (dist.group.WORLD, quantization_hooks.quantization_perchannel_hook),
}
"""Hooks of torch that do not work on gloo; tried, so that it is known when they do."""

TRAINERS: dict[str, Callable[[], Strategy]] = {
    "DDPStrategy, none": lambda: DDPStrategy(),
    "PTDPStrategy, none": lambda: PTDPStrategy(data_parallel_size=2),
    "DDPStrategy, PowerSGD, rank 4": lambda: DDPStrategy(ddp_comm_hook=PowerSGD(rank=4)),
    "PTDPStrategy, PowerSGD, rank 4": lambda: PTDPStrategy(data_parallel_size=2, gradient_compression=PowerSGD(rank=4)),
}


# ------------------------------------------------------------------------------------------------ what a rank does


@dataclass(frozen=True)
class Job:
    """What the ranks do, and for how long."""

    kind: str
    model: str
    rounds: int
    contestants: tuple[str, ...]
    batch: int = 1
    profile: bool = False


@dataclass
class Found:
    """Of a contestant on one rank.

    Attributes:
        seconds: a step, by round.
        crossed: bytes a step that the host's interface sent, by round.
        plain, payload, sent: bytes a step by `traffic`.
        error: why there is nothing.
    """

    seconds: list[float]
    crossed: list[float]
    plain: float = 0.0
    payload: float = 0.0
    sent: float = 0.0
    error: str | None = None


class Loop:
    """A training by hand with one contestant."""

    def __init__(self, job: Job, contestant: Contestant) -> None:
        torch.manual_seed(0)
        self.model = ByteGPT(**MODELS[job.model])
        self.ddp = DistributedDataParallel(self.model, init_sync=False, bucket_cap_mb=contestant.bucket_mb)
        self.compressors: Compressors | None = None
        if contestant.hook is not None:
            self.ddp.register_comm_hook(*contestant.hook())
        elif contestant.compression is not None:
            self.compressors = attach(self.ddp, contestant.compression)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.synchronised = contestant.synchronised

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.optimizer.zero_grad()
        with contextlib.nullcontext() if self.synchronised else self.ddp.no_sync():
            tokens, targets = batch
            logits = self.ddp(tokens)
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        self.optimizer.step()
        if self.compressors is not None:
            for compressor in self.compressors.by_place.values():
                if isinstance(compressor, LocalSteps) and compressor.is_due:
                    compressor.settle([list(self.model.parameters())])

    def traffic(self) -> tuple[float, float, float]:
        """Bytes so far: of gradients, handed to collectives, sent."""
        if self.compressors is None:
            return 0.0, 0.0, 0.0
        traffic = self.compressors.traffic
        return traffic.plain, traffic.payload, traffic.sent


def bytes_out() -> int:
    """Bytes that this host's interface sent so far; on loopback those of all."""
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def text(rank: int, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """A batch of this rank."""
    random = torch.Generator().manual_seed(rank)
    tokens = torch.randint(0, 256, (batch, length + 1), generator=random)
    return tokens[:, :-1], tokens[:, 1:]


def race(rank: int, job: Job) -> dict[str, Found]:
    """Contestants in DDP, in turns."""
    loops: dict[str, Loop] = {}
    found: dict[str, Found] = {}
    for name in job.contestants:
        loops[name], found[name] = Loop(job, CONTESTANTS[name]), Found([], [])
    batch = text(rank, job.batch, loops[job.contestants[0]].model.block_size)
    for loop in loops.values():
        for _ in range(WARM_UP):
            loop.step(batch)
    for _ in range(job.rounds):
        for name, loop in loops.items():
            steps = CONTESTANTS[name].steps
            before = loop.traffic()
            dist.barrier()
            crossed, began = bytes_out(), time.perf_counter()
            for _ in range(steps):
                loop.step(batch)
            dist.barrier()
            found[name].seconds.append((time.perf_counter() - began) / steps)
            found[name].crossed.append((bytes_out() - crossed) / steps)
            after = loop.traffic()
            each = [(b - a) / steps for a, b in zip(before, after, strict=True)]
            found[name].plain, found[name].payload, found[name].sent = each
    for name, hook in TORCH_FAILS.items():
        found[f"torch: {name}"] = Found([], [], error=why_it_fails(hook))
    return found


def why_it_fails(hook: Callable[[], tuple[Any, Any]]) -> str | None:
    """What a hook of torch says in a step of a small model; None: it works."""
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    try:
        model.register_comm_hook(*hook())
        model(torch.ones(2, 4)).sum().backward()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        return f"{type(error).__name__}: {str(error).rpartition('callback: ')[2]}".splitlines()[0][:120]
    return None


def profile(rank: int, job: Job) -> str:
    """Where the time of one contestant goes: the functions of ten steps, most expensive first."""
    texts = []
    for name in job.contestants:
        loop = Loop(job, CONTESTANTS[name])
        batch = text(rank, job.batch, loop.model.block_size)
        for _ in range(WARM_UP):
            loop.step(batch)
        profiler, out = cProfile.Profile(), io.StringIO()
        with profiler:
            for _ in range(10):
                loop.step(batch)
        pstats.Stats(profiler, stream=out).sort_stats("tottime").print_stats(25)
        texts.append(f"{name}, 10 steps\n{out.getvalue()}")
    return "\n".join(texts)


class Clock(pl.Callback):
    """Seconds and bytes of each step."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.crossed: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        dist.barrier()
        self.bytes, self.start = bytes_out(), time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        dist.barrier()
        self.times.append(time.perf_counter() - self.start)
        self.crossed.append(float(bytes_out() - self.bytes))


def train(rank: int, job: Job) -> dict[str, Found]:
    """Whole Trainers, one after another; all from the same parameters."""
    found: dict[str, Found] = {}
    for name in job.contestants:
        torch.manual_seed(0)
        module, clock = ByteGPT(**MODELS[job.model]), Clock()
        data = [text(rank, job.batch, module.block_size)] * (WARM_UP + job.rounds)
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            num_nodes=2,
            strategy=TRAINERS[name](),
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            callbacks=[clock],
        )
        trainer.fit(module, DataLoader(data, batch_size=None, collate_fn=lambda batch: batch))  # type: ignore[arg-type]
        found[name] = Found(clock.times[WARM_UP:], clock.crossed[WARM_UP:])
    return found


def on_a_rank(job: Job, answer: Path) -> None:
    """The life of a rank."""
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    if "GLOO_SOCKET_IFNAME" not in os.environ:  # on a host: what is not its loopback
        os.environ["GLOO_SOCKET_IFNAME"] = next(each for each in os.listdir("/sys/class/net") if each != "lo")
    if job.kind == "trainer":
        found: Any = {name: vars(each) for name, each in train(rank, job).items()}
    else:
        dist.init_process_group("gloo")
        found = profile(rank, job) if job.profile else {name: vars(each) for name, each in race(rank, job).items()}
        dist.destroy_process_group()
    answer.write_text(json.dumps(found))


# ------------------------------------------------------------------------------------------------ hosts and tables


@contextlib.contextmanager
def limited_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts, and a link of `LINK` between them."""
    with two_hosts() as hosts:
        for host in hosts:
            links = subprocess.run(
                ["ip", "-n", host.namespace, "-o", "link"], capture_output=True, text=True, check=True
            )
            link = next(
                line.split(": ")[1].split("@")[0] for line in links.stdout.splitlines() if "veth" in line or "@" in line
            )
            bucket = ["tbf", "rate", LINK, "burst", "32kbit", "latency", "50ms"]
            subprocess.run(["tc", "-n", host.namespace, "qdisc", "add", "dev", link, "root", *bucket], check=True)
        yield hosts


def run(job: Job, limited: bool) -> Any:
    """What the first rank found."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="compression-")))
        hosts = stack.enter_context(limited_hosts()) if limited else None
        port, processes = free_port(), []
        for rank in range(2):
            command = [sys.executable, "-m", "benchmarks.compression", "--rank", json.dumps(vars(job))]
            command.append(str(folder / f"answer-{rank}"))
            environment = torchrun_environment(rank, 2, port)
            environment |= {
                "LOCAL_RANK": "0",
                "GROUP_RANK": str(rank),
                "LOCAL_WORLD_SIZE": "1",
                "GROUP_WORLD_SIZE": "2",
            }
            output = folder / f"output-{rank}"
            if hosts is not None:
                processes.append(hosts[rank].start(command, output, **environment | {"MASTER_ADDR": hosts[0].address}))
            else:
                processes.append(start(command, output, **environment, GLOO_SOCKET_IFNAME="lo"))
        if any(finish(processes, timeout=1200)):
            raise RuntimeError("\n".join((folder / f"output-{rank}").read_text()[-4000:] for rank in range(2)))
        return json.loads((folder / "answer-0").read_text())


def table(job: Job, limited: bool, save: Path | None = None) -> str:
    """Measures and formats one; the lowest times are kept in a file: other jobs disturb them least."""
    found = {name: Found(**each) for name, each in run(job, limited).items()}
    measured = {name: each for name, each in found.items() if each.seconds}
    if save is not None:
        save.parent.mkdir(parents=True, exist_ok=True)
        save.write_text(json.dumps({name: min(each.seconds) for name, each in measured.items()}))
    model = ByteGPT(**MODELS[job.model])
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    lines = [
        f"{'Link of ' + LINK if limited else 'Loopback'}: GPT with {len(model.blocks)} layers of width "
        f"{model.byte_embedding.embedding_dim}, {size / 1e6:.1f} MB of gradients, {job.batch} x {model.block_size} "
        f"bytes a rank, 2 ranks, {job.rounds} rounds",
        *(f"left out: {name} ({each.error})" for name, each in found.items() if each.error),
        "",
        "| | step (ms), median | lowest | highest | times as fast as none | gradients / handed over | accounted (MB) "
        "| crossed (MB) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, each in measured.items():
        ratio, sent = (f"{each.plain / each.payload:.1f}", f"{each.sent / 1e6:.3f}") if each.payload else ("", "")
        lines.append(_row(name, each, measured[NONE], ratio, sent, *_crossed(each, limited)))
    return "\n".join(lines)


def trainer_table(job: Job) -> str:
    """Measures and formats the Trainers."""
    found = {name: Found(**each) for name, each in run(job, limited=True).items()}
    lines = [
        f"The whole Trainer, link of {LINK}, the larger GPT, {job.batch} window(s) a rank, {job.rounds} steps",
        "",
        "| | step (ms), median | lowest | highest | times as fast as none | crossed (MB) |",
        "|---|---|---|---|---|---|",
    ]
    for name, each in found.items():
        lines.append(_row(name, each, found[f"{name.split(',')[0]}, {NONE}"], *_crossed(each, limited=True)))
    return "\n".join(lines)


def _row(name: str, found: Found, none: Found, *more: str) -> str:
    times = [1000 * each for each in found.seconds]
    faster = statistics.median(n / t for n, t in zip(none.seconds, found.seconds, strict=True))
    cells = [f"{statistics.median(times):.0f}", f"{min(times):.0f}", f"{max(times):.0f}", f"{faster:.2f}", *more]
    return f"| {name} | {' | '.join(cells)} |"


def _crossed(found: Found, limited: bool) -> list[str]:
    """Loopback's counter is that of both ranks and of everyone else: left out."""
    return [f"{statistics.median(found.crossed) / 1e6:.3f}" if limited else ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--only", choices=["link", "demo", "loopback", "trainer"], nargs="+", help="these tables")
    parser.add_argument("--rounds", type=int, help="turns of each contestant")
    parser.add_argument("--contestants", nargs="+", default=list(CONTESTANTS), help=f"beside {NONE!r}, of DDP")
    parser.add_argument("--save", type=Path, help="a file for the lowest times of `demo`, for compression_curves")
    parser.add_argument("--profile", action="store_true", help="where the time of a step goes, on loopback")
    parser.add_argument("--rank", nargs=2, metavar=("JOB", "ANSWER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        job, answer = options.rank
        return on_a_rank(Job(**json.loads(job)), Path(answer))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rounds = options.rounds or (2 if options.quick else 5)
    contestants = tuple(dict.fromkeys([NONE, *options.contestants]))
    large = Job("hooks", "defaults", rounds, contestants, profile=options.profile)
    if options.profile:
        print(run(large, limited=False))
        return None
    tables: dict[str, Callable[[], str]] = {
        "link": lambda: table(large, limited=True),
        "demo": lambda: table(Job("hooks", "demo", rounds, contestants, batch=16), True, options.save),
        "loopback": lambda: table(large, limited=False),
        "trainer": lambda: trainer_table(Job("trainer", "defaults", rounds, tuple(TRAINERS))),
    }
    for name in options.only or tables:
        print(tables[name](), flush=True, end="\n\n")
    return None


if __name__ == "__main__":
    main()
