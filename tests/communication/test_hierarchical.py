"""Gradients are compressed between hosts; hosts are told apart by a name that each rank is given here."""

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lnn_lightning.communication import Cast, Compression, Hierarchical, LocalSGD, PowerSGD
from lnn_lightning.communication.compression import Ranks
from lnn_lightning.communication.hierarchical import ranks_by_host
from lnn_lightning.communication.rows import Rows
from lnn_lightning.parallel.errors import LayoutError
from lnn_lightning.parallel.hosts import Host
from tests.helpers.hosts import finish, need_namespaces, two_hosts
from tests.helpers.ranks import run_ranks

SHAPES = {"matrix": (7, 5), "few": (1, 6), "vector": (3,), "scalar": (), "cube": (8, 2, 3), "empty": (0, 4)}
APART = ("a", "a", "b", "b")
IN_TURN = ("a", "b", "a", "b")


@contextmanager
def on_host(name: str) -> Iterator[None]:
    """This process is on a host of that name."""
    with patch.object(Host, "here", lambda: Host(name, name, 0)):
        yield


def gradients_of(
    rank: int, step: int, dtype: torch.dtype = torch.float64, shapes: Mapping[str, Sequence[int]] = SHAPES
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for name, shape in shapes.items()
    }


def _exact(rank: int, world_size: int) -> list[Any]:
    """Differences from the mean over all ranks, for each way that hosts can lie, and bytes by level."""
    found: list[Any] = []
    for hosts in (APART, IN_TURN, ("a", "b", "c", "d")):
        with on_host(hosts[rank]):
            compressor = Hierarchical(outer=Cast("bf16")).compressor(Ranks(dist.group.WORLD))  # type: ignore[arg-type]
        compressor._levels["outer"]._dtype = torch.float64  # type: ignore[attr-defined] # loses nothing
        worst = 0.0
        for step in range(2):
            own = gradients_of(rank, step)
            compressor.reduce(own)
            compressor.finish_step()
            for name, result in own.items():
                mean = torch.stack([gradients_of(each, step)[name] for each in range(world_size)]).mean(0)
                worst = max(worst, (result - mean).abs().max().item() if mean.numel() else 0.0)
        found.append((worst, compressor.state_dict(), compressor.traffic.plain, compressor.levels))
    return found


def test_exact_between_hosts_is_the_mean() -> None:
    for apart, in_turn, alone in run_ranks(_exact, 4):
        for worst, state, plain, _ in (apart, in_turn, alone):
            assert worst < 1e-12
            assert plain == 2 * 8 * (35 + 6 + 3 + 1 + 48)
            assert state["step"] == state["outer.step"] == 2
        assert (apart[1]["hosts"], in_turn[1]["hosts"], alone[1]["hosts"]) == ("0,0,1,1", "0,1,0,1", "0,1,2,3")
        assert [*apart[3]] == [*in_turn[3]] == ["inner", "outer"] and [*alone[3]] == ["outer"]


def test_rows() -> None:
    """Three ranks: rows that do not divide, fewer rows than ranks, none."""
    gradients = gradients_of(0, 0)
    packed = Rows(3, 0).pack(gradients)
    found = [Rows(3, rank).pieces(gradients, packed[rank]) for rank in range(3)]
    assert [len(each["matrix"]) for each in found] == [3, 3, 1]
    assert [list(each) for each in found[1:]] == [["matrix", "vector", "cube"]] * 2
    for name in ("matrix", "vector", "cube"):
        assert torch.equal(torch.cat([each[name] for each in found]), gradients[name])
    assert torch.equal(found[0]["few"], gradients["few"]) and found[0]["scalar"].shape == ()
    back = {name: torch.zeros_like(each) for name, each in gradients.items()}
    Rows(3, 0).unpack(packed, back)
    assert all(torch.equal(back[name], each) for name, each in gradients.items())


LARGER = {"w": (9, 16), "b": (9,), "v": (3, 8, 8)}
STEPS = 12


