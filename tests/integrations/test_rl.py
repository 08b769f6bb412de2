"""Plans of a driver, computed by workers: log-probabilities in the order of the samples, and losses
of whole sequences."""

import pickle
import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from support.ranks import run_ranks

import hcp
from hcp.integrations.rl import (
    plan_in_driver,
    plan_verl,
    planned_step,
    rollout_trees,
    sequence_weights,
)

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


# ---- verl's own dynamic context parallelism ------------------------------------------------------


def its_scheduler():
    raise RuntimeError("Dynamic CP requires a Megatron-Core build")


@pytest.fixture
def verl(monkeypatch):
    """The modules that verl's main branch asks for its scheduler."""
    modules = [ModuleType(name) for name in ("verl", "verl.utils")]
    modules.append(ModuleType("verl.utils.dynamic_cp_scheduler"))
    modules[-1].get_megatron_dynamic_cp_scheduler_cls = its_scheduler
    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return modules[-1]


def scheduled_as_verl_does(module, lengths, limit, cp_size, dp_size):
    """What verl's DynamicCPScheduler.schedule asks for, and the conditions that it raises on."""
    scheduler = module.get_megatron_dynamic_cp_scheduler_cls()(
        max_seqlen_per_dp_cp_rank=limit,
        cp_size=cp_size,
        dp_size=dp_size,
        microbatch_group_size_per_vp_stage=None,
    )
    batches = scheduler.get_groups_and_subsamples(list(enumerate(lengths)))
    for by_rank in batches:
        assert len(by_rank) == cp_size * dp_size
        assert all(by_rank)
        for ids in by_rank:
            members = [rank for rank, others in enumerate(by_rank) if others == ids]
            assert members == list(range(members[0], members[0] + len(members)))
            assert members[0] % len(members) == 0
            assert sum(lengths[i] for i in ids) <= limit * len(members)
    return batches


@pytest.mark.parametrize(("cp_size", "dp_size"), [(1, 1), (1, 4), (2, 2), (4, 4)])
def test_verl_gets_micro_batches_of_hcp_under_its_own_conditions(verl, cp_size, dp_size):
    plan_verl()
    made = torch.Generator().manual_seed(cp_size * 10 + dp_size)
    ranks = cp_size * dp_size
    lengths = torch.randint(1, 64 * ranks, (40,), generator=made).tolist()
    batches = scheduled_as_verl_does(verl, lengths, 64, cp_size, dp_size)
    groups = {(m, *ids) for m, by_rank in enumerate(batches) for ids in map(tuple, by_rank)}
    assert sorted(i for _, *ids in groups for i in ids) == list(range(40))


def test_a_verl_of_ranks_that_are_no_power_of_two_is_refused(verl):
    plan_verl()
    with pytest.raises(ValueError, match="the dp_cp group has 3 ranks, expected a power of two"):
        scheduled_as_verl_does(verl, [5], 64, 1, 3)


def test_a_verl_without_its_own_dynamic_context_parallelism_is_refused(verl, monkeypatch):
    monkeypatch.delattr(verl, "get_megatron_dynamic_cp_scheduler_cls")
    with pytest.raises(ImportError, match=r"verl has no .*scheduler_cls, expected a verl of "):
        plan_verl()


# ---- rollouts that begin alike -------------------------------------------------------------------

PROMPTS = [3, 1, 12]


