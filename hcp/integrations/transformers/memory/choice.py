"""What each layer of a model leaves in memory for its backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from hcp._validate import expect_size

LayerRows = Literal["keep", "offload", "recompute", "recompute_offload"]
"""Where the rows of a layer are between its forward and its backward.

keep               on the device, as without hcp
offload            in host memory
recompute          the layer is computed again, from its input and attention's result on the device
recompute_offload  the same, and both wait in host memory
"""

ROWS: tuple[LayerRows, ...] = get_args(LayerRows)


@dataclass(frozen=True, slots=True)
class Choice:
    """Memory of a model's layers, for :func:`apply`. All ranks need equal ones."""

    layers: Sequence[LayerRows]
    """One word for each layer, first to last."""
    chunk_rows: int = 0
    """Rows of a chunk, in which MLPs and norms of recomputed layers, and the last norm of the
    model, compute, one after the other; 0: all rows at once. What they make inside is then in
    memory for one chunk alone."""

    def __post_init__(self) -> None:
        if isinstance(self.layers, str) or not isinstance(self.layers, Sequence):
            raise ValueError(
                f"choice.layers is {self.layers!r:.60}, expected one of {ROWS} for each layer"
            )
        for i, word in enumerate(self.layers):
            if word not in ROWS:
                raise ValueError(f"choice.layers[{i}] is {word!r}, expected one of {ROWS}")
        object.__setattr__(self, "layers", tuple(self.layers))
        rows = expect_size("choice.chunk_rows", self.chunk_rows, "rows", least=0)
        object.__setattr__(self, "chunk_rows", rows)
