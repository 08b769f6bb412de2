import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist
from support.ranks import RankError, RanksFailed, run_ranks, try_ranks


def sum_of_ranks(rank, size, factor):
    value = torch.tensor([rank * factor])
    dist.all_reduce(value)
    return value.item(), os.getpid()


def fail_on(rank, size, failing):
    if rank == failing:
        raise ValueError(f"rank {rank} of {size} was asked to fail")
    return rank


def hang_on(rank, size, hanging):
    if rank == hanging:
        threading.Event().wait()
    return rank


def exit_on(rank, size, exiting):
    if rank == exiting:
        os._exit(7)
    dist.barrier()


def leave_groups_behind(rank, size):
    dist.new_group([0])
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)


def return_what_cannot_travel(rank, size):
    return lambda: rank


def test_results_come_back_by_rank_and_the_processes_live_on():
    first = run_ranks(3, sum_of_ranks, 10)
    second = run_ranks(3, sum_of_ranks, 1)
    assert [value for value, _ in first] == [30] * 3
    assert [value for value, _ in second] == [3] * 3
    assert [pid for _, pid in first] == [pid for _, pid in second]
    assert len({pid for _, pid in first} | {os.getpid()}) == 4


def test_one_rank_is_a_group_too():
    assert run_ranks(1, sum_of_ranks, 5)[0][0] == 0


def test_an_exception_comes_back_with_its_traceback_and_the_pool_is_rebuilt():
    with pytest.raises(
        RanksFailed, match="rank 1: ValueError: rank 1 of 2 was asked to fail"
    ) as caught:
        run_ranks(2, fail_on, 1)
    assert "in fail_on" in str(caught.value)
    assert caught.value.results[0] == 0
    assert [value for value, _ in run_ranks(2, sum_of_ranks, 1)] == [1, 1]


def test_a_rank_that_hangs_is_shown_with_its_stack():
    results = try_ranks(2, hang_on, 0, timeout=10)
    assert results[1] == 1
    assert isinstance(results[0], RankError)
    assert results[0].kind == "timeout"
    assert "in hang_on" in results[0].traceback
    assert [value for value, _ in run_ranks(2, sum_of_ranks, 1)] == [1, 1]


def test_a_rank_that_exits_is_an_error_and_the_pool_is_rebuilt():
    results = try_ranks(2, exit_on, 1, timeout=20)
    assert results[1].kind == "exited"
    assert "exit code 7" in results[1].message
    assert isinstance(results[0], RankError)
    assert [value for value, _ in run_ranks(2, sum_of_ranks, 1)] == [1, 1]


def test_groups_that_a_case_leaves_behind_do_not_reach_the_next():
    run_ranks(2, leave_groups_behind)
    run_ranks(2, leave_groups_behind)
    assert [value for value, _ in run_ranks(2, sum_of_ranks, 1)] == [1, 1]


def test_a_result_that_cannot_travel_is_an_error():
    with pytest.raises(RanksFailed, match="return_what_cannot_travel"):
        run_ranks(2, return_what_cannot_travel)


def leave_changed(rank, size, what):
    if what == "dtype":
        torch.set_default_dtype(torch.float64)
    elif what == "dynamo":
        torch._dynamo.config.recompile_limit = 3
    elif what == "handler":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif what == "gradients":
        torch.set_grad_enabled(False)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("dtype", r"torch.get_default_dtype\(\) is torch.float64, was torch.float32"),
        ("dynamo", r"torch._dynamo.config.recompile_limit is 3, was \d+"),
        ("handler", r"the handler of .*SIGTERM.* is .*SIG_IGN.*, was .*SIG_DFL"),
        ("gradients", r"torch.is_grad_enabled\(\) is False, was True"),
    ],
)
def test_a_case_that_leaves_a_setting_changed_fails_and_the_next_has_a_new_process(what, says):
    with pytest.raises(RanksFailed, match=rf"leave_changed left settings of the process.*{says}"):
        run_ranks(1, leave_changed, what)
    run_ranks(1, leave_changed, "nothing")


def change_environment(rank, size):
    found = os.environ.get("LEFT_BEHIND"), os.environ.get("RANK")
    os.environ["LEFT_BEHIND"] = "1"
    del os.environ["RANK"]
    return os.getpid(), found


def test_a_case_finds_the_environment_that_the_one_before_it_found():
    assert run_ranks(1, change_environment) == run_ranks(1, change_environment)
    assert run_ranks(1, change_environment)[0][1] == (None, "0")
