"""groups: the ranks that form tp, pp, cp, dp, ... for a job layout."""

import copy
import itertools
import logging
import math
import os
import pickle
import re
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ranks import run_alone, run_ranks, try_ranks
from support.te_attention import TEAttention
from torch.distributed.device_mesh import init_device_mesh

import hcp
from hcp._core import Grid
from hcp.groups.build import build_process_groups
from hcp.groups.grids import ROLES, levels_within
from hcp.groups.process_groups import ProcessGroups

DIMENSIONS = ("tp", "cp", "dp", "pp")
ORDERS = ["-".join(names) for names in itertools.permutations(DIMENSIONS)]
ALL_ROLES = ["_".join(c) for n in range(1, 5) for c in itertools.combinations(DIMENSIONS, n)]

grids = st.builds(
    lambda sizes, order: Grid(**dict(zip(DIMENSIONS, sizes, strict=True)), order=order),
    st.tuples(*[st.integers(1, 4)] * 4),
    st.sampled_from(ORDERS),
)


# ---- the grid ------------------------------------------------------------------------------------


def slow_place(grid, rank):
    """A rank's place in each dimension, by division, fastest dimension first."""
    place = {}
    for name in grid.order.split("-"):
        rank, place[name] = divmod(rank, grid.sizes[name])
    return place


def slow_groups(grid, role):
    """Ranks that agree in all other dimensions, found by comparing every rank with every other."""
    others = [name for name in DIMENSIONS if name not in role.split("_")]
    places = [slow_place(grid, rank) for rank in range(grid.ranks)]
    groups = []
    for rank in range(grid.ranks):
        group = [
            r for r in range(grid.ranks) if all(places[r][n] == places[rank][n] for n in others)
        ]
        if group not in groups:
            groups.append(group)
    return groups


@settings(deadline=None, max_examples=60)
@given(grids, st.sampled_from(ALL_ROLES))
def test_groups_equal_the_slow_reference(grid, role):
    assert grid.groups(role) == slow_groups(grid, role)


@settings(deadline=None, max_examples=60)
@given(grids, st.sampled_from(ALL_ROLES))
def test_every_rank_is_in_one_group_of_a_role(grid, role):
    groups = grid.groups(role)
    assert sorted(rank for group in groups for rank in group) == list(range(grid.ranks))
    assert {len(group) for group in groups} == {math.prod(grid.sizes[n] for n in role.split("_"))}


@settings(deadline=None, max_examples=60)
@given(grids, grids, st.sampled_from(ALL_ROLES))
def test_layouts_share_a_role_when_its_groups_are_equal(a, b, role):
    if a.ranks == b.ranks:
        assert a.shares(b, role) == (a.groups(role) == b.groups(role))
    else:
        with pytest.raises(ValueError, match=f"{a.ranks} and {b.ranks} ranks"):
            a.shares(b, role)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 4), st.integers(1, 12), st.integers(1, 4), st.data())