def config_of(ranks):
    """Several ranks compute the longest tree together."""
    return hcp.Config(36 // ranks)


def rollouts():
    """Answers to three prompts: what a driver has of each."""
    made = torch.Generator().manual_seed(3)
    found = []
    for number, prompt in enumerate(PROMPTS):
        start = torch.randint(16, (prompt,), generator=made)
        for answer in range(3):
            tokens = torch.cat((start, torch.randint(16, (2 + 3 * answer,), generator=made)))
            weights = (torch.arange(len(tokens)) >= prompt - 1).double()
            weights[-1] = 0
            advantage = float(torch.randn((), generator=made))
            found.append(
                {
                    "input_ids": tokens,
                    "labels": F.pad(tokens[1:], (0, 1)),
                    "loss_mask": weights,
                    "gain": weights * advantage,
                    "advantage": advantage,
                    "uid": f"{number}-{answer}",
                }
            )
    return found


def train_on_trees(rank, size, sent):
    groups, table = hcp.build_process_groups(), weights()
    sent, samples, rules = pickle.loads(sent)
    own = [s for s, source in zip(samples, sent["sources"], strict=True) if source == rank]
    step = planned_step(sent, own, groups, config_of(size), fields=rules)
    assert max(cp.plan.micro_batches[0][0].degree for cp, _ in step) == size

    def of(cp, local):
        return log_probs(table, local.input_ids, local.labels, cp.attention)

    with torch.no_grad():
        found = step.combine(of(cp, local) for cp, local in step)
    total = torch.zeros((), dtype=torch.float64)
    uids = []
    for cp, local in step:
        loss = -(of(cp, local) * local.gain).sum() / cp.loss_tokens
        loss.backward()
        total += loss.detach()
        uids += local.uid
        assert [len(own) for own in local.uid] == cp.payloads[
            "advantage"
        ].cu_seqlens.diff().tolist()
    grad = torch.zeros_like(table) if table.grad is None else table.grad
    return found, total, grad, uids


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_trees_of_rollouts_have_the_losses_of_each_alone(ranks):
    batch = rollouts()
    trees, samples, rules = rollout_trees(batch, summed=("loss_mask", "gain"))
    assert len(trees) < len(batch)
    sources = [i * ranks // len(trees) for i in range(len(trees))]
    sent = plan_in_driver(trees.lengths, sources, ranks, config_of(ranks), masks=trees.masks)
    results = run_ranks(ranks, train_on_trees, pickle.dumps((sent, samples, rules)))
    table = weights()
    alone_rows = [log_probs(table, s["input_ids"], s["labels"], alone) for s in batch]
    total = sum(s["loss_mask"].sum() for s in batch)
    loss = -sum((x * s["gain"]).sum() for x, s in zip(alone_rows, batch, strict=True)) / total
    loss.backward()
    back = trees.by_rollout([rows for own, *_ in results for rows in own])
    for x, y in zip(back, alone_rows, strict=True):
        torch.testing.assert_close(x[:-1], y[:-1].detach(), rtol=0, atol=1e-10)
    torch.testing.assert_close(sum(r[1] for r in results), loss.detach(), rtol=0, atol=1e-10)
    torch.testing.assert_close(sum(r[2] for r in results), table.grad, rtol=0, atol=1e-10)
    seen = {uid for *_, uids in results for own in uids for uid in own}
    assert seen == {s["uid"] for s in batch}


def test_rollouts_of_different_fields_are_refused():
    tokens = torch.arange(3)
    with pytest.raises(ValueError, match=r"samples\[1\] has fields \['input_ids'\], expected"):
        rollout_trees([{"input_ids": tokens, "loss_mask": tokens}, {"input_ids": tokens}])


@pytest.mark.parametrize("option", ["summed", "first"])
def test_options_name_fields_that_the_rollouts_have(option):
    with pytest.raises(ValueError, match="the samples have no field 'gian', expected one of"):
        rollout_trees(turns_of_an_agent(), **{option: ["gian"]})


def test_no_rollouts_are_no_trees():
    trees, samples, rules = rollout_trees([])
    assert (len(trees), samples, rules) == (0, [], dict(hcp.Trees.RULES))


def turns_of_an_agent():
    """Two samples that begin alike; the later turn has no loss in its history."""
    later = {
        "input_ids": torch.tensor([1, 2, 3, 4, 5, 6]),
        "labels": torch.tensor([-100, -100, -100, -100, 6, -100]),
        "old": torch.tensor([0, 0, 0, 0, -0.5, 0.0]).double(),
        "loss_mask": torch.tensor([0, 0, 0, 0, 1.0, 0]).double(),
    }
    earlier = {
        "input_ids": torch.tensor([1, 2, 3, 4]),
        "labels": torch.tensor([-100, 3, 4, -100]),
        "old": torch.tensor([0, -1, -2, 0.0]).double(),
        "loss_mask": torch.tensor([0, 1.0, 1, 0]).double(),
    }
    return [later, earlier]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_row_has_the_values_of_a_rollout_with_a_weight_there(order):
    batch = [turns_of_an_agent()[i] for i in order]

    def loss(sample):
        logits = weights().detach()[sample["input_ids"]]
        own = -F.cross_entropy(logits, sample["labels"].clamp(max=11), reduction="none")
        return -((own - sample["old"]).exp() * sample["loss_mask"]).sum()

    trees, samples, _ = rollout_trees(batch)
    assert len(trees) == 1
    torch.testing.assert_close(sum(map(loss, samples)), sum(map(loss, batch)))


@pytest.mark.parametrize("name", ["labels", "old"])
def test_values_that_differ_where_two_rollouts_have_weights_are_refused(name):
    later, earlier = turns_of_an_agent()
    later["loss_mask"][1] = 1
    later["labels" if name == "old" else "old"] = later["input_ids"]  # of no interest here
    earlier["labels" if name == "old" else "old"] = earlier["input_ids"]
    with pytest.raises(ValueError, match=f"samples have other '{name}' in rows that they share"):
        rollout_trees([later, earlier])
    _, (sample,), _ = rollout_trees([later, earlier], first=[name])
    assert sample[name][1] == later[name][1]


def test_not_a_number_is_no_other_value_of_a_rollout_of_its_own():
    later, earlier = turns_of_an_agent()
    later["old"][4] = earlier["old"][2] = torch.nan
    _, (sample,), _ = rollout_trees([later, earlier])
    assert sample["old"].isnan().sum() == 2
