"""Transformer Engine's fused attention (cuDNN's packed kernels) under hcp's schedules.

Only the function below Transformer Engine's ``DotProductAttention`` is used: hcp moves the keys,
and its own rules say which calls the library takes. The package is Transformer Engine 2.13 or
later, with cuDNN 9.11 or later.

n rows of a launch, H query heads, D head size, E head size of values.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hcp.attention.kernels import (
    Call,
    Kernel,
    Launch,
    in_packs,
    is_ordered,
    nan_for_infinity,
    refuse_order,
)
from hcp.attention.kernels.shapes import LSE_COLUMNS, backward_columns, head_size, narrowed


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(f"transformer_engine.pytorch.{name}")
    except (OSError, RuntimeError, AssertionError) as error:  # a library that it loads is missing
        raise ImportError(f"transformer_engine cannot be imported: {error}") from error


_library = _imported("cpp_extensions.fused_attn")


def _with_names(function: Callable[..., Any], **optional: object) -> Callable[..., Any]:
    """The function with those of the arguments given that its version has."""
    names = inspect.signature(function).parameters
    if "bottom_right_diagonal" not in names:
        raise ImportError(
            f"transformer_engine's {function.__name__} has no bottom_right_diagonal, expected "
            "Transformer Engine 2.13 or later"
        )
    given = {name: value for name, value in optional.items() if name in names}
    return functools.partial(function, **given)


_LAYOUT = "thd_thd_thd"
_forward = _with_names(_library.fused_attn_fwd, o_format="thd")
_backward = _with_names(
    _library.fused_attn_bwd, o_format="thd", do_format="thd", dqkv_layout=_LAYOUT
)
_NAMES_GRADIENTS_DTYPE = "dqkv_dtype" in inspect.signature(_library.fused_attn_bwd).parameters
_BACKEND = _library.FusedAttnBackend["F16_arbitrary_seqlen"]


class Pack(NamedTuple):
    """A launch in the library's terms: entries are its sequences, and gaps lie between them."""

    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor
    cu_seqlens_q_padded: Tensor
    """Where each entry starts, gaps counted."""
    cu_seqlens_kv_padded: Tensor
    max_seqlen_q: int
    max_seqlen_kv: int
    attn_mask_type: str
    window_size: tuple[int, int]
    bottom_right_diagonal: bool