def test_another_cp_in_the_usual_order_changes_cp_dp_and_tp_cp_alone(tp, domain, pp, data):
    divisors = [d for d in range(1, domain + 1) if domain % d == 0]
    a, b = (data.draw(st.sampled_from(divisors)) for _ in range(2))
    one = Grid(tp=tp, cp=a, dp=domain // a, pp=pp)
    other = Grid(tp=tp, cp=b, dp=domain // b, pp=pp)
    changed = {role for role, dimensions in ROLES.items() if not one.shares(other, dimensions)}
    assert changed == (set() if a == b else {"cp", "dp", "tp_cp"})


def test_a_grid_is_a_value():
    grid = Grid(tp=2, cp=3, order="cp-tp-dp-pp")
    assert repr(grid) == "Grid(tp=2, cp=3, dp=1, pp=1, order='cp-tp-dp-pp')"
    assert grid.sizes == {"tp": 2, "cp": 3, "dp": 1, "pp": 1}
    assert (grid.ranks, grid.order) == (6, "cp-tp-dp-pp")
    assert grid == Grid(tp=2, cp=3, order="cp-tp-dp-pp")
    assert hash(grid) == hash(Grid(tp=2, cp=3, order="cp-tp-dp-pp"))
    assert grid != Grid(tp=2, cp=3)
    assert grid != "Grid"
    with pytest.raises(AttributeError):
        grid.order = "tp-cp-dp-pp"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"cp": 0}, ValueError, "cp is 0, expected >= 1"),
        ({"order": 5}, ValueError, "^order is 5, expected text such as 'tp-cp-dp-pp'"),
        ({"order": "tp-cp-dp"}, ValueError, 'order is "tp-cp-dp", expected tp, cp, dp and pp'),
        ({"order": "tp-cp-dp-ep"}, ValueError, "each once, joined by '-'"),
        ({"tp": 2**16, "pp": 2**16}, OverflowError, "more ranks than 2147483647 at pp = 65536"),
        ({"tp": "2"}, ValueError, "tp is '2', expected an integer"),
        ({"cp": 2**40}, ValueError, rf"cp is {2**40}, expected -2\^31 to 2\^31 - 1"),
        ({"order": "x" + "é" * 40}, ValueError, 'order is "xé*�", expected tp, cp, dp and pp'),
        ({"ep": 2}, TypeError, "ep"),
    ],
)
def test_a_bad_grid_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        Grid(**arguments)


@pytest.mark.parametrize("role", ["", "ep", "mp", "dp_", "dp_dp", "dp-cp"])
def test_a_bad_role_is_refused(role):
    with pytest.raises(ValueError, match=f'role is "{role}", expected'):
        Grid(dp=2).groups(role)


# ---- process groups ------------------------------------------------------------------------------


def groups_of(groups):
    return {role: groups.ranks(role) for role in groups.roles}


def expected_groups(grid, rank):
    return {
        role: next(group for group in grid.groups(dimensions) if rank in group)
        for role, dimensions in ROLES.items()
    }


def build_and_use(rank, size, arguments):
    groups = build_process_groups(**arguments)
    assert groups_of(groups) == expected_groups(groups.grid, rank)
    assert len({id(getattr(groups, role)) for role in groups.roles}) == len(ROLES)
    for role in groups.roles:
        assert groups.ranks(role)[groups.rank(role)] == rank
        total = torch.tensor([rank])
        dist.all_reduce(total, group=getattr(groups, role))
        assert total.item() == sum(groups.ranks(role)), role
    assert groups.transport.all_gather_bytes(b"%d" % rank, "test") == [
        b"%d" % other for other in groups.ranks("dp_cp")
    ]
    assert groups.transport.group is not groups.dp_cp
    shown = groups._repr_html_()
    assert re.findall(r"<tr>.*?>(\w+)</td>.*?>(\d+)</td><td>(\d+)</td></tr>", shown) == [
        (role, str(groups.size(role)), str(groups.rank(role))) for role in groups.roles
    ]


@pytest.mark.parametrize(
    ("size", "arguments"),
    [
        (1, {}),
        (3, {"cp": 3}),
        (4, {"tp": 2}),
        (4, {"tp": 2, "pp": 2}),
        (4, {"cp": 2, "pp": 2, "order": "pp-dp-cp-tp"}),
        (6, {"tp": 3, "dp": 2}),
    ],
)
def test_every_group_is_made_of_the_grids_ranks_and_works(size, arguments):
    run_ranks(size, build_and_use, arguments)


