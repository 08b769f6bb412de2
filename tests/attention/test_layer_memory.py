"""The bytes of a layer are those that support/layer_bytes.py gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.layer_bytes import in_outputs, layer_bytes
from support.memory import Layer, allocated

# comm type, degree, sizes of its levels
RINGS = [("p2p", degree, ()) for degree in (1, 2, 3, 5, 6, 7, 8, 16)]
GATHERS = [("all_gather", 3, ()), ("all_gather", 8, ())]
HEADS = [("a2a", 2, ()), ("a2a", 8, ()), ("a2a+p2p", 8, (2, 4)), ("a2a+p2p", 14, (2, 7))]
# query heads, key-value heads, head size, that of values
SIZES = [
    ((16, 16, 32, 32), torch.bfloat16),
    ((32, 8, 16, 16), torch.bfloat16),
    ((16, 8, 32, 16), torch.float32),
]


def measured(layer: Layer) -> tuple[int, int, int]:
    """Forward, kept and backward of a layer that is not the first."""
    layer.backward(layer.forward())
    made: list[torch.Tensor] = []
    forward = allocated(lambda: made.append(layer.forward()))
    return forward.peak, forward.left, allocated(lambda: layer.backward(made.pop())).peak


@pytest.mark.parametrize(("sizes", "dtype"), SIZES, ids=str)
@pytest.mark.parametrize(("comm_type", "degree", "levels"), [*RINGS, *GATHERS, *HEADS])
def test_a_layer_takes_the_bytes_of_the_formulas(
    comm_type: str,
    degree: int,
    levels: tuple[int, ...],
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
) -> None:
    heads, groups, size, value_size = sizes
    rows, inner = 64, levels[0] if levels else 1
    options: Any = {"levels": levels}
    given = comm_type, degree, rows, (heads, groups), (size, value_size), dtype
    wanted = layer_bytes(comm_type, rows, *sizes, dtype.itemsize, degree, inner)
    found = measured(Layer(*given, **options))
    assert found == pytest.approx(wanted, rel=0.02)
    for rank in (0, degree - 1):
        causal = measured(Layer(*given, **options, causal=True, rank=rank))
        assert all(x <= 1.02 * most for x, most in zip(causal, wanted, strict=True)), rank


def test_the_forward_of_a_ring_does_not_grow_with_its_degree() -> None:
    sizes = (16, 8), (32, 32), torch.bfloat16
    peaks = {measured(Layer("p2p", degree, 64, *sizes))[0] for degree in (8, 16, 31)}
    assert len(peaks) == 1


@pytest.mark.parametrize(
    ("comm_type", "degree", "levels"), [*RINGS[1:5], *GATHERS, *HEADS[:2], HEADS[2]]
)
def test_rows_of_alignment_take_no_more_than_a_sequence_of_their_own(
    comm_type: str, degree: int, levels: tuple[int, ...]
) -> None:
    """A plan counts them so: attention's bytes of a row and of a token for each, by what layers
    without padding take. Under a2a they take just that."""
    heads, sizes, rows, padding = (16, 8), (32, 32), 64, 16
    given = heads, sizes, torch.bfloat16

    def buffers(rows: int, padding: int = 0, **options: Any) -> tuple[int, int]:
        spread = measured(Layer(comm_type, degree, rows, *given, padding=padding, **options))
        alone = measured(Layer("p2p", 1, rows + padding, *given))
        return spread[0] - alone[0], spread[2] - alone[2]

    options: Any = {"levels": levels}
    unpadded, padded = buffers(rows, **options), buffers(rows, padding, **options)
    for found, least in zip(padded, unpadded, strict=True):
        a_row = -(-least // rows)  # of attention, and of the tokens that come with it
        assert found <= least + padding * (a_row if comm_type != "all_gather" else a_row / degree)
        assert comm_type != "a2a" or found == least * (rows + padding) // rows


@pytest.mark.parametrize("chunks", [2, 4])
@pytest.mark.parametrize(
    ("comm_type", "degree", "levels"),
    [("p2p", 3, ()), ("p2p", 8, ()), ("all_gather", 8, ()), ("a2a", 2, ()), ("a2a+p2p", 8, (2, 4))],
)
def test_chunks_of_heads_take_a_fraction_of_the_buffers(
    comm_type: str, degree: int, levels: tuple[int, ...], chunks: int
) -> None:
    sizes, rows, inner = (32, 8, 32, 16), 64, levels[0] if levels else 1
    options: Any = {"levels": levels, "chunks": chunks}
    given = comm_type, degree, rows, sizes[:2], sizes[2:], torch.bfloat16
    layer = Layer(*given, **options)
    assert layer.cp.head_chunks == chunks
    wanted = layer_bytes(comm_type, rows, *sizes, 2, degree, inner, chunks)
    found = measured(layer)
    assert found == pytest.approx(wanted, rel=0.02)
    at_once = measured(Layer(*given, levels=levels))
    assert found[0] - found[1] == pytest.approx(at_once[0] / chunks, rel=0.02)


def test_the_numbers_of_the_guide_follow_from_the_formulas() -> None:
    """docs/guides/choosing-comm-type.md."""
    degrees = (8, 16, 64)
    assert [in_outputs("p2p", d)[0] for d in degrees] == [6.1, 6.1, 6.1]
    assert [in_outputs("p2p", d)[2] for d in degrees] == [11.5, 18.5, 66.5]
    assert [in_outputs("all_gather", d)[0] for d in degrees] == [8.0, 16.0, 64.0]
    assert [in_outputs("all_gather", d)[2] for d in degrees] == [10.5, 18.5, 66.5]
    assert in_outputs("a2a", 8) == [4.1, 1.0, 7.0]
    levels = [in_outputs("a2a+p2p", 16, m) for m in (2, 4, 8)]
    assert levels == [[7.6, 1.0, 15.0], [6.6, 1.0, 12.0], [4.5, 1.0, 8.0]]
    chunked = [in_outputs("p2p", 64, c=c) for c in (2, 4, 8)]
    assert chunked == [[4.1, 1.0, 36.3], [2.5, 1.0, 18.9], [1.8, 1.0, 10.2]]
    gathered = [in_outputs("all_gather", 64, c=c) for c in (2, 4, 8)]
    assert gathered == [[33.0, 1.0, 36.3], [17.0, 1.0, 18.9], [9.0, 1.0, 10.2]]
