"""The class of handler that computes attention, by backend."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from support import core_attention
from support.cases import GlooGroups
from support.features import check_softcap
from support.memory import FAMILY
from support.ranks import run_ranks
from support.varlen import varlen_backward, varlen_forward
from torch import Tensor

import hcp
from hcp._words import Backend
from hcp.attention import kernels
from hcp.attention.kernels import FAMILIES, KernelFamily
from hcp.integrations.loader import DynamicCPDataLoader
from hcp.step import backends


def test_the_words_for_options_are_the_backends_that_hcp_comes_with() -> None:
    families = [name for name in kernels.FAMILIES if name != FAMILY]
    assert get_args(Backend) == (*families, "transformer_engine")
    assert set(get_args(Backend)) <= set(backends.BACKENDS)


# ---- the factory ---------------------------------------------------------------------------------


def test_the_same_arguments_give_the_same_class() -> None:
    assert hcp.get_cp_handler_cls() is hcp.ContextParallelHandler
    assert hcp.ContextParallelHandler.kernel_family == "auto"
    cls = hcp.get_cp_handler_cls("torch", "a2a")
    assert cls is hcp.get_cp_handler_cls(backend="torch", cp_comm_type=["a2a", "a2a"])
    assert cls.kernel_family == "torch"
    assert issubclass(cls, hcp.ContextParallelHandler)
    assert cls.comm_types == ("a2a",)
    assert hcp.get_cp_handler_cls(cp_comm_type="a2a") is hcp.get_cp_handler_cls("auto", "a2a")
    per_layer = hcp.get_cp_handler_cls("torch", ["p2p", "a2a", "p2p"])
    assert per_layer.comm_types == ("p2p", "a2a")


class Third(hcp.ContextParallelHandler):
    """A third party's class."""


def test_classes_are_pickled_and_are_themselves_in_another_process(tmp_path: Path) -> None:
    if "pickled" not in backends.BACKENDS:
        hcp.register_backend("pickled", lambda: Third)
    classes = [
        hcp.get_cp_handler_cls(),
        hcp.get_cp_handler_cls("torch", ["a2a+p2p", "all_gather"]),
        hcp.get_cp_handler_cls("auto", "a2a"),
        hcp.get_cp_handler_cls("pickled", "a2a"),
    ]
    for cls in classes:
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            assert pickle.loads(pickle.dumps(cls, protocol)) is cls
    (tmp_path / "classes").write_bytes(pickle.dumps(classes[:3]))
    code = (
        "import pickle, sys\n"
        "from pathlib import Path\n"
        "classes = pickle.loads(Path('classes').read_bytes())\n"
        "assert 'hcp.integrations' not in sys.modules\n"
        "import hcp\n"
        "assert classes[0] is hcp.ContextParallelHandler\n"
        "assert classes[1] is hcp.get_cp_handler_cls('torch', ['a2a+p2p', 'all_gather'])\n"
        "assert classes[2] is hcp.get_cp_handler_cls('auto', 'a2a')\n"
        "assert classes[2].kernel_family == 'auto'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    with pytest.raises(AttributeError, match=r"'hcp\.step\.backends' has no attribute 'nothing'"):
        backends.nothing  # noqa: B018


@pytest.mark.parametrize("name", ["torch", "a.b", "a:b"])
def test_names_that_cannot_be_registered_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"backend '{name}' (is there already|has a '.' or ':')"):
        hcp.register_backend(name, lambda: Third)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "magi"}, "backend is 'magi', expected one of .*'torch'"),
        ({"cp_comm_type": "ring"}, "cp_comm_type is 'ring', expected one of"),
        ({"cp_comm_type": []}, "cp_comm_type is empty"),
        ({"cp_comm_type": 5}, "cp_comm_type is 5, expected a sequence of comm types, or one"),
    ],
)
def test_unknown_names_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hcp.get_cp_handler_cls(**options)


# ---- packages that are not installed -------------------------------------------------------------