def build_bound(rank, size):
    """As in a job that was initialised with `device_id`."""
    device = torch.device("cuda", 0)
    dist.group.WORLD.bound_device_id = device
    seen = []

    def watched(*arguments, _new=dist.new_group, **options):
        seen.append(dist.group.WORLD.bound_device_id)
        return _new(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", watched)
        groups = build_process_groups(cp=2)
    bound = [
        group.bound_device_id
        for group in (dist.group.WORLD, *(getattr(groups, role) for role in groups.roles))
    ]
    assert set(bound) == {device}
    dist.group.WORLD.bound_device_id = None
    groups.close()
    return seen


def test_groups_are_connected_when_they_are_first_used():
    """torch connects a new group at once where the whole job's is bound to a device."""
    for seen in run_ranks(2, build_bound):
        assert set(seen) == {None}


def build_in_halves(rank, size):
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    for _ in range(2):  # names of closed groups must not come back
        groups = build_process_groups(parent=halves[rank % 2])
        other = groups.with_context_parallel(2)
        found = (groups.ranks("dp"), groups.ranks("cp"), other.ranks("cp"))
        groups.close()
        other.close()
    return found


def test_a_layout_within_a_parent_has_the_parents_ranks():
    results = run_ranks(4, build_in_halves)
    assert results == [
        (half, [rank], half) for rank, half in enumerate([[0, 2], [1, 3], [0, 2], [1, 3]])
    ]


def build_badly(rank, size, arguments):
    with pytest.raises(ValueError, match="expected") as caught:
        build_process_groups(**arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tp": 3}, "tp * cp * pp = 3 * 1 * 1 = 3, expected a divisor of the 4 ranks"),
        (
            {"tp": 2, "cp": 2, "dp": 2},
            "tp * cp * dp * pp = 2 * 2 * 2 * 1 = 8, expected the 4 ranks",
        ),
        ({"cp": 0}, "cp is 0, expected an integer >= 1"),
        ({"tp": True}, "tp is True, expected an integer >= 1"),
        ({"order": "tp-cp"}, 'order is "tp-cp"'),
        ({"peer_buffer_bytes": -1}, "peer_buffer_bytes is -1, expected an integer >= 1"),
        ({"order": 5}, "order is 5, expected text such as 'tp-cp-dp-pp'"),
        ({"parent": 5}, "parent is 5, expected a process group of this rank"),
    ],
)
def test_an_impossible_layout_is_refused_with_the_equation(arguments, message):
    assert all(message in text for text in run_ranks(4, build_badly, arguments))


def ask(what, wrong):
    """Ask for a layout, or for one that cannot be."""
    if what == "build":
        build_process_groups(tp=3 if wrong else 2)
    elif what == "transport":
        build_process_groups(transport="rail" if wrong else "torch")
    elif what == "resize":
        build_process_groups().with_context_parallel(3 if wrong else 2)
    elif what == "mesh":
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        ProcessGroups.from_device_mesh(mesh, names={"dp": "data"} if wrong else {})
    else:
        ProcessGroups.from_existing({} if wrong else {"dp_cp": dist.group.WORLD})


def ask_as_rank_one_does_not(rank, size, what):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - its words are what is looked at
        ask(what, rank == 1)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("build", "tp * cp * pp = 3 * 1 * 1 = 3, expected a divisor of the 4 ranks"),
        ("resize", "context parallel size is 3, expected a divisor of dp * cp = 4 * 1 = 4"),
        ("mesh", "the mesh has the dimensions ('dp',), expected tp, cp, dp and pp, or names="),
        ("existing", "dict has no dp_cp, only none of tp"),
    ],
)
def test_what_one_rank_refuses_ends_all_with_its_words(what, message):
    own, *others = [text for _, text in by_rank_one(run_ranks(4, ask_as_rank_one_does_not, what))]
    assert own.startswith(message)
    for rank, text in zip((0, 2, 3), others, strict=True):
        assert text.startswith(f"rank {rank}: rank 1 refuses the layout, expected")
        assert message in text


def by_rank_one(texts):
    """(rank, text), that of rank 1 first."""
    return sorted(enumerate(texts), key=lambda item: (item[0] != 1, item[0]))


def test_a_transport_that_one_rank_misspells_ends_all():
    own, *others = [
        text for _, text in by_rank_one(run_ranks(4, ask_as_rank_one_does_not, "transport"))
    ]
    assert own.startswith("transport is 'rail', expected one of")
    for text in others:
        assert text.startswith("transport is 'torch', but 'rail' on rank 1: every rank names the")


def build_differently(rank, size):
    return build_badly(rank, size, {"cp": 2} if rank == 1 else {"tp": 2})


