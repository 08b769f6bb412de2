"""Attention on several GPUs over NCCL, against one rank with whole sequences.

    torchrun --nproc-per-node 2 tests/cuda/check_multi.py [--transports peer nccl]

As ranks of several hosts, 4 of them on 2 GPUs: plans know the nodes, and rows cross their borders
once. It also counts the bytes that do.

    torchrun --nproc-per-node 4 tests/cuda/as_nodes.py 2 tests/cuda/check_multi.py --nodes 2

On one GPU, which ranks of several hosts share, `--transports nccl`. It exits with 1 if a result is
wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from itertools import product

import torch
import torch.distributed as dist
from support.cases import Case, attention_errors
from support.graphs import difference
from support.nodes import rows_needed_elsewhere

import hcp
from hcp._words import CommType, TransportName
from hcp.exchange.agreement import CallKind, Stamp
from hcp.exchange.connect import TRANSPORTS
from hcp.exchange.mixed import MixedTransport
from hcp.exchange.tables import Move

LENGTHS = (97, 40, 13, 2, 1, 7, 300)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS)
    parser.add_argument("--nodes", type=int, default=1, help="hosts that the ranks are on")
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    if args.nodes > 1:
        wrong = check_nodes(
            args.transports or ["nccl", "mixed"], dist.get_world_size() // args.nodes
        )
        dist.destroy_process_group()
        return wrong > 0
    transports: list[TransportName] = args.transports or ["torch", "nccl", "peer"]
    wrong = sum(check(transport) for transport in transports)
    if {"peer", "nccl"} <= {*transports}:
        wrong += check_long("peer", "nccl")
        wrong += check_heads("peer", "nccl") + check_whole("peer", "nccl")
    wrong += check_graph()
    wrong += check_layers_in_graphs("nccl", ("p2p", "all_gather", "a2a"))
    if "peer" in transports:
        wrong += check_layers_in_graphs("peer", ("p2p", "all_gather", "a2a"))
    dist.destroy_process_group()
    return wrong > 0


def check_nodes(transports: Sequence[TransportName], node: int) -> int:
    """The number of wrong cases of ranks on several hosts. ``node``: ranks of each."""
    groups = hcp.build_process_groups()
    wrong = report(
        node == 1 or groups.transport.name == "mixed", f"auto chooses {groups.transport.name!r}"
    )
    groups.close()
    wrong += sum(check(transport, node) for transport in transports)
    if {"mixed", "nccl"} <= {*transports}:
        wrong += check_long("mixed", "nccl", node=node)
        wrong += check_heads("mixed", "nccl", node=node) + check_whole("mixed", "nccl", node=node)
    if "mixed" in transports:
        wrong += check_bytes(node)
    return wrong


def check_bytes(node: int) -> int:
    """The number of packs of which more crosses the borders of nodes than rows that are needed
    there, each once: what the part of `mixed` that sends by NCCL sends."""
    groups = hcp.build_process_groups(transport="mixed")
    transport, ranks = groups.transport, groups.size("dp_cp")
    assert isinstance(transport, MixedTransport)
    heads, head_dim = 4, 64
    wrong = 0
    types: tuple[CommType, ...] = ("p2p", "all_gather", "a2a+p2p")
    windows = (-1, 0), (-1, -1), (100, 0)
    for comm_type, lengths, window in product(types, ((4096,), (2048, 700, 331, 97)), windows):
        plan = hcp.plan(
            lengths, ranks=ranks, max_tokens_per_rank=4096, min_degree=ranks, ranks_per_node=node
        )
        sizes = (node, ranks // node) if comm_type == "a2a+p2p" else ()
        cp = hcp.ContextParallelHandler(
            plan,
            0,
            transport,
            comm_types=[comm_type],
            hierarchical_context_parallel_sizes=sizes,
        )
        leaves = [
            torch.randn(cp.rows, heads, head_dim, device="cuda").bfloat16().requires_grad_()
            for _ in range(3)
        ]
        causal = window[1] == 0
        for _ in range(2):  # at the first call, ranks also compare it
            before = transport.bytes_sent
            out = cp.attention(*leaves, causal=causal, window_size=window)
            between = transport.bytes_sent
            torch.autograd.grad(out, leaves, out.detach())
            found = between - before, transport.bytes_sent - between
        forward, backward = (total(bytes_sent) for bytes_sent in found)
        bound = rows_needed_elsewhere(plan, node, window) * 2 * heads * head_dim * 2
        wrong += report(
            bound <= forward <= 1.05 * bound and backward <= 2 * 1.05 * bound,
            f"mixed {comm_type:10} {len(lengths)} sequences, window {window!s:8}: "
            f"{forward:.0f} bytes cross forward, {backward:.0f} backward: "
            f"{forward / bound:.3f} and {backward / 2 / bound:.3f} of the bound",
        )
    groups.close()
    return wrong


def check(transport: TransportName, node: int | None = None) -> int:
    """The number of wrong cases. ``node``: ranks of a host, where there are several."""
    groups = hcp.build_process_groups(transport=transport)
    ranks = groups.size("dp_cp")
    wrong = 0
    degrees = sorted({1, 2, ranks} if node is None else {1, ranks})
    for comm_type, causal, min_degree in product(hcp.COMM_TYPES, (True, False), degrees):
        for dtype, limit in (("float64", 1e-10), ("bfloat16", 0.1)):
            case = Case(
                LENGTHS,
                ranks,
                capacity=512,
                min_degree=min(min_degree, ranks),
                comm_type=comm_type,
                causal=causal,
                head_dim=64,
                dtype=dtype,
                node=node,
            )
            worst = largest(max(attention_errors(groups, case)))
            wrong += report(
                worst <= limit,
                f"{transport:5} {comm_type:10} {'causal' if causal else 'full':6} "
                f"degree >= {min_degree} {dtype:8} largest error {worst:.2e}",
            )
    groups.close()
    return wrong


def check_long(*transports: TransportName, node: int | None = None) -> int:
    """The number of results of long sequences that differ between transports: those of all_gather
    in any bit, those of p2p by more than rounding, since under `peer` it reads only rows that are
    seen, and kernels then add in other blocks.

    A rank has 64 MiB of keys and values, which `peer` reads piece by piece and in copies, and
    `mixed` sends through its mailboxes. Attention adds in one order meanwhile."""
    torch.use_deterministic_algorithms(True)
    found: dict[str, list[tuple[CommType, torch.Tensor]]] = {}
    for transport in transports:
        groups = hcp.build_process_groups(transport=transport)
        ranks = groups.size("dp_cp")
        results = found[transport] = []
        types: tuple[CommType, ...] = ("p2p", "all_gather")
        for comm_type, lengths in product(types, ((16384 * ranks,), (2048 * ranks,) * 8)):
            plan = hcp.plan(
                lengths,
                ranks=ranks,
                max_tokens_per_rank=16384 + 2 * ranks,
                min_degree=ranks,
                ranks_per_node=node,
            )
            cp = hcp.ContextParallelHandler(plan, 0, groups.transport, comm_types=[comm_type])
            generator = torch.Generator("cuda").manual_seed(groups.rank("dp_cp"))
            query, key, value, grad = (
                torch.randn(cp.rows, heads, 128, device="cuda", generator=generator).bfloat16()
                for heads in (8, 8, 8, 8)
            )
            leaves = [x.requires_grad_() for x in (query, key, value)]
            for _ in range(3):  # through both halves
                out = cp.attention(*leaves)
                given = out.detach(), *torch.autograd.grad(out, leaves, grad)
                results += [(comm_type, x) for x in given]
        torch.cuda.synchronize()
        groups.close()
    torch.use_deterministic_algorithms(False)
    first, *others = found.values()
    wrong = sum(
        not (torch.equal(a, b) or (comm_type == "p2p" and difference([a], [b]) < 2**-8))
        for other in others
        for (comm_type, a), (_, b) in zip(first, other, strict=True)
    )
    worst = largest(float(wrong))
    return report(worst == 0, f"{' and '.join(transports)}: {worst:.0f} long results differ")


HEADS = (8, 8), (8, 2), (16, 1), (10, 5), (6, 3), (3, 3), (2, 1)
"""Numbers of query and key-value heads: those that divide over ranks, odd ones, and fewer key-value
heads than ranks, and heads."""
PACKS = ((97, 40, 13, 2, 1, 7, 300), 64, 2**30), ((2**15,), 128, 2**30), ((2**15,), 128, 2**24)
"""Lengths, head size, and the bytes of the peer buffer: small rows, long ones, and those that take
many pieces."""


def check_heads(*transports: TransportName, node: int | None = None) -> int:
    """The number of layers that exchange rows for heads whose results differ in any bit between
    transports: several calls, through both halves, forward and backward. Groups lie in a node."""
    torch.use_deterministic_algorithms(True)
    wrong = 0
    for lengths, head_dim, buffer_bytes in PACKS:
        first, *others = (
            results_of_heads(transport, lengths, head_dim, buffer_bytes, node)
            for transport in transports
        )
        for heads in HEADS:
            differ = sum(
                not torch.equal(a, b)
                for other in others
                for a, b in zip(first[heads], other[heads], strict=True)
            )
            worst = largest(float(differ))
            wrong += report(
                worst == 0,
                f"{' and '.join(transports)}: a2a {heads} heads of {head_dim}, {sum(lengths)} "
                f"tokens, buffer of {buffer_bytes >> 20} MiB: {worst:.0f} results differ",
            )
    torch.use_deterministic_algorithms(False)
    return wrong


def results_of_heads(
    transport: TransportName,
    lengths: tuple[int, ...],
    head_dim: int,
    buffer_bytes: int,
    node: int | None,
) -> dict[tuple[int, int], list[torch.Tensor]]:
    """Outputs and gradients of layers, by their heads."""
    groups = hcp.build_process_groups(transport=transport, peer_buffer_bytes=buffer_bytes)
    plan = plan_in_nodes(lengths, groups.size("dp_cp"), node)
    cp = hcp.ContextParallelHandler(plan, 0, groups.transport, comm_types=["a2a"])
    results: dict[tuple[int, int], list[torch.Tensor]] = {}
    for queries, keys in HEADS:
        generator = torch.Generator("cuda").manual_seed(groups.rank("dp_cp"))
        *leaves, grad = (
            torch.randn(cp.rows, heads, head_dim, device="cuda", generator=generator).bfloat16()
            for heads in (queries, keys, keys, queries)
        )
        for leaf in leaves:
            leaf.requires_grad_()
        found = results[queries, keys] = []
        for _ in range(3):
            out = cp.attention(*leaves)
            found += [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    torch.cuda.synchronize()
    groups.close()
    return results


def plan_in_nodes(lengths: tuple[int, ...], ranks: int, node: int | None) -> hcp.Plan:
    """A group in each node, each with these lengths."""
    degree = node or ranks
    return hcp.plan(
        lengths * (ranks // degree),
        ranks=ranks,
        max_tokens_per_rank=-(-sum(lengths) // degree) + 2 * len(lengths),
        min_degree=degree,
        max_degree=degree,
        ranks_per_node=node,
    )


def check_whole(*transports: TransportName, node: int | None = None) -> int:
    """The number of kinds of rows that come back from whole sequences of heads with another bit, or
    whose whole sequences differ between transports."""
    kinds = (torch.bfloat16, (16, 128)), (torch.float32, (10, 33)), (torch.int8, (3, 5))
    found: list[list[torch.Tensor]] = []
    wrong = 0
    for transport in transports:
        groups = hcp.build_process_groups(transport=transport)
        plan = plan_in_nodes((2**14, 999, 3), groups.size("dp_cp"), node)
        cp = hcp.ContextParallelHandler(plan, 0, groups.transport, comm_types=["a2a"])
        found.append([])
        for dtype, (heads, size) in kinds:
            generator = torch.Generator("cuda").manual_seed(groups.rank("dp_cp"))
            shape = cp.rows, heads, size
            x = torch.randint(-99, 99, shape, device="cuda", generator=generator).to(dtype)
            whole = cp.whole.sequence_to_head(x)
            found[-1].append(whole)
            back = cp.whole.head_to_sequence(whole, heads)
            same = largest(float(not torch.equal(back, x))) == 0
            wrong += report(same, f"{transport:5} {dtype} rows {heads} x {size} come back")
        torch.cuda.synchronize()
        groups.close()
    first, *others = found
    differ = sum(not all(map(torch.equal, first, other)) for other in others)
    worst = largest(float(differ))
    return wrong + report(worst == 0, f"{' and '.join(transports)}: whole sequences of heads")


def check_graph() -> int:
    """An exchange by NCCL, captured and replayed with other rows."""
    groups = hcp.build_process_groups(transport="nccl")
    transport, ranks = groups.transport, groups.size("dp_cp")
    sent = torch.empty(ranks, 3, device="cuda")
    received = torch.empty_like(sent)
    moves = [Move(peer, peer, 1) for peer in range(ranks)]
    stamp = Stamp(CallKind("check"))
    transport.start(sent, moves, received, moves, stamp=stamp).wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        transport.start(sent, moves, received, moves, stamp=stamp).wait()
    peers = torch.arange(ranks, device="cuda", dtype=sent.dtype).unsqueeze(1)
    error = 0.0
    for replay in range(3):
        sent.copy_(100 * transport.rank + 10 * replay + peers.expand_as(sent))
        graph.replay()
        expected = 100 * peers + 10 * replay + transport.rank
        error = max(error, float((received - expected).abs().max()))
    del graph
    groups.close()
    worst = largest(error)
    return report(worst == 0, f"nccl  exchange in a CUDA graph: largest error {worst:.2e}")


def check_layers_in_graphs(transport: TransportName, comm_types: Sequence[CommType]) -> int:
    """The number of layers whose captured passes differ from those without a graph."""
    torch.use_deterministic_algorithms(True)
    groups = hcp.build_process_groups(transport=transport)
    wrong = 0
    for lengths, heads, head_dim in ((LENGTHS, (4, 2, 2, 4), 64), ((2**15,), (8, 8, 8, 8), 128)):
        for comm_type in comm_types:
            size = lengths, heads, head_dim
            worst = largest(float(differences_in_graph(groups, comm_type, *size)))
            wrong += report(
                worst == 0,
                f"{transport:5} {comm_type} of {sum(lengths)} tokens in a CUDA graph: "
                f"{worst:.0f} results differ",
            )
    groups.close()
    torch.use_deterministic_algorithms(False)
    return wrong


def differences_in_graph(
    groups: hcp.ProcessGroups,
    comm_type: CommType,
    lengths: tuple[int, ...],
    heads: tuple[int, ...],
    head_dim: int,
) -> int:
    """Results of a layer that differ bit for bit, replayed with other rows and run in between.
    Keys and values of 2**15 tokens are 128 MiB, which `peer` reads in copies."""
    ranks = groups.size("dp_cp")
    most = -(-sum(lengths) // ranks) + 2 * len(lengths)
    plan = hcp.plan(lengths, ranks=ranks, max_tokens_per_rank=most, min_degree=ranks)
    cp = hcp.ContextParallelHandler(plan, 0, groups.transport, comm_types=[comm_type])
    *leaves, grad = given = [
        torch.empty(cp.rows, number, head_dim, device="cuda", dtype=torch.bfloat16)
        for number in heads
    ]
    drawn = [[torch.randn_like(x) for x in given] for _ in range(3)]
    for leaf in leaves:
        leaf.requires_grad_()

    def layer() -> list[torch.Tensor]:
        out = cp.attention(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    def run(rows: list[torch.Tensor]) -> list[torch.Tensor]:
        fill(given, rows)
        return layer()

    side, current = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):  # once: tables go to the device, and the ranks agree
        expected = [run(rows) for rows in drawn]
    current.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = layer()
    different = 0
    for rows, want in zip(drawn, expected, strict=True):
        fill(given, rows)
        graph.replay()
        for found in (results, run(rows)):
            different += sum(not torch.equal(a, b) for a, b in zip(found, want, strict=True))
    return different


def fill(tensors: list[torch.Tensor], rows: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for tensor, own in zip(tensors, rows, strict=True):
            tensor.copy_(own)


def largest(error: float) -> float:
    """The largest error of all ranks."""
    worst = torch.tensor(error, device="cuda", dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()


def total(number: int) -> float:
    """The sum over all ranks."""
    numbers = torch.tensor(number, device="cuda", dtype=torch.float64)
    dist.all_reduce(numbers)
    return numbers.item()


def report(ok: bool, text: str) -> int:
    if dist.get_rank() == 0:
        print(f"{'ok ' if ok else 'BAD'} {text}", flush=True)
    return int(not ok)


if __name__ == "__main__":
    sys.exit(main())