def _low_rank(rank: int, world_size: int) -> tuple[list[dict[str, Tensor]], dict[str, Tensor], bool]:
    """What arrives in each step, the factors it began with, and whether a run that was resumed is the same."""

    def made() -> Any:
        with on_host(APART[rank]):
            return Hierarchical(outer=PowerSGD(2, min_compression=1)).compressor(Ranks(dist.group.WORLD, 3))  # type: ignore[arg-type]

    def run(compressor: Any, steps: range) -> list[dict[str, Tensor]]:
        results = []
        for step in steps:
            results.append(gradients_of(rank, step, shapes=LARGER))
            compressor.reduce(results[-1])
            compressor.finish_step()
        return results

    whole, first, second = made(), made(), made()
    like = torch.empty(0, dtype=torch.float64)
    shapes = {"w": (5 - rank % 2, 16), "v": (2 - rank % 2, 64)}
    factors = {name: whole._levels["outer"]._start(name, shape, like).clone() for name, shape in shapes.items()}
    results = run(whole, range(STEPS))
    run(first, range(5))
    second.load_state_dict({key: value for key, value in first.state_dict().items()})
    again = run(second, range(5, STEPS))
    same = all(torch.equal(a[n], b[n]) for a, b in zip(again, results[5:], strict=True) for n in LARGER)
    return results, factors, same and whole.error_norm() > 0


