"""Which tensor of a file is which of a module, where a wrapper put a prefix before the names or took one away."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lnn_lightning.checkpoint.errors import CheckpointError

_COMPILED = "_orig_mod."
_SHOWN = 5


@dataclass(frozen=True)
class Renaming:
    """Names of a file -> names of the module.

    Attributes:
        drop: what the file's names have in front.
        add: what the module's names have in front.
    """

    drop: str = ""
    add: str = ""

    def __call__(self, name: str) -> str | None:
        """The module's name; None: this one is not of the module."""
        return self.add + name.removeprefix(self.drop) if name.startswith(self.drop) else None


def match_names(
    wanted: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, str],
    strict: bool = True,
    where: str = "The file",
) -> dict[str, str]:
    """Which tensor of a file fills which of a module.

    The names are the same, or all of them have one more prefix on one side (``self.model = AutoModel...`` in a
    LightningModule), whichever fits most. What ``torch.compile`` puts between (``_orig_mod.``) does not count.

    Args:
        wanted: keys of the module's state dict and their whole shapes.
        found: names in the file and their shapes.
        tensors: key -> first name of the tensor it stands for; tied keys have the same.
        strict: whether everything must be used and found.
        where: the file, for errors.

    Returns:
        First name of a tensor of the module -> name in the file.

    Raises:
        CheckpointError: something is missing or left over (if strict), has another shape, or nothing fits.
    """
    plain_wanted = {key.replace(_COMPILED, ""): key for key in wanted}
    plain_found = {name.replace(_COMPILED, ""): name for name in found}
    renaming = find_renaming(plain_wanted, plain_found, where)
    filled: dict[str, str] = {}
    unexpected = []
    source = {}
    for name, original in plain_found.items():
        new = renaming(name)
        if new is None or new not in plain_wanted:
            unexpected.append(original)
        else:
            source[plain_wanted[new]] = original
    for key in wanted:
        if key in source:
            filled[tensors.get(key, key)] = source[key]  # of tied ones the last, as in `load_state_dict`
    missing = [key for key in wanted if tensors.get(key, key) not in filled]
    if not filled or (strict and (missing or unexpected)):
        hint = "Set `strict_loading = False` in the module to load what fits." if filled else ""
        raise CheckpointError(
            f"{where} does not fit the module: missing {_listed(missing)}; not in the module: {_listed(unexpected)}. "
            f"{hint}".rstrip()
        )
    for key in wanted:
        if key in source and wanted[key] != (shape := found[source[key]]):
            raise CheckpointError(f"{where} has {source[key]!r} with the shape {shape}; {key!r} needs {wanted[key]}.")
    return filled


def find_renaming(wanted: Iterable[str], found: Iterable[str], where: str = "The file") -> Renaming:
    """The change of names under which most of a file's tensors are ones of the module.

    Raises:
        CheckpointError: two changes are equally good.
    """
    wanted, found = set(wanted), set(found)
    votes: Counter[Renaming] = Counter({Renaming(): len(wanted & found)})
    for key in wanted:
        votes.update(Renaming(add=key[:start]) for start in _dots(key) if key[start:] in found)
    for name in found:
        votes.update(Renaming(drop=name[:start]) for start in _dots(name) if name[start:] in wanted)
    best = max(votes.values())
    if votes[Renaming()] == best:
        return Renaming()
    winners = [renaming for renaming, count in votes.items() if count == best]
    if len(winners) > 1:
        prefixes = " or ".join(sorted(repr(each.add or each.drop) for each in winners))
        raise CheckpointError(f"{where} could be meant for several parts of the module: its prefix may be {prefixes}.")
    return winners[0]


def _dots(name: str) -> list[int]:
    """Where the names behind each prefix of a name begin."""
    return [index + 1 for index, letter in enumerate(name) if letter == "."]


def _listed(names: list[str]) -> str:
    if not names:
        return "nothing"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more
