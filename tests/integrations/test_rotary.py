"""Rotations that the layers of a micro-batch share."""

import gc
import weakref

import torch

import hcp
from hcp.integrations.unrotated import once, place_of


def handlers(count):
    plan = hcp.plan([5], ranks=1, max_tokens_per_rank=5)

    def make(groups):
        return [hcp.ContextParallelHandler(plan, 0, groups.transport) for _ in range(count)]

    return hcp.loopback(1, make)[0]


def test_a_rotation_is_made_once_for_a_table_and_its_options():
    (cp, other), table, made = handlers(2), torch.zeros(3, 4), []

    def asked(of, cp=cp, options=()):
        return once(cp, (place_of(of), options), of, lambda: made.append(of) or len(made))

    assert [asked(table), asked(table), asked(table.detach()), asked(table.view(3, 4))] == [1] * 4
    assert asked(table, other) == 2
    assert asked(table, options=("interleaved",)) == 3
    assert asked(table[:2]) == 4
    assert asked(table[:, :2]) == 5  # the fourth of this handler, and all that it keeps
    assert asked(table) == 1
    table.add_(1)  # the same memory, with other numbers
    assert asked(table) == 6
    assert asked(torch.ones(3, 4)) == 7
    with torch.inference_mode():
        assert asked(torch.ones(3, 4)) == 8


def test_a_micro_batch_keeps_the_last_few():
    (cp,), tables, made = handlers(1), [torch.zeros(2) for _ in range(6)], []
    for table in (*tables, *tables):
        once(cp, place_of(table), table, lambda table=table: made.append(table))
    assert len(made) == 12


def test_rotations_go_with_their_micro_batch():
    (cp,), table = handlers(1), torch.zeros(2)
    once(cp, place_of(table), table, lambda: None)
    gone = weakref.ref(table)
    del table
    gc.collect()
    assert gone() is not None
    del cp
    gc.collect()
    assert gone() is None


def test_rotations_of_positions_go_with_them():
    positions, made = torch.arange(3), []

    def asked(of):
        return once(of, "key", None, lambda: made.append(of.shape) or len(made))

    assert [asked(positions), asked(positions), asked(positions.clone())] == [1, 1, 2]
    gone = weakref.ref(positions)
    del positions
    gc.collect()
    assert gone() is None
