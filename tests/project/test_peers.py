"""What stands for the libraries that benchmarks compare with computes what these are asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

ROWS, HEADS, GROUPS, SIZE = 12, 4, 2, 8
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def benchmarks() -> Iterator[None]:
    path = str(Path(__file__).resolve().parents[2] / "benchmarks")
    sys.path.insert(0, path)
    yield
    sys.path.remove(path)


def calls() -> Any:
    from peers.dao import Calls

    return Calls(CPU, torch.float64, "torch")


def drawn() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(2)
    return tuple(
        torch.randn(1, ROWS, n, SIZE, generator=generator, dtype=torch.float64)
        for n in (HEADS, GROUPS, GROUPS, HEADS)
    )


def expected(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    key, value = (x.repeat_interleave(HEADS // GROUPS, 2) for x in leaves[1:])
    rows = (x.transpose(1, 2) for x in (leaves[0], key, value))
    out = F.scaled_dot_product_attention(*rows, is_causal=True).transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def test_causal_attention_of_a_whole_sequence_is_the_formula() -> None:
    *rows, grad = drawn()
    leaves = [x.clone().requires_grad_() for x in rows]
    out = calls().causal(*leaves)
    found = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    for mine, other in zip(found, expected(*rows, grad), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-10)


def test_low_level_calls_of_two_blocks_make_the_whole() -> None:
    """As a ring takes them: the second half of queries sees the first half of keys, and its own."""
    q, k, v, grad = drawn()
    forward, backward = calls().low_level()
    half, scale = ROWS // 2, SIZE**-0.5
    front, back = slice(half), slice(half, None)
    wanted = expected(q, k, v, grad)
    blocks = [
        forward(q[:, back], k[:, keys], v[:, keys], 0.0, scale, causal)[:2]
        for keys, causal in ((front, False), (back, True))
    ]
    lse = torch.logaddexp(blocks[0][1], blocks[1][1])
    weights = [(part - lse).exp().transpose(1, 2)[..., None] for _, part in blocks]
    out = sum(out * weight for (out, _), weight in zip(blocks, weights, strict=True))
    torch.testing.assert_close(out, wanted[0][:, back], rtol=0, atol=1e-10)
    total = torch.zeros_like(q[:, back])
    for keys, causal in ((front, False), (back, True)):
        into = [torch.empty_like(x) for x in (q[:, back], k[:, keys], v[:, keys])]
        given = grad[:, back], q[:, back], k[:, keys], v[:, keys], out, lse
        backward(*given, *into, 0.0, scale, causal)
        total += into[0]
    torch.testing.assert_close(total, wanted[1][:, back], rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match="window"):
        forward(q, k, v, 0.0, scale, True, 3)


def test_ring_flash_attn_finds_the_calls_where_it_imports_them_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from peers.dao import INTERFACE, as_flash_attn

    for name in ("flash_attn", INTERFACE):
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    with as_flash_attn(calls()):
        module = importlib.import_module(INTERFACE)
    assert sys.modules["flash_attn"] is sys.modules[INTERFACE] is None
    assert callable(module._flash_attn_forward)
    with pytest.raises(NotImplementedError, match="expected one sequence"):
        module._flash_attn_varlen_forward()


def test_ring_flash_attn_is_called_after_its_stand_ins_have_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package takes its place that imports what it does."""
    from peers import one_sequence
    from peers.dao import INTERFACE

    adapters = "ring_flash_attn.adapters"
    for name in ("ring_flash_attn", adapters, "flash_attn", INTERFACE):
        monkeypatch.delitem(sys.modules, name, raising=False)
    package = tmp_path / "ring_flash_attn"
    package.mkdir()
    (package / "adapters.py").write_text("raise ImportError('of Transformers 5')\n")
    (package / "__init__.py").write_text(
        f"from {INTERFACE} import _flash_attn_forward as forward\n"
        "from .adapters import substitute_hf_flash_attn\n"
        "def zigzag_ring_flash_attn_func(q, k, v, causal, group):\n"
        "    return forward(q, k, v, 0.0, q.shape[-1] ** -0.5, causal)[0]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    over = calls()
    assert one_sequence.obstacle("ring_flash_attn", CPU, (HEADS, GROUPS), 2, over) is None
    assert INTERFACE not in sys.modules
    assert adapters not in sys.modules
    *rows, _ = drawn()
    found = one_sequence.attention_of("ring_flash_attn", over, "torch")(*(x[0] for x in rows))
    torch.testing.assert_close(found, expected(*drawn())[0][0], rtol=0, atol=1e-10)
    monkeypatch.delitem(sys.modules, "ring_flash_attn")


@pytest.mark.parametrize(
    ("name", "ranks", "said"),
    [
        ("fast_ulysses", 2, "for cuda alone"),
        ("deepspeed_ulysses", 3, "heads are 4:2, expected multiples of the 3 ranks"),
    ],
)
def test_a_peer_says_why_it_cannot_run(name: str, ranks: int, said: str) -> None:
    from peers import one_sequence

    assert one_sequence.obstacle(name, CPU, (4, 2), ranks, calls()) == said
