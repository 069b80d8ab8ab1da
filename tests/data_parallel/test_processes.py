"""Training in several processes that really run, over gloo on this machine's loopback.

Everything else about many devices is tested on virtual devices of one process; here is what only
processes can show: arrays that no process holds whole, and processes that are late or die.
"""

import itertools
import re

import jax
import numpy as np
import pytest
from process_workers import make_batch, make_params, make_step
from processes import (
    HEARTBEAT_SECONDS,
    ROOT,
    ProcessesFailed,
    reserved_port,
    run_processes,
    run_shell,
)

HOWS = ("train_step", "all_reduce")


def assert_same_on_all(results):
    """Every process has the same bits."""
    for result in results[1:]:
        assert result.keys() == results[0].keys()
        for name in result:
            assert result[name].tobytes() == results[0][name].tobytes(), name


def assert_same_part(result, left, right):
    """Two parts of a result have the same bits, and there is something in them."""
    names = [name.removeprefix(f"{left}/") for name in result if name.startswith(f"{left}/")]
    assert names
    for name in names:
        assert result[f"{left}/{name}"].tobytes() == result[f"{right}/{name}"].tobytes(), name


# --- 1. equivalence -------------------------------------------------------------------------------


@pytest.mark.slow_but("2")
@pytest.mark.whole("4")
@pytest.mark.parametrize("count, hows", [(2, HOWS), (4, ["all_reduce", "hosts"])], ids=["2", "4"])
def test_processes_train_as_one_process_does(count, hows, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # does not get in
    steps = 5
    results = run_processes("train", count, args={"hows": hows, "steps": steps})
    assert_same_on_all(results)
    np.testing.assert_array_equal(results[0]["devices"], [count, 1])
    for how in hows:
        step, init = make_step(how)
        step, state, losses = jax.jit(step), init(make_params()), []
        for number in range(steps):
            state, loss = step(state, make_batch(number))
            losses.append(float(loss))
        # Sums of 16 rows in another order: some units of 2**-24 relative, which Adam passes on to
        # updates of 1e-2. Found: 1.1e-7 in losses, 3e-8 in parameters of about 1.
        np.testing.assert_allclose(results[0][f"{how}/losses"], losses, rtol=5e-7)
        for name, param in state.params.items():
            found = results[0][f"{how}/params/{name}"]
            np.testing.assert_allclose(found, param, rtol=5e-7, atol=5e-7, err_msg=f"{how} {name}")


# --- 2. one process overflows ---------------------------------------------------------------------


@pytest.mark.slow
def test_an_overflow_in_one_process_is_skipped_by_all():
    results = run_processes("overflow", 2, args={"hows": HOWS, "bad_step": 2})
    assert_same_on_all(results)
    for result, how in itertools.product(results, HOWS):
        before, after, following = (f"{how}/{name}" for name in ("before", "after", "next"))
        assert result[f"{after}/opt_state/overflow"]
        for part in ("params", "opt_state/inner_state"):
            assert_same_part(result, f"{before}/{part}", f"{after}/{part}")
        scales = [result[f"{at}/opt_state/loss_scale"] for at in (before, after, following)]
        np.testing.assert_array_equal(scales, [2.0**16, 2.0**15, 2.0**15])
        assert not result[f"{following}/opt_state/overflow"]
        assert np.isfinite(result[f"{following}/params/first"]).all()
        moved = result[f"{following}/params/first"] != result[f"{after}/params/first"]
        assert moved.all()


# --- 3. a process ends ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("victim, by", [(0, "SIGKILL"), (1, "exception")])
def test_a_process_that_ends_takes_the_others_with_it(victim, by):
    args = {"how": "all_reduce", "victim": victim, "by": by}
    with pytest.raises(ProcessesFailed) as caught:
        run_processes("end_in_the_middle", 2, args=args)
    message, ends = str(caught.value), caught.value.ends
    assert all(end.code != 0 and not end.killed_here for end in ends), message
    # Its sockets close, which gloo notices at once; else the heartbeats would be missed.
    assert abs(ends[0].seconds - ends[1].seconds) < 2 * HEARTBEAT_SECONDS, message
    assert "Gloo all-reduce failed" in message or "another task died" in message
    if by == "SIGKILL":
        assert f"failed first: process {victim}: SIGKILL" in message
    else:
        assert "ValueError: the rows of this process cannot be read" in message


@pytest.mark.whole
def test_a_process_that_stands_still_ends_the_others():
    args = {"how": "all_reduce", "victim": 1, "by": "SIGSTOP"}
    with pytest.raises(ProcessesFailed) as caught:
        run_processes("end_in_the_middle", 2, timeout=45, grace=0.5, args=args)
    message, (waiting, stopped) = str(caught.value), caught.value.ends
    assert waiting.code != 0 and not waiting.killed_here, message
    assert stopped.killed_here and "process 1: still running" in message
    assert "stopped sending heartbeats" in waiting.log


@pytest.mark.whole
def test_processes_that_never_end_are_killed():
    with pytest.raises(ProcessesFailed, match="not done within 3 s") as caught:
        run_processes("sleep", 2, timeout=3)
    assert all(end.killed_here and end.seconds < 10 for end in caught.value.ends)


# --- 4. checkpoints -------------------------------------------------------------------------------


@pytest.mark.slow
def test_processes_that_were_killed_resume_bit_equal(tmp_path):
    args = {"how": "all_reduce", "directory": str(tmp_path)}
    with pytest.raises(ProcessesFailed, match="SIGKILL"):
        run_processes("save_and_die", 2, args={**args, "every": 2, "last": 5, "victims": [0, 1]})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "4"]
    results = run_processes("resume", 2, args={**args, "steps": 6})
    assert_same_on_all(results)
    for result in results:
        assert result["saved"] == 4
        assert_same_part(result, "resumed", "uninterrupted")
        assert result["resumed/opt_state/skipped_total"] == 1