def test_low_rank_between_hosts_is_the_algorithm() -> None:
    """DALL-E's form against the formulas on one process: factors of each rank's rows of its host's mean."""
    ranks = run_ranks(_low_rank, 4)
    assert all(same for _, _, same in ranks)
    errors: dict[tuple[str, int, int], Tensor] = {}
    qs = {(name, place): ranks[place][1][name].mT for name in ("w", "v") for place in (0, 1)}
    for step in range(STEPS):
        own = [gradients_of(rank, step, shapes=LARGER) for rank in range(4)]
        of_host = [{name: (own[a][name] + own[b][name]) / 2 for name in LARGER} for a, b in ((0, 1), (2, 3))]
        for name in ("w", "v"):
            pieces = []
            for place in (0, 1):
                ms = [each[name].flatten(1).chunk(2)[place] for each in of_host]
                ms = [m + errors.get((name, place, host), 0) for host, m in enumerate(ms)]
                p = torch.linalg.qr(sum(m @ qs[name, place] for m in ms) / 2).Q  # type: ignore[operator]
                own_qs = [m.mT @ p for m in ms]
                q = sum(own_qs) / 2
                for host, m in enumerate(ms):
                    errors[name, place, host] = m - p @ own_qs[host].mT
                pieces.append(p @ q.mT)
                qs[name, place] = q
            wanted = torch.cat(pieces).view(LARGER[name])
            for results, _, _ in ranks:
                torch.testing.assert_close(results[step][name], wanted, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(ranks[3][0][step]["b"], (of_host[0]["b"] + of_host[1]["b"]) / 2)


def _bytes(rank: int, world_size: int) -> list[dict[str, Any]]:
    found = []
    for settings in (Hierarchical(outer=Cast()), Hierarchical(Cast("fp16"), Cast()), Hierarchical(inner=Cast())):
        with on_host(APART[rank]):
            compressor = settings.compressor(Ranks(dist.group.WORLD))  # type: ignore[arg-type]
        compressor.reduce(gradients_of(rank, 0, torch.float32))
        found.append(compressor.levels)
    return found


def test_bytes_by_level() -> None:
    """What leaves a host is the outer compression's of each rank's rows."""
    first, second = 4 * 5 + 6 + 2 + 1 + 24, 3 * 5 + 1 + 24
    packed = 4 * 5 + 6 + 2 + 1 + 24
    for rank, (exact, cast, outside) in enumerate(run_ranks(_bytes, 4)):
        rows = (first, second)[rank % 2]
        for each in (exact, cast):
            assert (each["outer"].plain, each["outer"].payload, each["outer"].sent) == (4 * rows, 2 * rows, 2 * rows)
        assert exact["inner"].payload == 4 * 2 * packed + 4 * packed  # a reduce-scatter and an all-gather
        assert exact["inner"].sent == 4 * packed + 4 * packed
        assert cast["inner"].payload == 2 * 2 * packed + 4 * packed
        assert outside["outer"].payload == 4 * rows


def _one_host(rank: int, world_size: int) -> tuple[list[str], list[Tensor], dict[str, Any]]:
    with warnings.catch_warnings(record=True) as caught, on_host("a"):
        warnings.simplefilter("always")
        compressor = Hierarchical(outer=Cast()).compressor(Ranks(dist.group.WORLD))  # type: ignore[arg-type]
    own = gradients_of(rank, 0)
    compressor.reduce(own)
    with on_host("ab"[rank]):
        other = Hierarchical(outer=Cast()).compressor(Ranks(dist.group.WORLD))  # type: ignore[arg-type]
    with warnings.catch_warnings(record=True) as more:
        warnings.simplefilter("always")
        other.load_state_dict(compressor.state_dict())
    return [str(each.message) for each in [*caught, *more]], list(own.values()), compressor.levels


def test_one_host() -> None:
    """Nothing is compressed, and that is said once; a checkpoint of it has nothing for two hosts."""
    (texts, results, levels), (silent, _, _) = run_ranks(_one_host, 2)
    assert silent == [] and len(texts) == 2
    assert "all 2 ranks that average gradients are on one host (a)" in texts[0]
    assert "in another way than when the checkpoint was written" in texts[1]
    for result, a, b in zip(results, gradients_of(0, 0).values(), gradients_of(1, 0).values(), strict=True):
        assert torch.equal(result, a / 2 + b / 2)
    assert [*levels] == ["inner"]


def test_unequal_hosts_are_refused() -> None:
    def hosts(names: Sequence[str]) -> list[Host]:
        return [Host(name, name, 0) for name in names]

    assert ranks_by_host(hosts("abab")) == [[0, 2], [1, 3]]
    with pytest.raises(LayoutError, match=r"Here they are on a \(ranks 0, 1\), b \(rank 2\)"):
        ranks_by_host(hosts("aab"))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "compresses nothing"),
        (
            {"outer": Hierarchical(outer=Cast())},
            "`outer` must be None or a compression of gradients, .* and not hierarchical itself",
        ),
        ({"outer": LocalSGD()}, "`outer` must be None or a compression of gradients"),
        ({"inner": "bf16", "outer": Cast()}, "`inner` must be None or a compression"),
    ],
)
def test_refused_settings(values: dict[str, Any], words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        Hierarchical(**values)


def test_from_yaml() -> None:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser()
    parser.add_argument("--compression", type=Compression | None)
    inner = {"class_path": "lnn_lightning.communication.Cast", "init_args": {"dtype": "fp16"}}
    value = {"class_path": "lnn_lightning.communication.Hierarchical", "init_args": {"inner": inner, "outer": inner}}
    made = parser.instantiate_classes(parser.parse_object({"compression": value}))
    assert made.compression == Hierarchical(Cast("fp16"), Cast("fp16"))


@pytest.mark.slow
def test_bytes_on_the_link(tmp_path: Path) -> None:
    """Two hosts of two ranks: what leaves a host on the wire is what was counted."""
    need_namespaces()
    with two_hosts() as hosts:
        processes = []
        for number, host in enumerate(hosts):
            words = [number, hosts[0].address, 29400, tmp_path]
            command = [sys.executable, "-m", "tests.communication.between_hosts", *map(str, words)]
            processes.append(host.start(command, tmp_path / host.name, GLOO_SOCKET_IFNAME=interface_of(host)))
        codes = finish(processes, 60)
    assert codes == [0, 0], "".join((tmp_path / f"node{number}").read_text()[-3000:] for number in range(2))
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(4)]
    for name, most in (("exact", 1.1), ("low rank", 1.5)):
        for first in (0, 2):
            counted = found[first][name][1] + found[first + 1][name][1]
            assert counted <= found[first][name][0] < most * counted + 20000
    assert found[0]["low rank"][0] < found[0]["exact"][0] / 20


def interface_of(host: Any) -> str:
    shown = subprocess.run([*host.prefix, "ls", "/sys/class/net"], capture_output=True, text=True, check=True).stdout
    return next(each for each in shown.split() if each.startswith("v"))
