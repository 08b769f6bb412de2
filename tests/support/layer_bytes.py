"""The bytes that attention of a layer takes at its peak, in addition to what it is given.

For one sequence, full or causal. Rotated queries and keys, buffers of the transport and the
workspace of a kernel come on top. docs/guides/choosing-comm-type.md has numbers that follow.
"""

from __future__ import annotations


def ring_forward(T: int, n: int, o: int, total: int, k: int) -> int:
    """n stages of T rows: the last one has neither keys in flight nor any use for them."""
    if n <= 5:
        return T * max(2 * k * (n > 1) + (n - 1) * o, k * (n > 1) + n * o, (n + 1) * o * (n > 1))
    left = (n - 1) % 3 + 1  # stages that are merged last
    return T * max(2 * k + 3 * o + total, (left + 1) * o + total)


def ring_backward(T: int, n: int, q: int, total: int, k: int) -> int:
    """Gradients of n blocks of keys, and n - 1 of them packed; later those that come instead."""
    if n == 1:
        return T * (q + k)
    if n <= 5:
        return T * ((2 * n - 1) * k + (n + 1) * q)
    left = (n - 1) % 3 + 1
    return T * max((n + 1) * k + 3 * q + total, (2 * n - 1) * k + left * q + total)


def layer_bytes(
    comm_type: str, T: int, H: int, G: int, D: int, E: int, b: int, d: int, m: int = 1, c: int = 1
) -> tuple[int, int, int]:
    """Forward, kept and backward of T rows on each of d ranks: H query heads and G key-value heads
    of D elements (values: E) of b bytes. m: the neighbours of a2a+p2p, which divide H and G.
    c: chunks of heads, which divide G; the neighbours then divide H/c and G/c."""
    w = max(b, 4)  # bytes of a log-sum-exp, and in a total
    q, k = H * D * b, G * (D + E) * b  # queries of a row; keys and values
    o = H * (E * b + w)  # output and log-sum-exp
    given = q + H * E * b + o + k  # what the backward takes to other ranks
    if c > 1:  # of the whole: results; of a chunk: all else
        part, _, part_back = layer_bytes(comm_type, T, H // c, G // c, D, E, b, d, m)
        return T * o + part, T * o, T * (q + k) + T * (given - k) // c + part_back
    ring = o, H * (E + 2) * w, k  # the total has two log-sum-exps while it is merged
    back = q, H * D * w, k
    if comm_type == "p2p":
        return ring_forward(T, d, *ring), T * o, ring_backward(T, d, *back)
    if comm_type == "all_gather":  # as received, and in order
        keys = (d - 1) * k
        forward = max(2 * keys + o, k + keys + o, keys + 2 * o, 3 * o)
        return T * forward, T * o, T * ((2 * d - 1) * k + 3 * q)
    m = d if comm_type == "a2a" else m  # rows of m ranks, 1/m of the heads: as many bytes
    forward = max(2 * T * (q + k), T * (q + k) + ring_forward(T, d // m, *ring), 4 * T * o)
    backward = max(2 * T * given, T * given + ring_backward(T, d // m, *back), 4 * T * (q + k))
    return forward, T * o, backward


def in_outputs(comm_type: str, d: int, m: int = 1, c: int = 1) -> list[float]:
    """The same in units of the output, at 32 and 8 heads of 128 in bfloat16."""
    sizes = layer_bytes(comm_type, 1, 32, 8, 128, 128, 2, d, m, c)
    return [round(size / (32 * 128 * 2), 1) for size in sizes]