@pytest.mark.whole
def test_a_job_whose_host_died_goes_on_with_the_processes_of_the_other(tmp_path):
    """Two hosts of two processes; one host dies, and two processes take the job up again."""
    args = {"directory": str(tmp_path)}
    dying = {"how": "hosts", "every": 2, "last": 5, "victims": [2, 3]}
    with pytest.raises(ProcessesFailed, match="failed first: process [23]: SIGKILL") as caught:
        run_processes("save_and_die", 4, args=args | dying)
    assert all(end.code and not end.killed_here for end in caught.value.ends), str(caught.value)
    results = run_processes("resume", 2, args=args | {"how": "all_reduce", "steps": 6})
    assert_same_on_all(results)
    (found, _) = results
    assert found["saved"] == 4
    # Four processes add the same rows as two, in another order: some units of 2**-24, which Adam
    # makes updates of 1e-2 of. Counts and the scale are the same.
    for name in found:
        other = found.get(name.replace("resumed", "uninterrupted"))
        np.testing.assert_allclose(found[name], other, rtol=5e-6, atol=5e-7, err_msg=name)
        if found[name].dtype.kind in "bi":
            np.testing.assert_array_equal(found[name], other, err_msg=name)
    assert found["resumed/opt_state/skipped_total"] == 1


# --- 5. overlap -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_parameters_are_updated_while_the_last_bucket_is_late():
    """A proof of order, not of speed: what need not wait for a late process does not."""
    stall = 0.5
    times = run_processes("stall", 2, args={"seconds": stall})[0]
    for name in ("verdict", "updated d", "updated c"):
        # Known well before the last bucket has arrived,
        assert times[f"before/{name}"] < times["before/reduced a"] - stall / 2, (name, times)
        # but not where the reduced gradients are judged: then all wait for the last.
        assert times[f"after/{name}"] > times["after/reduced a"], (name, times)
    assert times["before/reduced a"] > stall, times


# --- the guide ------------------------------------------------------------------------------------


@pytest.mark.whole
def test_the_script_of_the_guide_runs_in_all_its_ways(tmp_path):
    text = (ROOT / "docs/guides/many_processes.md").read_text()
    script, shell = (
        re.search(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[1]
        for language in ("python", "shell")
    )
    (tmp_path / "train.py").write_text(script)
    with reserved_port() as port:
        output, _ = run_shell(["bash", "-euc", shell.replace("12345", str(port))], tmp_path)
    found = re.findall(r"(\d) processes, (\d) devices, loss (\S+)", output)
    assert [(int(p), int(d)) for p, d, _ in found] == [(1, 1), (1, 8), (2, 2)], output
    first = found[0][2]
    assert float(first) < 0.1 and found[1][2] == first, output