NEEDED = {
    "cudnn": ("nvidia-cudnn-frontend", "pip install nvidia-cudnn-frontend"),
    "flash_attn": ("flash-attn", "pip install --no-build-isolation flash-attn"),
    "flash_attn_3": (
        "flash-attn-3",
        "build it from the folder hopper of FlashAttention's repository",
    ),
    "flash_attn_4": ("flash-attn-4", "pip install flash-attn-4==4.0.0b36"),
    "transformer_engine": (
        "transformer-engine",
        "pip install --no-build-isolation 'transformer-engine[",
    ),
}
"""By backend: its package for pip, and how it is installed."""
MODULES = ("cudnn", "flash_attn", "flash_attn_interface", "transformer_engine")


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """No package of a kernel is installed, and this process is no rank."""
    find, version = importlib.util.find_spec, importlib.metadata.version
    packages = {family.package for family in FAMILIES.values() if family.package}

    def version_without(name: str) -> str:
        if name in packages:
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", version_without)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *of: None if name in MODULES else find(name, *of)
    )
    for name in list(sys.modules):
        if name.partition(".")[0] in MODULES or name.endswith(
            "transformer_engine.transformer_engine_handler"
        ):
            monkeypatch.delitem(sys.modules, name)
        if name.startswith("hcp.attention.kernels.") and name.rpartition(".")[2] in NEEDED:
            monkeypatch.delitem(sys.modules, name)
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delenv("RANK", raising=False)
    backends._made.cache_clear()


def says(backend: str) -> str:
    package, how = NEEDED[backend]
    start = f"the backend {backend!r} needs the package {package}, which is not installed: "
    return f"^{re.escape(start)}.*{re.escape(how)}.*, or use the backend 'auto'"


@pytest.mark.usefixtures("absent")
@pytest.mark.parametrize("backend", NEEDED)
def test_a_package_that_is_not_there_is_named_as_pip_names_it(backend: str) -> None:
    with pytest.raises(hcp.HcpError, match=says(backend)) as refused:
        backends.require_backend(backend)
    assert refused.value.code == "backend-missing"
    with pytest.raises(hcp.HcpError, match=says(backend)):
        hcp.get_cp_handler_cls(backend)


@pytest.mark.usefixtures("absent")
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_what_torch_can_compute_needs_no_package(backend: str) -> None:
    backends.require_backend(backend)


def test_a_package_that_is_there_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version
    there = {"flash-attn-4", "transformer-engine"}
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "1.0" if name in there else version(name)
    )
    before = set(sys.modules)
    for backend in ("flash_attn_4", "transformer_engine"):
        backends.require_backend(backend)
    assert set(sys.modules) == before


