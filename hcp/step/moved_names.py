"""Names of the handler that moved into its parts. They work for one release, with a warning."""

from __future__ import annotations

import warnings
from operator import attrgetter
from typing import TYPE_CHECKING, Any

MOVED = {
    "choose_scan": "scan.choose",
    "combine_by_sequence": "sequences.combine",
    "comm_choices": "comm.choices",
    "default_comm_type": "comm.default_type",
    "global_ranks": "group.global_ranks",
    "halo": "scan.halo",
    "halo_rows": "scan.halo_rows",
    "head_slice": "whole.head_slice",
    "head_to_sequence": "whole.head_to_sequence",
    "layer_bytes": "comm.layer_bytes",
    "pass_maps": "scan.pass_maps",
    "pass_states": "scan.pass_states",
    "place": "group.rank",
    "repeat_by_sequence": "sequences.repeat",
    "rows_in_whole": "whole.row_indices",
    "scan_choices": "scan.choices",
    "scan_type": "scan.type",
    "sequence_to_head": "whole.sequence_to_head",
    "span_cu_seqlens": "scan.span_cu_seqlens",
    "sparse_attention": "sparse.attention",
    "sum_by_sequence": "sequences.sum",
    "sum_over_group": "group.sum",
    "top_k_keys": "sparse.top_k",
    "whole_cu_seqlens": "whole.cu_seqlens",
}
"""Old names of :class:`hcp.ContextParallelHandler`, and the new ones. They go with the next
release."""

OF_STEP = {"arrive": "_to_device", "pin": "_pin"}
"""Old names of what :class:`hcp.Step` does for all of its micro-batches. They go too."""


class MovedNames:
    """Finds attributes by their old names, and refuses classes that override them."""

    if not TYPE_CHECKING:  # it would make every name right

        def __getattr__(self, name: str) -> Any:
            if name in MOVED:
                said, new = f"cp.{name} is now cp.{MOVED[name]}", MOVED[name]
            elif name in OF_STEP:
                new = OF_STEP[name]
                said = f"cp.{name} is now part of step.{new.lstrip('_')}"
            else:
                raise AttributeError(
                    f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self
                )
            warnings.warn(said, DeprecationWarning, stacklevel=2)
            return attrgetter(new)(self)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in (*MOVED, *OF_STEP):
            if hasattr(cls, name):
                raise TypeError(_refused(cls.__name__, name))


def _refused(owner: str, name: str) -> str:
    if name in OF_STEP:
        return f"{owner} has {name}, expected none: hcp.Step no longer calls it"
    return (
        f"{owner} has {name}, expected none: it is now cp.{MOVED[name]}, which layers and hcp "
        "call instead of yours; give yours another name"
    )
