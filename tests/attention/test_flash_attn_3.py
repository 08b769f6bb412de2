"""FlashAttention-3's two functions, which the formula replaces here: they get what they take."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from support.cases import Case, loopback_error
from support.features import check_softcap
from support.varlen import varlen_backward, varlen_forward
from torch import Tensor

import hcp
import hcp.step.backends
from hcp.attention import kernels
from hcp.attention.kernels import KernelCall, KernelFamily, Launch, wide
from hcp.attention.kernels.present import survey
from hcp.exchange.tables import Entry

NAME = "hcp.attention.kernels.flash_attn_3"
FAMILY = kernels.FAMILIES["flash_attn_3"]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    qv: Tensor | None = None,
    out_: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The signature of ``flash_attn_interface._flash_attn_forward``."""
    assert cu_seqlens_q is not None
    assert cu_seqlens_k is not None
    assert max_seqlen_q is not None
    assert max_seqlen_k is not None
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    bounds = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    assert all((of.diff() <= n).all() for of, n in zip(bounds[:2], bounds[2:], strict=True))
    options = {"window_size_left": window_size_left, "window_size_right": window_size_right}
    options |= {"softmax_scale": softmax_scale, "softcap": softcap, "causal": causal}  # type: ignore[dict-item]
    wide_rows = (x.double() for x in (q, k, v))
    out, lse, *_ = varlen_forward(*wide_rows, *bounds, dropout_p=0.0, **options)
    return out.to(q.dtype), lse.to(wide(q.dtype)), q.new_empty(0), q.new_empty(0)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> Tensor:
    """The signature of ``flash_attn_interface._flash_attn_backward``."""
    assert cu_seqlens_q is not None
    assert cu_seqlens_k is not None
    assert max_seqlen_q is not None
    assert max_seqlen_k is not None
    assert dq is not None
    assert dk is not None
    assert dv is not None
    assert not is_causal
    assert dout.is_contiguous()
    assert softmax_lse.shape == (q.shape[1], len(q))
    assert softmax_lse.dtype == wide(q.dtype)
    assert all(x.is_contiguous() for x in (softmax_lse, dq, dk, dv))
    bounds = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    options = {"window_size_left": window_size_left, "window_size_right": window_size_right}
    options |= {"softmax_scale": softmax_scale, "softcap": softcap}  # type: ignore[dict-item]
    wide_rows = (x.double() for x in (dout, q, k, v, out, softmax_lse))
    varlen_backward(*wide_rows, dq, dk, dv, *bounds, **options)
    return softmax_lse


@pytest.fixture(scope="module")
def flash3() -> Iterator[Any]:
    """The module with the package replaced, for the CPU and float64."""
    package: Any = ModuleType("flash_attn_interface")
    package._flash_attn_forward, package._flash_attn_backward = forward, backward
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flash_attn_interface", package)
        module = importlib.import_module(NAME)
        patch.setattr(module.Flash3, "dtypes", (torch.float64, torch.bfloat16))
        family = KernelFamily(lambda: module.for_device)
        patch.setitem(kernels.FAMILIES, "flash_attn_3", family)
        yield module
    del sys.modules[NAME], kernels.flash_attn_3
    hcp.step.backends._made.cache_clear()


@pytest.mark.parametrize("comm_type", ["p2p", "all_gather", "a2a"])
@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (5, 0), (4, 3)])
def test_functions_get_what_they_take(flash3: Any, comm_type: str, window: tuple[int, int]) -> None:
    cls = hcp.get_cp_handler_cls("flash_attn_3")
    errors = hcp.loopback(
        3, lambda groups: check_softcap(groups, cls, (29, 7, 1, 12), comm_type, window, 2)
    )
    assert max(errors) < 1e-10


def test_bfloat16_and_values_of_their_own_size(flash3: Any) -> None:
    case = Case((29, 7, 1, 2, 12), 3, min_degree=2, value_dim=24, dtype="bfloat16")
    assert loopback_error(Case(**{**vars(case), "backend": "flash_attn_3"})) <= 0.1


def test_head_sizes_that_it_lacks_are_refused(flash3: Any) -> None:
    launch = Launch([Entry(0, 2, 0, 2, -1, 0)])
    query = torch.zeros(2, 2, 256)
    kernel = flash3.Flash3()
    assert kernel.takes(KernelCall(launch, query, query, True, False))
    assert not kernel.takes(KernelCall(launch, query, query, True, True))
    torch.use_deterministic_algorithms(True)
    try:
        assert not kernel.takes(KernelCall(launch, query, query, True, False))
        assert kernel.takes(KernelCall(launch, query, query, False, False))
    finally:
        torch.use_deterministic_algorithms(False)
    wider = torch.zeros(2, 2, 264)
    assert not kernel.takes(KernelCall(launch, wider, wider, False, False))
    with pytest.raises(ValueError, match="the head size is 264, expected a multiple of 8 up to"):
        kernel.forward(launch, wider, wider, wider, 1.0)


@pytest.mark.parametrize("capability", [(8, 9), (10, 0)])
def test_it_runs_on_hopper_alone(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(kernels.FAMILIES, "flash_attn_3", FAMILY)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    found = ".".join(map(str, capability))
    with pytest.raises(ValueError, match=f"'flash_attn_3' is asked for compute capability {found}"):
        kernels.kernels_of("flash_attn_3", SimpleNamespace(type="cuda"))  # type: ignore[arg-type]


def test_a_build_under_another_name_is_found_by_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(kernels.FAMILIES, "flash_attn_3", FAMILY)
    monkeypatch.delitem(sys.modules, "flash_attn_interface", raising=False)
    assert FAMILY.version is None
    (tmp_path / "flash_attn_interface.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert FAMILY.version == "of unknown version"
    (found,) = (each for each in survey((9, 0)) if each.family == "flash_attn_3")
    assert (found.lacks, found.shown) == (
        None,
        "flash_attn_3 (flash-attn-3 of unknown version)",
    )