def test_ranks_that_want_different_layouts_are_told_so():
    results = run_ranks(2, build_differently, timeout=20)
    assert "rank 0: the ranks want different layouts: Grid(tp=2" in results[0]
    assert "on rank 1" in results[0]
    assert "on rank 0" in results[1]


@pytest.mark.parametrize("name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_a_rank_of_several_without_torch_distributed_is_told_what_to_call(monkeypatch, name):
    monkeypatch.setenv(name, "2")
    with pytest.raises(
        hcp.HcpError, match=rf"{name} is 2, .*call torch\.distributed\.init_process_group"
    ):
        build_process_groups()


def test_ranks_of_loopback_are_no_jobs_of_one_rank():
    words = "build_process_groups was called in hcp.loopback, whose 2 ranks are threads"
    with pytest.raises(hcp.HcpError, match=words) as raised:
        hcp.loopback(2, lambda groups: hcp.build_process_groups())
    assert raised.value.code == "not-initialised"


def test_what_loopback_has_not_is_named():
    def ask(groups):
        assert not hasattr(groups, "dp_cp")
        return groups.with_context_parallel(2)

    words = "the groups of hcp.loopback have no 'with_context_parallel', only size, rank and"
    with pytest.raises(AttributeError, match=words):
        hcp.loopback(2, ask)


def build_alone():
    logging.basicConfig(level=logging.INFO)
    first, second = build_process_groups(), build_process_groups(cp=1)
    print(first.size("dp_cp"), second.size("cp"), dist.get_backend())


def test_a_process_without_a_launcher_is_a_job_of_one_rank(tmp_path):
    done = run_alone(build_alone, folder=tmp_path)
    assert done.code == 0, done.err
    assert done.out.split()[:2] == ["1", "1"]
    assert done.err.count("hcp made a job of one rank") == 1


def test_without_torch_distributed_a_trainers_groups_cannot_be_taken():
    with pytest.raises(hcp.HcpError, match=r"before ProcessGroups\.from_existing"):
        ProcessGroups.from_existing({})


# ---- another context parallel size ---------------------------------------------------------------


def make_another_layout(rank, size, arguments, cp):
    train = build_process_groups(**arguments)
    evaluation = train.with_context_parallel(cp)
    assert groups_of(evaluation) == expected_groups(evaluation.grid, rank)
    assert evaluation.transport is train.transport
    report = evaluation.report()
    for role in train.roles:
        shared = getattr(train, role) is getattr(evaluation, role)
        assert shared == (role in report["shared"]), role
    return evaluation.report()["created"]


@pytest.mark.parametrize(
    ("size", "arguments", "cp", "created"),
    [
        (4, {"tp": 2}, 2, ["cp", "dp", "tp_cp"]),
        (4, {"cp": 4}, 1, ["cp", "dp", "tp_cp"]),
        (6, {"cp": 2}, 3, ["cp", "dp", "tp_cp"]),
        (4, {"cp": 2}, 2, []),
        (4, {"pp": 2, "order": "dp-cp-tp-pp"}, 2, ["cp", "dp", "tp_cp"]),
    ],
)
def test_another_layout_creates_only_what_differs(size, arguments, cp, created):
    results = run_ranks(size, make_another_layout, arguments, cp)
    assert results == [created] * size


def refuse_another_layout(rank, size, arguments, cp):
    train = build_process_groups(**arguments)
    with pytest.raises(ValueError, match="expected") as caught:
        train.with_context_parallel(cp)
    return str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "cp", "message"),
    [
        ({}, 3, "size is 3, expected a divisor of dp * cp = 4 * 1 = 4"),
        ({}, 0, "size is 0, expected an integer >= 1"),
        ({"tp": 2}, 4, "expected a divisor of dp * cp = 2 * 1 = 2"),
        ({"pp": 2, "order": "tp-cp-pp-dp"}, 2, "another place in pp, and their weights"),
        ({"tp": 2, "order": "cp-tp-dp-pp"}, 2, "another place in tp, and their weights"),
    ],
)
def test_an_impossible_other_layout_is_refused_with_the_reason(arguments, cp, message):
    assert all(message in text for text in run_ranks(4, refuse_another_layout, arguments, cp))