@pytest.mark.usefixtures("absent")
def test_options_refuse_a_missing_package_in_a_rank_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Options may be read on a login node, whose packages are not those of the ranks."""
    config = hcp.Config(8, attention_backend="flash_attn_4")
    assert config.plan([5, 9], ranks=2).ranks == 2
    with pytest.raises(hcp.HcpError, match=says("flash_attn_4")):
        config.require_backend()
    with pytest.raises(hcp.HcpError, match=says("flash_attn_4")):
        config.dispatch_options()
    flags = ["--max-seqlen-per-dp-cp-rank", "8", "--attention-backend", "flash_attn_4"]
    args = hcp.add_arguments(argparse.ArgumentParser()).parse_args(flags)
    assert hcp.Config.from_args(args) == config
    monkeypatch.setenv("RANK", "0")
    for read in (
        lambda: hcp.Config(8, attention_backend="flash_attn_4"),
        lambda: hcp.Config.from_args(args),
        lambda: config.for_evaluation(1, 8),
    ):
        with pytest.raises(hcp.HcpError, match=says("flash_attn_4")):
            read()
    monkeypatch.delenv("RANK")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(hcp.HcpError, match=says("flash_attn_4")):
        hcp.Config(8, attention_backend="flash_attn_4")


@pytest.mark.usefixtures("absent")
def test_a_loader_refuses_a_missing_package_before_the_first_batch() -> None:
    config = hcp.Config(8, attention_backend="flash_attn_4")

    def run(groups: Any) -> None:
        with pytest.raises(hcp.HcpError, match=says("flash_attn_4")):
            DynamicCPDataLoader([], config, groups, global_batch_size=2)

    hcp.loopback(1, run)


def test_dispatch_makes_handlers_of_the_class() -> None:
    cls = hcp.get_cp_handler_cls("torch", ["all_gather", "a2a"])

    def check(groups: Any) -> None:
        samples = [{"x": torch.randn(9, 2, 4)}]
        lengths, sources, samples = hcp.gather_lengths(samples, groups)  # type: ignore[assignment]
        plan = hcp.plan(lengths, ranks=2, max_tokens_per_rank=16)
        for cp, local in hcp.dispatch(plan, samples, sources, groups, handler_cls=cls):
            assert type(cp) is cls
            cp.attention(local.x, local.x, local.x, comm_type="a2a")
            with pytest.raises(ValueError, match=r"expected one of \['a2a', 'all_gather'\]"):
                cp.attention(local.x, local.x, local.x, comm_type="p2p")

    hcp.loopback(2, check)


# ---- a third party's -----------------------------------------------------------------------------


class Whole(hcp.ContextParallelHandler):
    """Attention by a third party: here over whole sequences, by PyTorch's formula."""

    def attention(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        if set(options) - {"comm_type"}:
            raise ValueError(f"options are {sorted(options)}, expected none")
        return self.core_attn(
            attn_mod=core_attention.WholeAttention(),
            query=query,
            key=key,
            value=value,
            attn_mask_type="causal",
        ).view_as(query)


@pytest.fixture
def registered() -> Iterator[None]:
    hcp.register_backend("third party", lambda: Whole)
    yield
    del backends.BACKENDS["third party"]
    backends._made.cache_clear()


@pytest.mark.usefixtures("registered")
def test_a_third_party_registers_a_class_of_its_own() -> None:
    cls = hcp.get_cp_handler_cls("third party", "all_gather")
    assert issubclass(cls, Whole)
    with pytest.raises(ValueError, match="backend 'third party' is there already"):
        hcp.register_backend("third party", lambda: Whole)

    def check(groups: Any) -> None:
        plan = hcp.plan([23], ranks=2, max_tokens_per_rank=24, min_degree=2)
        x = torch.randn(23, 2, 4, dtype=torch.float64)
        for cp_cls in (cls, hcp.ContextParallelHandler):
            cp = cp_cls(plan, 0, groups.transport)
            own = x[cp.position_ids].requires_grad_()
            out = cp.attention(own, own, own)
            out.square().sum().backward()
            if cp_cls is cls:
                first = out, own.grad
        assert torch.allclose(first[0], out, atol=1e-12)
        assert torch.allclose(first[1], own.grad, atol=1e-12)

    torch.manual_seed(0)
    hcp.loopback(2, check)


# ---- flash_attn: the package's two functions, by the formula -------------------------------------


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The backend with the package replaced, for the CPU and float64."""
    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    interface._flash_attn_varlen_forward = varlen_forward  # type: ignore[attr-defined]
    interface._flash_attn_varlen_backward = varlen_backward  # type: ignore[attr-defined]
    package.flash_attn_interface = interface  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)
    backends._made.cache_clear()
    cls = hcp.get_cp_handler_cls("flash_attn")
    module = sys.modules["hcp.attention.kernels.flash_attn_2"]
    yield SimpleNamespace(cls=cls, module=module)
    del sys.modules["hcp.attention.kernels.flash_attn_2"], hcp.attention.kernels.flash_attn_2
    backends._made.cache_clear()


@pytest.mark.parametrize("comm_type", ["p2p", "all_gather", "a2a"])
@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (5, 0), (4, 3)])
def test_flash_attns_functions_get_what_they_take(
    flash_attn: Any, comm_type: str, window: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = flash_attn.module.FlashAttn
    monkeypatch.setattr(kernel, "dtypes", (torch.float64,))
    family = KernelFamily(lambda: lambda device: (kernel(),))
    monkeypatch.setitem(kernels.FAMILIES, "flash_attn", family)
    lengths = (29, 7, 1, 12)
    errors = hcp.loopback(
        3, lambda groups: check_softcap(groups, flash_attn.cls, lengths, comm_type, window, 2)
    )
    assert max(errors) < 1e-10


def test_flash_attn_is_refused_without_cuda(flash_attn: Any) -> None:
    def call(groups: Any) -> None:
        plan = hcp.plan([5], ranks=1, max_tokens_per_rank=8)
        x = torch.zeros(5, 1, 4)
        flash_attn.cls(plan, 0, groups.transport).attention(x, x, x)

    with pytest.raises(ValueError, match="'flash_attn' is asked for cpu, expected CUDA"):
        hcp.loopback(1, call)


# ---- transformer_engine: a module of the same arguments ------------------------------------------


class FakeDotProductAttention(core_attention.RingLike):
    def __init__(self, heads: int, size: Any, **options: Any) -> None:
        super().__init__()
        assert options["qkv_format"] == "thd"
        self.options = options

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **kw: Any) -> Tensor:  # type: ignore[override]
        assert kw["qkv_format"] == "thd"
        assert kw["attn_mask_type"] == "padding_causal"
        assert kw["window_size"] == (-1, 0)
        assert kw["cu_seqlens_q_padded"] is kw["cu_seqlens_q"]  # nothing lies between sequences
        params = SimpleNamespace(
            cu_seqlens_q=kw["cu_seqlens_q"],
            cp_group=self.cp_group,
            local_cp_size=1 if self.cp_group is None else self.cp_group.size(),
        )
        return super().forward(query, key, value, None, "padding_causal", None, params)


def with_transformer_engine() -> Any:
    package, pytorch = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    pytorch.DotProductAttention = FakeDotProductAttention  # type: ignore[attr-defined]
    sys.modules |= {"transformer_engine": package, "transformer_engine.pytorch": pytorch}
    try:
        return importlib.import_module(
            "hcp.integrations.transformer_engine.transformer_engine_handler"
        ).TransformerEngineHandler
    finally:
        del sys.modules["transformer_engine"], sys.modules["transformer_engine.pytorch"]


def run_transformer_engine(rank: int, size: int) -> float:
    cls = with_transformer_engine()
    case = core_attention.Case((48, 24, 6), 3, capacity=24)
    groups = GlooGroups()
    worst = 0.0
    for plain in core_attention.handlers(groups, case):
        cp = cls(plain.plan, plain.micro_batch, groups.transport)
        group = core_attention.made_group(cp)
        outs = []
        for handler, options in ((plain, {}), (cp, {"cp_group": group})):
            torch.manual_seed(rank)
            q = torch.randn(cp.rows, 4, 6, dtype=torch.float64, requires_grad=True)
            kv = torch.randn(cp.rows, 2, 6, dtype=torch.float64, requires_grad=True)
            out = handler.attention(q, kv, kv, **options)
            out.square().sum().backward()
            outs.append((out.detach(), q.grad, kv.grad))
        for a, b in zip(*outs, strict=True):
            worst = max([worst, float((a - b).abs().max())] if a.numel() else [worst])
    with pytest.raises(ValueError, match=r"softcap is 2.0, expected 0.0 with the backend 'transf"):
        cp.attention(q, kv, kv, softcap=2.0)
    with pytest.raises(ValueError, match="return_lse is True, expected False"):
        cp.attention(q, kv, kv, return_lse=True)
    with pytest.raises(ValueError, match="mask is tree, expected None"):
        cp.attention(q, kv, kv, mask="tree")
    with pytest.raises(TypeError, match="attention got an unexpected keyword argument 'is_causal'"):
        cp.attention(q, kv, kv, is_causal=True)
    return worst


def test_transformer_engines_module_gets_groups_and_sequences() -> None:
    assert max(run_ranks(3, run_transformer_engine)) < 1e-10
