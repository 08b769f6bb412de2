"""Ranks whose calls differ, in kind or in order, all get an error and no result of other rows.

The ranks use Gloo. A call's rows depend on its layer and sequence, so that rows of another call
would show in the result. Sequences have one length, so that nothing else tells calls apart.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import RankError, run_ranks, try_ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import hcp
import hcp.exchange.connect
from hcp.exchange.agreement import (
    FORWARD,
    CallKind,
    Recent,
    Refusal,
    Stamp,
    differing,
    header_of,
    header_of_refusal,
    read_header,
)
from hcp.exchange.gather import NO_COUNT, block_of, block_size, read_blocks
from hcp.exchange.tables import Origin
from hcp.exchange.torch_p2p import TorchTransport
from hcp.tools.loopback import gathered_of

LENGTH, HEADS, GROUPS, SIZE = 32, 4, 2, 8

Micro = tuple[hcp.ContextParallelHandler, Any]


def whole(sequence: int, layer: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * layer + sequence)
    heads = (HEADS, GROUPS, GROUPS)
    return [torch.randn(LENGTH, n, SIZE, generator=generator, dtype=torch.float64) for n in heads]


def expected(sequence: int, layer: int) -> Tensor:
    query, key, value = whole(sequence, layer)
    key, value = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / SIZE**0.5
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)


def rows(micro: Micro, layer: int = 0) -> list[Tensor]:
    cp, _ = micro
    (sequence,) = cp.layout.sequences
    return [x[cp.position_ids].requires_grad_() for x in whole(sequence, layer)]


def attend(micro: Micro, layer: int = 0, name: int | str | None = None) -> Tensor:
    """The result, which is right where it is given."""
    cp, _ = micro
    out = cp.attention(*rows(micro, layer), layer=name)
    (sequence,) = cp.layout.sequences
    worst = (out - expected(sequence, layer)[cp.position_ids]).abs().max()
    assert worst < 1e-10, f"WRONG: off by {worst} in layer {layer}, without an error"
    return out


def step_of(size: int, sequences: int = 1, **options: Any) -> list[Micro]:
    groups = hcp.build_process_groups(cp=1)
    return dispatched(groups, size, sequences, **options)


def dispatched(groups: Any, size: int, sequences: int, **options: Any) -> list[Micro]:
    lengths = [LENGTH] * sequences
    limits = {"max_tokens_per_rank": -(-LENGTH // size), "min_degree": size}
    plan = hcp.plan(lengths, ranks=size, **limits)
    rank = groups.transport.rank
    samples = [{"tokens": torch.full((LENGTH,), s)} for s in range(sequences)] if rank == 0 else []
    return list(hcp.dispatch(plan, samples, [0] * sequences, groups, **options))


# ---- what ranks can do differently ---------------------------------------------------------------


def micro_batches_in_another_order(rank: int, size: int) -> None:
    micros = step_of(size, 2)
    for micro in micros if rank == 0 else micros[::-1]:
        attend(micro)


def a_micro_batch_is_skipped(rank: int, size: int) -> None:
    for i, micro in enumerate(step_of(size, 3)):
        if (rank, i) != (1, 0):
            attend(micro)


def a_layer_is_skipped(rank: int, size: int) -> None:
    first, second = step_of(size, 2)
    for layer in (0, 1, 2) if rank == 0 else (0, 2):
        attend(first, layer, name=layer)
    attend(second)


def a_layer_is_skipped_without_a_name(rank: int, size: int) -> None:
    """Until another micro-batch comes, nothing tells layers of one kind apart."""
    first, second = step_of(size, 2)
    (cp, _) = first
    for layer in (0, 1) if rank == 0 else (0,):
        cp.attention(*rows(first, layer))
    attend(second)


def layers_in_another_order(rank: int, size: int) -> None:
    (micro,) = step_of(size)
    for layer in (0, 1) if rank == 0 else (1, 0):
        attend(micro, layer, name=f"layers.{layer}")


def backwards_in_another_order(rank: int, size: int) -> None:
    (micro,) = step_of(size)
    outs = [attend(micro, layer) for layer in (0, 1)]
    for out in outs if rank == 0 else outs[::-1]:
        out.sum().backward()


def one_rank_recomputes(rank: int, size: int) -> None:
    (micro,) = step_of(size)
    cp, _ = micro
    outs = []
    for layer in (0, 1):
        given = rows(micro, layer)
        recomputed = rank == 1
        outs.append(
            checkpoint(cp.attention, *given, use_reentrant=False)
            if recomputed
            else cp.attention(*given)
        )
    sum(out.sum() for out in outs).backward()  # type: ignore[union-attr]


def steps_in_another_order(rank: int, size: int) -> None:
    groups = hcp.build_process_groups(cp=1)
    steps = [dispatched(groups, size, 1) for _ in range(2)]
    for (micro,) in steps if rank == 0 else steps[::-1]:
        attend(micro)


def handlers_of_other_plans(rank: int, size: int) -> None:
    groups = hcp.build_process_groups(cp=1)
    limits = {"max_tokens_per_rank": -(-LENGTH // size), "min_degree": size}
    plan = hcp.plan([LENGTH] * 2, ranks=size, **limits).to_dict()
    if rank == 1:
        plan["micro_batches"] = plan["micro_batches"][::-1]
    cp = hcp.ContextParallelHandler(hcp.Plan.from_dict(plan), 0, groups.transport)
    attend((cp, None))


def rolled_in_another_order(rank: int, size: int) -> None:
    micros = step_of(size, 2)
    for cp, local in micros if rank == 0 else micros[::-1]:
        rolled = cp.roll_tensor(local.tokens)
        inside = cp.position_ids < LENGTH - 1
        assert torch.equal(rolled[inside], local.tokens[inside]), "WRONG, without an error"


def sums_in_another_order(rank: int, size: int) -> None:
    micros = step_of(size, 2)
    for cp, _ in micros if rank == 0 else micros[::-1]:
        x = torch.full((1,), float(cp.micro_batch))
        assert cp.group.sum(x) == size * x, "WRONG, without an error"


def heads_in_another_order(rank: int, size: int) -> None:
    micros = step_of(size, 2)
    for cp, local in micros if rank == 0 else micros[::-1]:
        x = local.tokens.double().view(-1, 1, 1).expand(-1, size, 1)
        assert (cp.whole.sequence_to_head(x) == x[0]).all(), "WRONG, without an error"


def halos_in_another_order(rank: int, size: int) -> None:
    micros = step_of(size, 2)
    for cp, local in micros if rank == 0 else micros[::-1]:
        halo = cp.scan.halo(local.tokens.double() + 1, 1)
        assert ((halo == 0) | (halo == local.tokens[0] + 1)).all(), "WRONG, without an error"


def threads_in_another_order(rank: int, size: int) -> None:
    """Two threads of each rank attend at once: in turns that one rank has the other way."""
    micros = step_of(size, 2)
    first_done, failures = threading.Event(), []

    def work(place: int) -> None:
        try:
            if place == 1:
                assert first_done.wait(20)
            attend(micros[place if rank == 0 else 1 - place])
        except BaseException as error:
            failures.append(error)
        finally:
            first_done.set()

    threads = [threading.Thread(target=work, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def one_rank_runs_a_backward_twice(rank: int, size: int) -> None:
    (micro,) = step_of(size)
    out = attend(micro)
    for _ in range(2 - rank):
        out.sum().backward(retain_graph=True)
    attend(micro)


def cross_attends(**options: Any) -> Callable[[int, int], None]:
    def attend_across(rank: int, size: int) -> None:
        (micro,) = step_of(size)
        cp, _ = micro
        query, key, value = rows(micro)
        cp.cross_attention(query, key, value, cp, **({} if rank else options))

    return attend_across


def cross_attends_with_another_scale(rank: int, size: int) -> None:
    cross_attends(softmax_scale=0.5)(rank, size)


def cross_attends_with_another_cap(rank: int, size: int) -> None:
    cross_attends(softcap=5.0)(rank, size)


def cross_attends_with_sinks(rank: int, size: int) -> None:
    cross_attends(sinks=torch.ones(HEADS))(rank, size)


def cross_attends_with_fewer_heads(rank: int, size: int) -> None:
    (micro,) = step_of(size)
    cp, _ = micro
    query, key, value = rows(micro)
    cp.cross_attention(query[:, : GROUPS * (1 + rank)], key, value, cp)


def one_rank_needs_no_gradients(rank: int, size: int) -> None:
    """As one that loaded no samples, and makes its rows anew."""
    (micro,) = step_of(size)
    cp, _ = micro
    x = torch.zeros(cp.rows, 2, requires_grad=rank == 0)
    cp.combine(x).sum().backward()


# By the name of what ranks do: words that the error of a rank has.
WORDS: dict[Callable[..., None], str] = {
    micro_batches_in_another_order: r"micro-batch differs: [01] on rank \d, [01] on rank \d",
    a_micro_batch_is_skipped: r"micro-batch differs: [01] on rank \d, [01] on rank \d",
    a_layer_is_skipped: r"layer differs: [12] on rank \d, [12] on rank \d",
    a_layer_is_skipped_without_a_name: r"micro-batch differs: .*; call differs",
    layers_in_another_order: r"layer differs: layers\.[01] on rank \d, layers\.[01] on rank \d",
    backwards_in_another_order: r"in attention, call differs: [12] on rank \d, [12] on rank \d",
    one_rank_recomputes: r"call differs: [23] on rank \d, [23] on rank \d; pass differs",
    steps_in_another_order: r"step differs: [12] on rank \d, [12] on rank \d",
    handlers_of_other_plans: r"plan differs: \w{16} on rank \d, \w{16} on rank \d",
    rolled_in_another_order: r"in roll_tensor, micro-batch differs: [01] on rank \d",
    sums_in_another_order: r"in group\.sum, micro-batch differs: [01] on rank \d",
    heads_in_another_order: r"in whole\.sequence_to_head, micro-batch differs: [01] on rank \d",
    halos_in_another_order: r"in scan\.halo, micro-batch differs: [01] on rank \d",
    threads_in_another_order: r"micro-batch differs: [01] on rank \d, [01] on rank \d",
    one_rank_runs_a_backward_twice: r"pass differs: (for|back)ward on rank \d, (for|back)ward on",
    one_rank_needs_no_gradients: r"gradients differs: x.requires_grad on rank 0, nothing on rank 1",
    cross_attends_with_another_scale: r"softmax_scale differs: 0\.5 on rank \d, 0\.35",
    cross_attends_with_another_cap: r"softcap differs: 5\.0 on rank \d, 0\.0 on rank 1",
    cross_attends_with_sinks: r"sinks differs: True on rank \d, False on rank 1",
    cross_attends_with_fewer_heads: r"query differs: float64 \(2, 8\) on rank \d, float64 \(4, 8\)",
}


@pytest.mark.parametrize("differently", WORDS, ids=lambda case: case.__name__)
def test_ranks_hear_in_words_what_differs(differently: Callable[..., None]) -> None:
    results = try_ranks(2, differently, group_timeout=20)
    for result in results:
        assert isinstance(result, RankError), f"{differently.__name__} ended without an error"
        assert result.kind == "HcpError", str(result)
    said = "\n".join(result.message for result in results)
    assert re.search(WORDS[differently], said), said


DIFFERING = {
    "causal": ({"causal": True}, {"causal": False}, "causal differs: True on rank 0, False on"),
    "window": (
        {"window_size": (3, 0)},
        {"window_size": (4, 0)},
        r"window_size differs: \[3, 0\] on",
    ),
    "scale": ({"softmax_scale": 0.5}, {}, r"softmax_scale differs: 0\.5 on rank \d, 0\.35"),
    "comm type": ({"comm_type": "a2a"}, {}, "comm_type differs: a2a on rank 0, p2p on rank 1"),
}


def call_with(
    rank: int, size: int, one: dict[str, Any], other: dict[str, Any], before: int
) -> None:
    (micro,) = step_of(size, comm_types=("p2p", "a2a"))
    cp, _ = micro
    for _ in range(before):
        cp.attention(*rows(micro))
    cp.attention(*rows(micro), **(other if rank else one))


@pytest.mark.parametrize("option", DIFFERING)
@pytest.mark.parametrize("before", [0, 1])
def test_options_that_differ_are_named(option: str, before: int) -> None:
    one, other, words = DIFFERING[option]
    results = try_ranks(2, call_with, one, other, before, group_timeout=20)
    assert [result.kind for result in results] == ["HcpError"] * 2
    assert re.search(words, results[0].message), results[0].message


# ---- ranks that are no neighbours in the ring ----


def refuses_alone(micro: Micro, rank: int) -> None:
    cp, _ = micro
    query, key, value = rows(micro)
    cp.attention(query, key, value if rank else value.float())


def differs_alone(micro: Micro, rank: int) -> None:
    cp, _ = micro
    cp.attention(*rows(micro), softmax_scale=0.5 if rank else 0.3)


def runs_backwards_in_another_order(micro: Micro, rank: int) -> None:
    outs = [attend(micro, layer) for layer in (0, 1)]
    for out in outs if rank else outs[::-1]:
        out.sum().backward()


def says_what_it_hears(rank: int, size: int) -> list[str]:
    """On ranks that live on, so that no closed connection tells the others."""
    heard = []
    for act in (refuses_alone, differs_alone, runs_backwards_in_another_order):
        (micro,) = step_of(size)  # after a failure, new groups
        try:
            act(micro, rank)
        except (hcp.HcpError, ValueError) as error:
            heard.append(str(error))
    return heard


def test_ranks_beyond_the_neighbours_in_a_ring_hear_it_from_the_rank_itself() -> None:
    for rank, heard in enumerate(run_ranks(4, says_what_it_hears, group_timeout=30)):
        words = (
            "rank 0 has refused attention",
            "softmax_scale differs",
            "call differs: 2 on rank 0, 1 on",
        )
        if rank:
            assert len(heard) == len(words)
            for said, wanted in zip(heard, words, strict=True):
                assert f"rank {rank}: rank 0" in said
                assert wanted in said


# ---- what keeps working --------------------------------------------------------------------------


def in_many_orders(rank: int, size: int) -> None:
    """Checkpoints, reversed backwards, interleaved micro-batches, a graph that is used twice."""
    micros = step_of(size, 2)
    outs = [attend(micro, layer, name=layer) for layer in (0, 1) for micro in micros]
    for out in reversed(outs):
        out.sum().backward()
    cp, _ = micros[0]
    outs = [
        checkpoint(cp.attention, *rows(micros[0], layer), use_reentrant=False) for layer in (0, 1)
    ]
    (outs[0].sum() + outs[1].sum()).backward()
    out = attend(micros[1])
    out.sum().backward(retain_graph=True)
    out.sum().backward()
    attend(micros[0], 2)
    attend(micros[0], 3, name="named")


@pytest.mark.parametrize("size", [2, 3])
def test_all_orders_that_ranks_share_work(size: int) -> None:
    run_ranks(size, in_many_orders, group_timeout=30)


def refuses(rank: int, size: int, who: tuple[int, ...]) -> None:
    (micro,) = step_of(size)
    cp, _ = micro
    attend(micro)
    query, key, value = rows(micro)
    if rank in who:
        with pytest.raises(ValueError, match="value has dtype"):
            cp.attention(query, key, value.float())
        if len(who) < size:
            raise OSError("this rank has given up")
    attend(micro)


def test_a_call_that_all_ranks_refuse_leaves_the_next_ones_right() -> None:
    run_ranks(3, refuses, (0, 1, 2), group_timeout=30)


def test_a_rank_that_refuses_its_call_tells_the_others_at_once() -> None:
    results = try_ranks(3, refuses, (1,), group_timeout=30)
    assert [result.kind for result in results] == ["HcpError", "OSError", "HcpError"]
    for result in results[::2]:
        assert "has refused attention, call 2 of micro-batch 0 in step 1" in result.message
        assert "ValueError: value has dtype torch.float32" in result.message


def sums_refuse(micro: Micro, rank: int) -> None:
    cp, _ = micro
    cp.sequences.sum(torch.ones(cp.rows + (rank == 0)))


def core_attention_refuses(micro: Micro, rank: int) -> None:
    cp, _ = micro
    query, key, value = rows(micro)
    cp.core_attn(
        attn_mod=None,
        query=query,
        key=key,
        value=value,
        attention_mask=None if rank else torch.ones(1),
    )


def whole_heads_refuse(micro: Micro, rank: int) -> None:
    cp, _ = micro
    query, key, value = rows(micro)
    if rank == 0:
        query = query[:, :1]
    cp.core_attn(attn_mod=lambda q, k, v, **_: q, query=query, key=key[:, :1], value=value[:, :1])


def refuse_in_turn(rank: int, size: int) -> list[str]:
    heard = []
    for act in (sums_refuse, core_attention_refuses, whole_heads_refuse):
        (micro,) = step_of(size)  # after a failure, new groups
        with pytest.raises(hcp.HcpError if rank else ValueError) as raised:
            act(micro, rank)
        heard.append(str(raised.value))
    return heard


def test_what_is_refused_before_an_exchange_is_told_too() -> None:
    _, heard = run_ranks(2, refuse_in_turn, group_timeout=30)
    for said, reason in zip(
        heard, ("x has shape", "attention_mask is given", "query has 1 heads"), strict=True
    ):
        assert "rank 1: rank 0 has refused" in said
        assert reason in said


def test_a_rank_that_refuses_is_heard_in_one_process_too() -> None:
    def check(groups: Any) -> None:
        (micro,) = dispatched(groups, 2, 1)
        cp, _ = micro
        given = rows(micro)
        if groups.transport.rank == 0:
            with pytest.raises(ValueError, match="softcap is -1"):
                cp.attention(*given, softcap=-1)
        else:
            cp.attention(*given)

    with pytest.raises(hcp.HcpError, match="rank 1: rank 0 has refused attention, call 1 of micro"):
        hcp.loopback(2, check)


# ---- collectives ---------------------------------------------------------------------------------


def other_collectives(rank: int, size: int, before: int) -> None:
    groups = hcp.build_process_groups(cp=1)
    for _ in range(before):
        hcp.gather_lengths([], groups)
    metrics = hcp.Metrics(groups)
    metrics.add("loss", torch.ones(3))
    if rank:
        hcp.gather_lengths([{"tokens": torch.zeros(8)}], groups)
    else:
        metrics.reduce()


def blocks_of(said: list[tuple[bytes, float]]) -> Tensor:
    return torch.stack([block_of(message, count, 1024) for message, count in said])


def test_messages_of_all_ranks_are_read_from_one_matrix() -> None:
    said = [(b"same", 1.0), (b"same", 2.0), (b"", math.inf), (b"same\0", 3.0), (b"samf", 4.0)]
    for rank in range(len(said)):
        gathered = read_blocks(blocks_of(said), rank)
        assert gathered.messages == [message for message, _ in said]
        assert gathered.counts.tolist() == [count for _, count in said]
        assert gathered.different[0] == said[rank][0]
        messages, counts = zip(*said, strict=True)
        listed = gathered_of(messages, counts, rank)
        assert (listed.messages, listed.different[0]) == (gathered.messages, said[rank][0])
    assert len(read_blocks(blocks_of(said), 0).different) == 4


def test_a_count_that_is_none_differs_from_no_message() -> None:
    gathered = read_blocks(blocks_of([(b"a", NO_COUNT)] * 3), 1)
    assert (gathered.different, gathered.which.tolist()) == ([b"a"], [0, 0, 0])
    assert gathered.counts.isnan().all()


def test_blocks_of_a_large_domain_take_no_more_than_16_mib() -> None:
    assert [block_size(n) for n in (1, 4096, 16384)] == [4096, 4096, 1024]
    for ranks in range(4096, 16385, 977):
        assert block_size(ranks) * ranks <= 2**24
        assert block_size(ranks) % 8 == 0


def gather_messages(rank: int, size: int) -> list[object]:
    transport = TorchTransport(dist.group.WORLD)
    long = b"l" * 5000 if rank == 1 else b"s"  # more than a block holds
    gathered = transport.all_gather_counted(long, float(rank), "x")
    return [gathered.messages, gathered.counts.tolist(), transport.all_gather_bytes(b"", "y")]


def test_messages_longer_than_a_block_arrive_whole() -> None:
    expected = [[b"s", b"l" * 5000, b"s"], [0.0, 1.0, 2.0], [b""] * 3]
    assert run_ranks(3, gather_messages) == [expected] * 3


def test_collectives_say_what_they_carry() -> None:
    results = try_ranks(2, other_collectives, 1, group_timeout=20)
    ways = ["Metrics.reduce here, hcp.gather_lengths", "hcp.gather_lengths here, Metrics.reduce"]
    for result, words in zip(results, ways, strict=True):
        assert isinstance(result, RankError)
        assert result.kind == "HcpError"
        assert words in result.message


def dispatches_once_more(rank: int, size: int) -> None:
    groups = hcp.build_process_groups(cp=1)
    if rank:
        next(groups.transport.steps)
    dispatched(groups, size, 1)


def test_ranks_that_dispatch_another_step_hear_it() -> None:
    for result in try_ranks(2, dispatches_once_more, group_timeout=20):
        assert "step differs: 1 on rank 0, 2 on rank 1" in result.message


def builds_with_another_hcp(rank: int, size: int, what: str) -> None:
    from hcp.exchange import connect as transports

    if rank:
        transports._build = lambda: {**_BUILD, what: "another"}  # type: ignore[assignment]
    hcp.build_process_groups(cp=1)


_BUILD = hcp.exchange.connect._build()


@pytest.mark.parametrize("what", ["version", "core", "Python"])
def test_ranks_with_another_hcp_are_refused_when_groups_are_built(what: str) -> None:
    for result in try_ranks(2, builds_with_another_hcp, what, group_timeout=20):
        assert f"the {what} of hcp is " in result.message
        assert "install the same hcp on every rank" in result.message


def test_the_build_names_what_ranks_could_differ_in() -> None:
    assert _BUILD["version"] == hcp.__version__
    assert all(re.fullmatch(r"[0-9a-f]{16}", _BUILD[name]) for name in ("core", "Python"))


# ---- stamps --------------------------------------------------------------------------------------


def test_calls_of_one_kind_have_tags_of_their_own() -> None:
    kind = CallKind("attention", Origin(7, 1, 0), query="float32 (4, 8)")
    stamps = [Stamp(kind, number, passed) for number in range(2000) for passed in range(3)]
    stamps += [Stamp(kind, 1, layer=layer) for layer in (*range(100), "a", "b")]
    assert len({stamp.tag for stamp in stamps}) == len(stamps)
    assert all(2 <= stamp.tag < 2**30 + 2 for stamp in stamps)


def test_a_device_that_found_another_tag_says_which_call_it_was() -> None:
    recent = Recent(2)
    kind = CallKind("attention", Origin(7, 1, 0))
    recent.add(Stamp(kind, 7))
    error = recent.differing(3, Stamp(kind, 7).tag, Stamp(kind, 6).tag)
    words = (
        "rank 2: rank 3 is in another call: in attention, call differs: 7 on rank 2, 6 on rank 3"
    )
    assert words in str(error)
    error = recent.differing(3, Stamp(kind, 7).tag, 12345)
    assert "rank 3 is in another call than this rank, which is in attention, call 7" in str(error)


def test_a_stamp_too_long_for_its_header_still_differs() -> None:
    calls = [Stamp(CallKind("attention", words="x" * 2000), number) for number in (1, 2)]
    assert not torch.equal(*map(header_of, calls))
    one, other = (Stamp(CallKind("attention", words="x" * 2000 + end)) for end in "ab")
    headers = header_of(one), header_of(other)
    assert not torch.equal(*headers)
    assert [read_header(h)["digest"] for h in headers] == [one.kind.digest, other.kind.digest]


def test_any_reason_of_a_refusal_fits_its_header() -> None:
    for letter in ('"', "\\", "\x1b", "\n", "é"):
        header = header_of_refusal(Refusal((2**64 - 1, 9, 9, False, 9), letter * 2000))
        assert header.shape == header_of(Stamp(CallKind("attention"))).shape
        assert "refused" in read_header(header)


def test_calls_of_other_operations_are_told_apart_by_name_alone() -> None:
    one = Stamp(CallKind("attention", Origin(7, 1, 0), causal=True), 3, FORWARD).fields
    other = Stamp(CallKind("halo", Origin(7, 1, 0), before=3), 3, FORWARD).fields
    text = str(differing(0, one, 1, other))
    assert "attention, call 3 of micro-batch 0 in step 1 here, halo, call 3" in text
    assert "causal" not in text


def calls_at_other_lines(rank: int, size: int) -> None:
    (micro,) = step_of(size, stamp_call_sites=True)
    cp, _ = micro
    if rank:
        cp.attention(*rows(micro))
    else:
        cp.attention(*rows(micro))


def test_call_sites_are_compared_where_that_is_asked() -> None:
    for result in try_ranks(2, calls_at_other_lines, group_timeout=20):
        assert re.search(r"layer differs: test_agreement\.py:\d+ < .* on rank \d", result.message)
