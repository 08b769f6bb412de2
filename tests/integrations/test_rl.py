"""Plans of a driver, computed by workers: log-probabilities in the order of the samples, and losses
of whole sequences."""

import pickle

import pytest
import torch
import torch.nn.functional as F
from support.ranks import run_ranks

import hcp
from hcp.integrations.rl import plan_in_driver, planned_step, sequence_weights

LENGTHS = [5, 17, 2, 9, 1]
SOURCES = [0, 0, 0, 1, 1]
CONFIG = hcp.Config(max_seqlen_per_dp_cp_rank=12)


def samples():
    made = torch.Generator().manual_seed(1)
    masks = [torch.rand(n, generator=made) > 0.4 for n in LENGTHS]
    masks[2][:] = False  # a sequence without loss tokens
    return [
        {
            "tokens": torch.randint(16, (n,), generator=made),
            "labels": torch.randint(16, (n,), generator=made),
            "loss_mask": sequence_weights(mask),
            "kept": mask,
        }
        for n, mask in zip(LENGTHS, masks, strict=True)
    ]


def weights():
    return torch.linspace(-1, 1, 16 * 12, dtype=torch.float64).view(16, 12).sin().requires_grad_()


def log_probs(table, tokens, labels, attend):
    hidden = table[tokens].view(-1, 3, 2, 2)
    hidden = attend(*hidden.unbind(1)).flatten(1)
    return -F.cross_entropy(hidden @ table[:, :4].T, labels, reduction="none")


def alone(q, k, v):
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)


def compute_what_the_driver_planned(rank, size, sent):
    groups, table = hcp.build_process_groups(), weights()
    sent = pickle.loads(sent)
    own = [s for s, source in zip(samples(), SOURCES, strict=True) if source == rank]
    step = planned_step(sent, own, groups, CONFIG)
    assert max(cp.degree for cp, _ in step) == size

    def of(cp, local):
        return log_probs(table, local.tokens, local.labels, cp.attention)

    with torch.no_grad():
        found = step.combine(of(cp, local) for cp, local in step)
    for sample, rows in zip(own, found, strict=True):
        expected = log_probs(table, sample["tokens"], sample["labels"], alone)
        torch.testing.assert_close(rows, expected, rtol=0, atol=1e-10)
    loss = sum(cp.loss(-of(cp, local), local.loss_mask, grad_reduce="sum") for cp, local in step)
    loss.backward()
    return loss.detach(), table.grad


def test_workers_compute_what_the_driver_planned_in_the_order_of_their_samples():
    sent = pickle.dumps(plan_in_driver(LENGTHS, SOURCES, 2, CONFIG))
    results = run_ranks(2, compute_what_the_driver_planned, sent)
    table = weights()
    means = [
        -log_probs(table, s["tokens"], s["labels"], alone)[s["kept"]].mean()
        for s in samples()
        if s["kept"].any()
    ]
    loss = torch.stack(means).mean()
    loss.backward()
    for found, expected in zip(
        map(sum, zip(*results, strict=True)), (loss, table.grad), strict=True
    ):
        torch.testing.assert_close(found, expected.detach(), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([1, 0], r"sources is \[1, 0\], expected 2 ascending ranks"),
        ([0], r"sources is \[0\], expected 2 ascending ranks"),
        ([0, 2], r"sources is \[0, 2\], expected 2 ascending ranks, from 0 to 1"),
        ([-1, 0], r"sources\[0\] is -1, expected an integer >= 0"),
        ([0, 0.7], r"sources\[1\] is 0.7, expected an integer"),
    ],
)
def test_sources_that_are_not_the_ranks_of_the_samples_are_refused(sources, message):
    with pytest.raises(ValueError, match=message):
        plan_in_driver([3, 4], sources, 2, CONFIG)


def test_lengths_and_sources_may_be_tensors():
    sent = plan_in_driver(LENGTHS, SOURCES, 2, CONFIG)
    assert plan_in_driver(torch.tensor(LENGTHS), torch.tensor(SOURCES), 2, CONFIG) == sent


@pytest.mark.parametrize("sent", [None, {}, {"plan": {}}, {"sources": [0]}])
def test_what_no_driver_sent_is_refused(sent):
    with pytest.raises(ValueError, match=r"sent is .*, expected what plan_in_driver returns"):
        planned_step(sent, [], None, CONFIG)


def test_a_worker_may_name_windows_and_comm_types_of_its_own():
    def call(groups):
        sent = plan_in_driver([5], [0], 1, CONFIG)
        own = [{"tokens": torch.arange(5)}]
        step = planned_step(
            sent, own, groups, CONFIG, window_sizes=[(2, 0)], comm_types=["all_gather"]
        )
        return [local.tokens.tolist() for _, local in step]

    assert hcp.loopback(1, call) == [[[0, 1, 2, 3, 4]]]


@pytest.mark.parametrize(
    "mask",
    [torch.ones(2, 3), torch.tensor(1.0), torch.tensor([-100, 1]), torch.tensor([float("nan"), 1])],
    ids=str,
)
def test_weights_of_what_is_no_mask_of_one_sample_are_refused(mask):
    with pytest.raises(ValueError, match=r"loss_mask is of shape .*, expected \(tokens,\) of one"):
        sequence_weights(mask)