class TransformerEngineFused:
    """Computes whole packs in one launch, with values of their own head size."""

    dtypes = (torch.bfloat16, torch.float16)

    launches = staticmethod(in_packs)

    def capped(self, softcap: float) -> None:
        return None

    def takes(self, call: Call) -> bool:
        """Not a backward that must be deterministic: the library would ask cuDNN for memory by the
        product of the longest queries and keys, which no GPU has for long sequences."""
        if is_ordered(call.backward):
            return False
        with_grad_lse = call.backward and call.grad_lse
        return not _obstacle(call.launch, call.query, call.value, with_grad_lse)

    def forward(
        self, launch: Launch, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        _check(launch, query, value, False)
        rows = dict(zip("qkv", map(_packed, (query, key, value)), strict=True))
        capturing = torch.cuda.is_current_stream_capturing()
        out, (sums, *_) = _forward(
            is_training=True,  # so that a backward may follow
            fake_dtype=query.dtype,
            fused_attention_backend=_BACKEND,
            attn_scale=scale,
            rng_gen=None if capturing else _generator(query.device),
            cuda_graph=capturing,
            **rows,
            **_given(launch, query.device),
        )
        # Gaps hold what lay in the memory. No run of the merge names them.
        return out, nan_for_infinity(sums.view(query.shape[:2]))

    def backward(
        self,
        launch: Launch,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        refuse_order("te_fused")
        _check(launch, query, value, grad_lse is not None)
        rows = grad_out, query, key, value, out
        if grad_lse is not None:
            rows = backward_columns(grad_out, grad_lse, query, key, value, out)
        packed = dict(zip(("d_o", "q", "k", "v", "o"), map(_packed, rows), strict=True))
        if _NAMES_GRADIENTS_DTYPE:
            packed["dqkv_dtype"] = _imported("constants").TE_DType[query.dtype]
        grads = _backward(
            fake_dtype=query.dtype,
            fused_attention_backend=_BACKEND,
            aux_ctx_tensors=[_packed(lse).unsqueeze(2), _no_dropout(query.device)],
            attn_scale=scale,
            cuda_graph=torch.cuda.is_current_stream_capturing(),
            **packed,
            **_given(launch, query.device),
        )
        return narrowed(grads[:3], query, value)


# ---- arguments -----------------------------------------------------------------------------------


def _given(launch: Launch, device: torch.device) -> dict[str, Any]:
    """The arguments that describe a launch, for forward and backward, made once for all layers."""
    given: dict[str, Any] | None = launch.kept.get(__name__)
    if given is None:
        given = _pack(launch, device)._asdict() | {"qkv_layout": _LAYOUT}
        launch.kept[__name__] = given
    return given


def _pack(launch: Launch, device: torch.device) -> Pack:
    entries, queries, keys = launch.entries, launch.queries, launch.keys
    query_rows = [entry.query_rows for entry in entries]
    key_rows = [entry.key_rows for entry in entries]
    starts = (
        _running_sums(query_rows),
        _running_sums(key_rows),
        [entry.query_row - queries.start for entry in entries] + [queries.stop - queries.start],
        [entry.key_row - keys.start for entry in entries] + [keys.stop - keys.start],
    )
    longest_query, longest_key = launch.longest
    # The longest keys are a bound that may be passed by nothing; the library wants it to be no less
    # than that of the queries.
    longest = longest_query, max(longest_query, longest_key)
    cu_seqlens: tuple[Tensor, Tensor, Tensor, Tensor] = _on_device(starts, device)
    name, window, bottom_right = _mask_of(launch)
    return Pack(*cu_seqlens, *longest, name, window, bottom_right)


def _running_sums(rows: Sequence[int]) -> list[int]:
    sums = [0]
    for n in rows:
        sums.append(sums[-1] + n)
    return sums


def _on_device(lists: Sequence[Sequence[int]], device: torch.device) -> Any:
    """int32 tensors in one copy, each starting at a multiple of 16 bytes."""
    count = len(lists[0])
    fill = [0] * (-count % 4)
    table = torch.tensor([[*numbers, *fill] for numbers in lists], dtype=torch.int32, device="cpu")
    return tuple(row[:count] for row in table.to(device))


def _mask_of(launch: Launch) -> tuple[str, tuple[int, int], bool]:
    """The mask's name, its window, and whether the diagonal ends at the bottom right."""
    window = launch.window
    if window == (-1, -1):
        return "padding", window, False
    # Of squares both diagonals are one, and the one from the top left is the common case.
    square = all(entry.query_rows == entry.key_rows for entry in launch.entries)
    if window[1] != 0:
        return "padding", window, not square
    return "padding_causal" if square else "padding_causal_bottom_right", window, not square


def _packed(rows: Tensor) -> Tensor:
    """Rows end to end, from a multiple of 16 bytes on."""
    if rows.is_contiguous() and rows.data_ptr() % 16 == 0:
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


@functools.cache
def _generator(device: torch.device) -> torch.Generator:
    """Random numbers that nothing uses: the library draws some for a dropout of 0, and shall not
    draw them from the trainer's."""
    return torch.Generator(device)


@functools.cache
def _no_dropout(device: torch.device) -> Tensor:
    """The seed and the offset of a dropout of 0."""
    return torch.zeros(2, dtype=torch.int64, device=device)


# ---- what the library takes ----------------------------------------------------------------------


def _check(launch: Launch, query: Tensor, value: Tensor, with_grad_lse: bool) -> None:
    obstacle = _obstacle(launch, query, value, with_grad_lse)
    if obstacle:
        raise ValueError(f"{obstacle} for the backend 'te_fused': use 'torch'")


def _obstacle(launch: Launch, query: Tensor, value: Tensor, with_grad_lse: bool) -> str:
    """Why the library does not take a call. Empty: it does."""
    sizes = query.shape[2], value.shape[2]
    if with_grad_lse:
        sizes = (head_size(query, value, LSE_COLUMNS),) * 2
    return _obstacle_of_sizes(query.device, *sizes) or _obstacle_of_mask(launch)


Version = tuple[int, ...]


@functools.cache
def _cudnn() -> Version:
    """The version of cuDNN that the library runs with."""
    version: Version = _imported("utils").get_cudnn_version()
    return version


@functools.cache
def _obstacle_of_sizes(device: torch.device, size: int, value_size: int) -> str:
    """Those of a backward too, since one may follow a forward."""
    capability = torch.cuda.get_device_capability(device)
    if not (9, 0) <= capability < (12, 0):
        return f"compute capability is {_dotted(capability)}, expected 9.0 or higher, below 12.0,"
    if _cudnn() < (9, 11, 0):
        return f"cuDNN is {_dotted(_cudnn())}, expected 9.11 or later"
    sizes = size, value_size
    # On Hopper larger ones are computed too, but the gradients of 160, 224 and 256 were wrong.
    fits = max(sizes) <= 128 or sizes == (192, 128)
    if fits and all(x > 0 and x % 8 == 0 for x in sizes):
        return ""
    return (
        f"head sizes are {size} and {value_size}, expected multiples of 8 up to 128 or 192 and 128"
    )


def _obstacle_of_mask(launch: Launch) -> str:
    obstacle: str | None = launch.kept.get(_MASK)
    if obstacle is None:
        obstacle = launch.kept[_MASK] = _found_in_mask(launch)
    return obstacle


_MASK = f"{__name__}, mask"


def _found_in_mask(launch: Launch) -> str:
    if launch.window == (-1, -1):
        return ""
    if launch.window != (-1, 0) and _cudnn() == (9, 14, 0):
        return f"the window is {launch.window}, expected none under cuDNN 9.14.0, which errs there,"
    for entry in launch.entries:
        if entry.query_rows > entry.key_rows:
            return (
                f"a block of {entry.query_rows} queries and {entry.key_rows} keys has the window "
                f"{launch.window}, expected no more queries than keys"
            )
    return ""


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))


def for_device(device: torch.device) -> Sequence[Kernel]:
    return (TransformerEngineFused(),)