# ---- groups that a trainer has -------------------------------------------------------------------


class Collection:
    """A class like Megatron's: a declared field that is not set reads as None."""

    def __init__(self, **groups):
        self.__dict__.update(groups)

    def __getattr__(self, name):
        if name not in ROLES:
            raise AttributeError(name)


def take_existing(rank, size, as_mapping):
    made = build_process_groups(tp=2)
    given_groups = {role: getattr(made, role) for role in ("tp", "pp", "cp", "dp", "dp_cp")}
    collection = given_groups if as_mapping else Collection(**given_groups)
    groups = ProcessGroups.from_existing(collection)
    assert all(getattr(groups, role) is group for role, group in given_groups.items())
    assert groups.roles == tuple(given_groups)
    assert groups.source is collection
    assert groups.report() == {"created": ["transport"], "shared": [], "given": [*given_groups]}
    assert groups.transport.size == groups.size("dp_cp") == 2
    assert groups.grid == made.grid
    with pytest.raises(AttributeError, match="have no role 'tp_cp', only tp, pp, cp, dp, dp_cp"):
        groups.tp_cp  # noqa: B018
    with pytest.raises(AttributeError, match="have no role 'mp'"):
        groups.size("mp")
    with pytest.raises(AttributeError, match="expected a role: tp, pp"):
        groups.ep  # noqa: B018
    assert groups.with_context_parallel(2).report()["created"] == ["cp", "dp"]
    groups.close()
    assert made.transport.all_gather_bytes(b"x", "test") == [b"x"] * 2
    assert ProcessGroups.from_existing(made) is made
    with pytest.raises(ValueError, match=r"was given hcp\.ProcessGroups and options"):
        ProcessGroups.from_existing(made, transport="torch")


@pytest.mark.parametrize("as_mapping", [True, False])
def test_a_trainers_groups_are_taken_as_they_are(as_mapping):
    run_ranks(4, take_existing, as_mapping)


def take_the_world(rank, size):
    groups = ProcessGroups.from_existing({"dp_cp": dist.group.WORLD})
    with pytest.raises(hcp.HcpError, match="the layout of these process groups is not known"):
        groups.grid  # noqa: B018
    return groups.ranks("dp_cp"), groups.transport.rank


def test_dp_cp_alone_is_enough():
    assert run_ranks(3, take_the_world) == [([0, 1, 2], rank) for rank in range(3)]


def take_bad_collections(rank, size):
    with pytest.raises(ValueError, match="dict has no dp_cp, only tp; expected the group of all"):
        ProcessGroups.from_existing({"tp": dist.group.WORLD})
    with pytest.raises(ValueError, match="Collection has no dp_cp, only none of tp, pp"):
        ProcessGroups.from_existing(Collection())
    with pytest.raises(ValueError, match=r"dict\.dp_cp is a str, expected a torch\.distributed"):
        ProcessGroups.from_existing({"dp_cp": "world"})
    world = {"dp_cp": dist.group.WORLD}
    with pytest.raises(ValueError, match='order is "zz", expected tp, cp, dp and pp'):
        ProcessGroups.from_existing(world, order="zz")
    with pytest.raises(ValueError, match="peer_buffer_bytes is -1, expected an integer >= 1"):
        ProcessGroups.from_existing(world, peer_buffer_bytes=-1)


def test_a_collection_without_dp_cp_is_refused():
    run_ranks(1, take_bad_collections)


# ---- hierarchical context parallelism, meshes, connecting ----------------------------------------


def build_levels(rank, size, levels):
    groups = build_process_groups(cp=size, hierarchical=levels)
    groups.warm_up()
    assert groups.report()["created"][-len(levels) - 1 :] == [
        *(f"hcp[{i}]" for i in range(len(levels))),
        "transport",
    ]
    for level in groups.hierarchy:
        total = torch.tensor([rank])
        dist.all_reduce(total, group=level)
        assert total.item() == sum(dist.get_process_group_ranks(level))
    other = build_process_groups().with_context_parallel(size, hierarchical=levels)
    ranks = [dist.get_process_group_ranks(level) for level in groups.hierarchy]
    assert ranks == [dist.get_process_group_ranks(level) for level in other.hierarchy]
    return ranks


