"""What a user says about the compression of stored activations."""

from __future__ import annotations

from dataclasses import dataclass

from lnn_lightning.parallel.errors import LayoutError

PRECISIONS = ("fp16", "fp8")


@dataclass(frozen=True)
class Gist:
    """Compression of what is kept between forward and backward (Jain et al. 2018, Gist, ISCA).

    The forward computes what it always does, and so does the backward, of values that were kept in fewer bytes. All
    but ``dpr`` is lossless: gradients are the same to the bit.

    Args:
        binarize: a ReLU whose output nothing else keeps keeps one bit an element; a max-pool keeps the place of each
            maximum in its window in one byte, and pools do not keep their input; masks keep one bit an element.
        rebuild: the output of a normalisation, an activation or an addition that can be made again from what is kept
            anyway is not kept. Costs those operations once more in the backward.
        dpr: delayed precision reduction: all other activations are kept in ``"fp16"`` or in ``"fp8"`` (four bits of
            exponent, one scale a tensor). Lossy: only the backward sees the rounded values.

    Raises:
        LayoutError: a setting that does not exist, or none that does anything.
    """

    binarize: bool = True
    rebuild: bool = True
    dpr: str | None = None

    def __post_init__(self) -> None:
        for name in ("binarize", "rebuild"):
            if not isinstance(getattr(self, name), bool):
                raise LayoutError(f"Gist's `{name}` must be True or False, got {getattr(self, name)!r}.")
        if self.dpr is not None and self.dpr not in PRECISIONS:
            raise LayoutError(f"Gist's `dpr` must be None, 'fp16' or 'fp8', got {self.dpr!r}.")
        if not self.binarize and not self.rebuild and self.dpr is None:
            raise LayoutError(
                "Gist with `binarize=False`, `rebuild=False` and `dpr=None` compresses nothing: set one of them, or "
                "leave out `activation_compression`."
            )