def test_the_inner_level_has_neighbours_and_the_outer_level_what_is_apart():
    assert run_ranks(4, build_levels, [2, 2]) == [
        [[0, 1], [0, 2]],
        [[0, 1], [1, 3]],
        [[2, 3], [0, 2]],
        [[2, 3], [1, 3]],
    ]
    assert run_ranks(6, build_levels, [3, 2])[4] == [[3, 4, 5], [1, 4]]


def test_levels_that_do_not_make_the_context_parallel_size_are_refused():
    message = r"hierarchical is \[2, 3\], whose product is 6, expected cp = 4"
    for text in run_ranks(4, build_badly, {"cp": 4, "hierarchical": [2, 3]}):
        assert re.search(message, text)


def switch_levels(rank, size):
    train = build_process_groups(cp=4, hierarchical=[2, 2])
    evaluation = train.with_context_parallel(2, hierarchical=[2, 1])
    model = torch.nn.Module()
    model.levels, model.pair = list(train.hierarchy), tuple(train.hierarchy)
    model.attention = TEAttention(SimpleNamespace(cp_comm_type="a2a+p2p"))
    model.attention.cp_group = list(train.hierarchy)
    collection = {role: getattr(train, role) for role in train.roles} | {"hcp": model.levels}
    assert ProcessGroups.from_existing(collection).hierarchy == train.hierarchy
    with hcp.eval_cp_context(model, train, evaluation):
        assert tuple(model.levels) == model.pair == evaluation.hierarchy
        assert model.attention.cp_group == list(evaluation.hierarchy)
        assert model.attention.calls == ["a2a+p2p"]
    assert model.attention.cp_group == list(train.hierarchy)
    assert tuple(model.levels) == model.pair == train.hierarchy


def test_lists_and_tuples_of_levels_are_rebound():
    run_ranks(4, switch_levels)


def make_layouts_of_levels(rank, size):
    train = build_process_groups(cp=4, hierarchical=[2, 2])
    model = torch.nn.Module()
    model.levels = list(train.hierarchy)
    sizes = []
    for cp in (1, 2, 4):
        evaluation = train.with_context_parallel(cp)
        with hcp.eval_cp_context(model, train, evaluation):
            sizes.append([level.size() for level in model.levels])
        evaluation.close()
    assert train.with_context_parallel(1, hierarchical=[]).hierarchy == ()
    return sizes


def test_a_layout_has_as_many_levels_as_the_one_that_it_is_made_from():
    assert run_ranks(4, make_layouts_of_levels) == [[[1, 1], [2, 1], [2, 2]]] * 4


@given(st.integers(1, 64), st.lists(st.integers(1, 8), max_size=4))
def test_levels_within_a_size_have_it_as_their_product(cp, sizes):
    found = levels_within(cp, sizes)
    assert len(found) == len(sizes)
    assert math.prod(found) == (cp if sizes else 1)
    assert all(size % part == 0 for size, part in zip(sizes[:-1], found, strict=False))


def take_a_mesh(rank, size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "cp"))
    groups = ProcessGroups.from_device_mesh(mesh, names={"dp": "data"})
    assert groups.cp is mesh.get_group("cp")
    assert groups.dp is mesh.get_group("data")
    assert groups_of(groups) == expected_groups(groups.grid, rank)
    assert groups.report()["given"] == ["cp", "dp"]
    evaluation = groups.with_context_parallel(4)
    assert evaluation.report()["created"] == ["cp", "dp", "tp_cp"]
    model = torch.nn.Module()
    model.cp_group, model.mesh = mesh.get_group("cp"), mesh
    (finding,) = hcp.audit(model, groups, evaluation).uncovered
    assert finding.path == "model.mesh"
    with hcp.eval_cp_context(model, groups, evaluation):
        assert model.cp_group is evaluation.cp
    with pytest.raises(ValueError, match=r"the mesh has the dimensions \('data', 'cp'\), expected"):
        ProcessGroups.from_device_mesh(mesh)


def test_a_device_mesh_gives_its_groups_and_its_layout():
    run_ranks(4, take_a_mesh)


# ---- the end -------------------------------------------------------------------------------------


def groups_alive():
    return len(dist.distributed_c10d._world.pg_map)


def close_in_order(rank, size):
    before = groups_alive()
    train = build_process_groups()
    with_train = groups_alive()
    evaluation = train.with_context_parallel(2)
    with_both = groups_alive()
    assert copy.deepcopy({"pgs": evaluation})["pgs"] is evaluation
    with pytest.raises(NotImplementedError, match=r"call hcp\.build_process_groups there"):
        pickle.dumps(evaluation)
    evaluation.close()
    evaluation.close()
    assert groups_alive() == with_train
    assert train.transport.all_gather_bytes(b"y", "test") == [b"y"] * size
    train.close()
    assert groups_alive() == before
    return with_train - before, with_both - with_train


def test_close_destroys_what_was_created_and_no_more():
    assert run_ranks(2, close_in_order) == [(9, 3)] * 2


def close_late(rank, size):
    groups = build_process_groups()
    dist.destroy_process_group()
    groups.close()


def test_close_after_the_default_groups_end_does_nothing():
    run_ranks(2, close_late)


def fail_to_create(rank, size):
    before = groups_alive()
    create, made = dist.new_group, itertools.count()

    def failing(*args, **kwargs):
        if next(made) == 5:
            raise RuntimeError("no more groups")
        return create(*args, **kwargs)

    dist.new_group = failing
    try:
        with pytest.raises(RuntimeError, match="no more groups"):
            build_process_groups()
    finally:
        dist.new_group = create
    return groups_alive() - before


def test_a_failed_creation_leaves_no_group_behind():
    assert run_ranks(2, fail_to_create) == [0, 0]


def wait_for_a_rank_that_left(rank, size):
    groups = build_process_groups()
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["done"], timedelta(seconds=100))
        return
    try:
        groups.transport.all_gather_bytes(b"", "test")
    finally:
        store.set("done", b"")


def test_the_transport_inherits_the_timeout_of_the_job():
    results = try_ranks(2, wait_for_a_rank_that_left, group_timeout=5)
    assert results[0].kind == "HcpError"
    assert "rank 0" in results[0].message


def stay_away(step):
    """Come to no further step of the building, until all others have left."""
    store = dist.distributed_c10d._get_default_store()
    if step == "dies":
        os._exit(3)
    store.wait(["0 left", "2 left"], timedelta(seconds=100))
    raise SystemExit


def build_until_one_stays_away(rank, size, at, step):
    create, gather, made = dist.new_group, dist.all_gather, itertools.count()

    def counted(call):
        def called(*args, **kwargs):
            if rank == 1 and next(made) == at:
                stay_away(step)
            return call(*args, **kwargs)

        return called

    dist.new_group, dist.all_gather = counted(create), counted(gather)
    try:
        build_process_groups()
    except SystemExit:
        return None
    except hcp.HcpError as error:
        return str(error)
    finally:
        dist.new_group, dist.all_gather = create, gather
        if rank != 1:
            dist.distributed_c10d._get_default_store().set(f"{rank} left", "")


@pytest.mark.parametrize(("at", "step"), [(0, "stops"), (2, "dies"), (10, "stops")])
def test_a_rank_that_stays_away_while_groups_are_built_is_named(at, step):
    results = try_ranks(3, build_until_one_stays_away, at, step, group_timeout=5, timeout=100)
    for rank in (0, 2):
        assert results[rank].startswith(f"rank {rank}: build_process_groups failed; "), results
        assert "ranks [1] have ended, are stopped, or wait" in results[rank]
        assert results[rank].endswith("[HCP-rank-late]")
