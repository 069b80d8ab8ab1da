"""`make gpu`, rehearsed on a CPU: every part with small sizes, the table, and the rules."""

import dataclasses
import functools
import inspect
import json
import math
import pickle
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from ampx import fused
from ampx.diagnostics.hlo import parse_computations
from ampx.fused.kernels import measured
from ampx.fused.kernels.pallas_updates import KindOfWork
from benchmarks import torch_updates
from benchmarks.gpu import __main__ as program
from benchmarks.gpu import adopting, compiling, goals, gpt2, kernels, parts, rows, tails
from benchmarks.gpu.compiling import Program, Queue, Workers
from benchmarks.gpu.rows import TOO_LATE, Bench, Case, Row, Way
from benchmarks.measuring import Candidate


@pytest.fixture
def bench(tmp_path):
    return Bench("a part", tmp_path / "rows.jsonl", 60.0, tiny=True)


def written(bench):
    return {(row.case, row.candidate): row for row in rows.read_rows(bench.path)}


@pytest.fixture
def standard_promotion():
    """For `jax.nn.dot_product_attention`, which mixes halves with float32; in all threads."""
    before = jax.config.jax_numpy_dtype_promotion
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    yield
    jax.config.update("jax_numpy_dtype_promotion", before)


# --- timing --------------------------------------------------------------------------------------


def test_a_row_has_the_time_of_one_step_and_its_ratio_to_another(bench):
    bench.rounds = 3
    start = functools.partial(jnp.ones, 1000)
    slow = Way(lambda state, x: jax.lax.fori_loop(0, 3000, lambda _, s: s * x, state), start, 8000)
    fast = Way(lambda state, x: state * x, start, 8000)
    ways = {"slow": slow, "fast": fast}
    bench.run([Case("a case", ways, lambda: (jnp.float32(1),), "slow", 1000, repeats=4)])
    found = written(bench)
    slow, fast = found["a case", "slow"], found["a case", "fast"]
    assert fast.ratio < 1 == slow.ratio and fast.beside == "slow"
    assert slow.best <= slow.milliseconds and slow.of_copy < fast.of_copy
    assert slow.temporaries is not None and slow.compile_seconds > 0
    assert "GB/s" in found["a case", rows.COPY].note


def test_steps_of_a_program_do_not_share_what_is_the_same_in_each():
    """XLA would compute the norm of the gradients once, in front of the loop."""

    def step(state, grads):
        return state + jnp.sum(jnp.sin(grads))

    text = jax.jit(rows.looped(step, 5)).lower(jnp.ones(()), jnp.ones(64)).compile().as_text()
    computations, _ = parse_computations(text)
    (loop,) = (one for own in computations.values() for one in own if one.opcode == "while")
    inside = list(loop.called)
    for name in inside:  # grows while it is walked through
        inside += [each for one in computations[name] for each in one.called]
    sines = {name for name, own in computations.items() if any(i.opcode == "sine" for i in own)}
    assert sines and sines <= set(inside)


def test_what_fails_or_comes_too_late_is_a_row_with_a_reason(bench):
    def fail(state):
        raise ValueError("no such kernel\nand more")

    good = Way(lambda state: state + 1, lambda: jnp.zeros(3))
    ways = {"good": good, "bad": Way(fail, lambda: jnp.zeros(3))}

    def no_others(repeats):
        raise ImportError("torch is not installed")

    left_out = {"slow": "not measured: it compiles for minutes"}
    bench.run([Case("a case", ways, tuple, "good", make_others=no_others, left_out=left_out)])
    found = written(bench)
    assert found["a case", "good"].ratio == 1
    assert found["a case", "bad"].note == "failed: ValueError: no such kernel"
    assert found["a case", "others"].note == "failed: ImportError: torch is not installed"
    assert found["a case", "slow"].note == left_out["slow"]
    late = Bench("late", bench.path, 0.0, tiny=True)
    late.run([Case("late", {"good": good}, tuple, "good")])
    assert written(bench)["late", "good"].note == rows.TOO_LATE


def test_what_fails_after_its_first_call_costs_one_case(bench):
    def fails_later(repeats):
        calls = iter([None])
        yield Candidate("other", lambda _: next(calls), None, ())

    good = Way(lambda state: state + 1, lambda: jnp.zeros(3))
    cases = [Case(f"case {k}", {"good": good}, tuple, "good") for k in range(2)]
    cases[0].make_others = fails_later
    bench.run(cases)
    found = written(bench)
    assert found["case 0", "good"].note == found["case 0", "other"].note
    assert found["case 0", "good"].note.startswith("failed: StopIteration")
    assert found["case 1", "good"].ratio == 1


def test_a_part_that_dies_leaves_its_rows_and_the_others_run(tmp_path, monkeypatch):
    def die(bench):
        bench.write(Row("dies", "a case", "by a kernel", 1.0))
        raise SystemExit("CUDA_ERROR_ILLEGAL_ADDRESS")

    class Process:
        """That of the part; it is this one."""

        def __init__(self, command, stdout, **_):
            self.path, self.stdout = command[command.index("--out") + 1], stdout

        def wait(self, _):
            try:
                die(Bench("dies", program.Path(self.path), 1.0))
            except SystemExit as error:
                self.stdout.write(f"one line\n{error}\n".encode())
                return 134

        def poll(self):
            return 134

    monkeypatch.setattr(subprocess, "Popen", Process)
    log = tmp_path / "gpu.log"
    first, second = program._run_part("dies", 1.0, True, log, tmp_path)
    assert first.candidate == "by a kernel"
    assert second.note == "ended with exit status 134: CUDA_ERROR_ILLEGAL_ADDRESS"
    assert "one line" in log.read_text()


def test_a_process_that_takes_too_long_is_ended_and_what_it_printed_is_kept(tmp_path):
    log = tmp_path / "gpu.log"
    command = [sys.executable, "-c", "print('begun'); import time; time.sleep(60)"]
    assert program._run(command, 3.0, log) == (None, "begun\n")
    assert "begun" in log.read_text()


@pytest.mark.parametrize("status", [1, None])
def test_tests_that_failed_are_named_even_where_not_all_have_ended(status, tmp_path, monkeypatch):
    printed = """tests/a.py::one[x] PASSED [ 10%]
tests/a.py::two FAILED [ 20%]
[gw1] [ 30%] PASSED tests/b.py::three
"""
    summary = "FAILED tests/a.py::two - assert 1\n==== 1 failed, 2 passed in 3 s ====\n"
    text = printed + (summary if status else "")
    monkeypatch.setattr(program, "_run", lambda *_, **__: (status, text))
    last, failed = program._run_tests(80, tmp_path / "gpu.log", "gpu")
    assert len(failed) == 1 and "tests/a.py::two" in failed[0]
    assert last in (
        "==== 1 failed, 2 passed in 3 s ====",
        "not finished after 80 s: 3 ended, 1 of them badly",
    )


def test_a_failure_is_printed_even_where_pytest_does_not_end(tmp_path):
    path = tmp_path / "test_two.py"
    path.write_text("def test_a():\n assert 1 == 2\n\ndef test_b():\n import os; os._exit(3)\n")
    command = [sys.executable, "-m", "pytest", "-p", "benchmarks.gpu.failures", str(path)]
    status, text = program._run([*command, "--rootdir", str(tmp_path)], 60.0, tmp_path / "log")
    assert status == 3 and "test_two.py::test_a, call" in text and "assert 1 == 2" in text


# --- compiling in processes ----------------------------------------------------------------------


@pytest.fixture
def no_cache():
    """XLA writes out what it has compiled for a CPU, but not what it took out of a cache."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # it asks for the option once
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


def make_queue(folder, cases):
    folder.mkdir()
    return Queue.make(folder, [("a part", case) for case in cases])


def make_two_ways(cost=1):
    def add(number):
        return Way(lambda state, x: state + x * number, lambda: jnp.zeros(3), cost=cost * number)

    ways = {"one": add(1), "two": add(2)}
    return [Case("a case", ways, lambda: (jnp.ones(3),), "one", repeats=2)]


@pytest.mark.usefixtures("no_cache")
def test_programs_of_workers_are_loaded_and_timed(bench, tmp_path):
    queue = make_queue(tmp_path / "programs", make_two_ways())
    assert [job.way for job in queue.jobs] == ["one", "two"]
    compiling.work(queue, lambda part: make_two_ways())
    assert queue.names("done") == ["0000", "0001"]
    assert not queue.names("waiting") and not queue.names("taken")
    [case] = make_two_ways()
    load = queue.loader("a part")
    np.testing.assert_array_equal(load(case, "two").step(jnp.ones(3), jnp.ones(3)), 5)
    bench.run([case], load)
    found = written(bench)
    assert found["a case", "one"].ratio == 1 and found["a case", "two"].compile_seconds > 0


@pytest.mark.usefixtures("no_cache")
def test_a_program_that_cannot_be_compiled_or_loaded_is_a_row_with_a_reason(bench, tmp_path):
    def fail(state, x):
        raise ValueError("no such kernel")

    def make():
        [case] = make_two_ways()
        case.ways["bad"] = Way(fail, lambda: jnp.zeros(3), cost=0)
        case.ways["dear"] = dataclasses.replace(case.ways["two"], cost=5000)
        case.ways["late"] = dataclasses.replace(case.ways["two"], cost=999)
        return [case]

    queue = make_queue(tmp_path / "programs", make())
    # What takes minutes is first; then come the cheapest.
    assert [job.way for job in queue.jobs] == ["dear", "bad", "one", "two", "late"]
    compiling.work(queue, lambda part: make())
    done = queue.folder / "done"
    for number in (0, 2):
        (done / f"{number:04}").write_bytes(pickle.dumps(Program((b"not a program", None, None))))
    for number in (3, 4):
        (done / f"{number:04}").unlink()
    bench.run(make(), queue.loader("a part"))
    found = written(bench)
    assert found["a case", "bad"].note == "failed: ValueError: no such kernel"
    assert found["a case", "dear"].note.startswith("failed: UnpicklingError")
    assert found["a case", "late"].note == TOO_LATE
    # What is cheap is compiled where it is timed.
    assert found["a case", "one"].ratio == 1 and found["a case", "two"].ratio is not None


def start_one_that_takes_a_job(queue, then):
    """A process that does with the files what a worker does, and needs no JAX."""
    code = f"""
import os, time
name = sorted(os.listdir("waiting"))[0]
os.rename("waiting/" + name, "taken/" + name + "-" + str(os.getpid()))
{then}
"""
    return subprocess.Popen([sys.executable, "-c", code], cwd=queue.folder)


@pytest.mark.usefixtures("no_cache")
def test_a_worker_that_dies_costs_one_job_and_another_takes_its_place(bench, tmp_path):
    queue = make_queue(tmp_path / "programs", make_two_ways())
    started = []

    def start():
        if not started:
            started.append(start_one_that_takes_a_job(queue, "os.kill(os.getpid(), 9)"))
        else:
            compiling.work(queue, lambda part: make_two_ways())
            started.append(subprocess.Popen([sys.executable, "-c", ""]))
        return started[-1]

    workers = Workers(queue, 1, start)
    workers.wait(60)
    workers.end()
    assert len(started) == 2
    bench.run(make_two_ways(), queue.loader("a part"))
    found = written(bench)
    assert found["a case", "two"].milliseconds is not None
    note = "failed: the compiler ended its process, with exit status -9"
    assert found["a case", "one"].note == note


def test_at_the_deadline_workers_are_ended(bench, tmp_path):
    queue = make_queue(tmp_path / "programs", make_two_ways(cost=500))
    started = []

    def start():
        started.append(start_one_that_takes_a_job(queue, "time.sleep(60)"))
        return started[-1]

    workers = Workers(queue, 1, start)
    while not queue.names("taken"):
        time.sleep(0.01)
    workers.wait(0.1)
    assert started[0].poll() is None
    workers.end()
    assert [process.returncode for process in started] == [-9]
    bench.run(make_two_ways(cost=500), queue.loader("a part"))
    found = written(bench)
    assert {found["a case", by].note for by in ("one", "two")} == {rows.TOO_LATE}


def test_workers_that_do_not_begin_are_not_replaced(tmp_path):
    queue = make_queue(tmp_path / "programs", make_two_ways())
    started = []

    def start():
        started.append(subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"]))
        return started[-1]

    Workers(queue, 2, start).wait(60)
    assert len(started) == 2 and len(queue.names("waiting")) == 2


@pytest.mark.slow
def test_a_worker_is_a_process_and_what_it_prints_is_in_the_log(bench, tmp_path, monkeypatch):
    def make(name, tiny):
        """One way of a case that the worker finds in the part; and one that it does not find."""
        [case] = [case for case in parts.make_cases(name, tiny) if case.name.startswith("decoding")]
        case.ways = {"a table": case.ways["a table"], "no such way": case.ways["arithmetic"]}
        return [case]

    monkeypatch.setattr(program, "make_cases", make)
    log, folder = tmp_path / "gpu.log", tmp_path / "programs"
    folder.mkdir()
    with program._workers(folder, ["kernels"], True, log) as workers:
        workers.wait(60)
    bench.run(make("kernels", True), workers.queue.loader("kernels"))
    found = {by: row for (_, by), row in written(bench).items()}
    assert found["a table"].best > 0
    assert found["no such way"].note == "failed: KeyError: 'no such way'"
    assert "Traceback" in log.read_text()


def test_many_arrays_are_asked_less():
    cases = {name: parts.make_cases(name, tiny=False) for name in parts.PARTS}
    names = [case.name for own in cases.values() for case in own]
    assert len(names) == len(set(names))
    by_kernels = [case.name for case in cases["tails, 400 x 125 k"] if tails.KERNELS in case.ways]
    assert by_kernels == [f"{name}, 400 x 125 k" for name in ("AdamW", "LAMB", tails.NARROW[0])]
    [thousands] = cases["tails, 2000 x 5 k"]
    assert set(thousands.ways) == {tails.XLA, tails.OPTAX}
    assert thousands.left_out == {tails.KERNELS: tails.TOO_MANY}


# --- the parts -----------------------------------------------------------------------------------


def rehearse(bench, part, folder):
    """What a part writes; each row has a figure, but for those of torch where that is missing."""
    bench.part, bench.seconds = part, 600.0
    bench.end = time.monotonic() + bench.seconds
    programs = folder / "programs"
    programs.mkdir()
    own = functools.partial(parts.make_cases, tiny=True)
    if not parts.PARTS[part].threads:
        compiling.work(Queue.make(programs, [(part, case) for case in own(part)]), own)
    program._be_part(bench, programs)
    found = written(bench)
    without = {key for key, row in found.items() if row.milliseconds is None}
    assert without <= {(case, "others") for case, _ in found if torch_updates.torch is None}
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("no_cache")
def test_every_fused_optimizer_is_timed_by_xla_and_by_kernels(bench, tmp_path):
    found = rehearse(bench, "tails, GPT-2 small", tmp_path)
    public = {name for name in set(fused.__all__) & set(dir(optax)) if takes_a_rate(name)}
    assert public == {name.lower() for name in tails.OPTIMIZERS if "," not in name}
    for name in [*tails.OPTIMIZERS, *tails.DERIVED, *tails.NARROW]:
        ways = {by for case, by in found if case == f"{name}, GPT-2 small"}
        assert {tails.XLA, tails.KERNELS} - ways == (
            {tails.KERNELS} if name == "NovoGrad" else set()
        )
    ways = {by for case, by in found if case == "AdamW, GPT-2 small"}
    assert {tails.SCALED, tails.BRANCH, tails.OPTAX, "optax.apply_if_finite"} <= ways
    assert torch_updates.torch is None or set(torch_updates.NAMES) <= ways
    judged = {goal.what: goal for goal in goals.judge(found.values())}
    assert sum(goal.worst is not None for goal in judged.values()) == 3 + bool(torch_updates.torch)


def takes_a_rate(name):
    return "learning_rate" in inspect.signature(getattr(fused, name)).parameters


@pytest.mark.slow
@pytest.mark.usefixtures("no_cache")
def test_settings_norms_and_decoding_are_timed(bench, tmp_path):
    found = rehearse(bench, "kernels", tmp_path)
    cases = {case for case, _ in found}
    assert {kernels.FEW, kernels.MANY, kernels.INT8, "decoding of int8 moments, XLA"} <= cases
    for case in (kernels.FEW, kernels.MANY, kernels.INT8):
        assert kernels.DEFAULT in {by for own, by in found if own == case}
    plans = {kernels.plan_of(by) for _, by in found} - {None}
    assert len({plan.elements for plan in plans}) == 4 and len({plan.vector for plan in plans}) == 3
    assert len({plan.leaves for plan in plans}) == 5
    assert sum(case.startswith(kernels.NORM) for case in cases) == 4


def test_a_table_decodes_moments_as_arithmetic_does():
    case = kernels._decoding(1 << 10)
    old = jnp.zeros((4, 256))
    ways = [jax.jit(way.step)(old, *case.make_data()) for way in case.ways.values()]
    np.testing.assert_array_equal(*ways)


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_steps_of_gpt_2_are_timed_and_their_conversions_counted(bench, tmp_path):
    found = rehearse(bench, "a step of GPT-2 small", tmp_path)
    [case] = {case for case, _ in found}
    counts = {by: int(row.note.split()[0]) for (_, by), row in found.items() if "conv" in row.note}
    assert counts.keys() >= {"float32", gpt2.BY_HAND, gpt2.OPT_1, "O2"}
    # Not more of them than by hand, where each is written for a reason.
    assert counts["float32"] < counts[gpt2.OPT_1] <= counts[gpt2.BY_HAND]


def test_gpt_2_small_is_gpt_2_small():
    shapes = gpt2.shapes_of(gpt2.SMALL)
    assert sum(map(math.prod, shapes)) == 124_439_808 and len(shapes) == 148


def test_the_model_of_torch_gives_the_same_loss_and_gradients():
    torch = pytest.importorskip("torch")
    size = gpt2.TINY
    params, tokens = gpt2.init(size, jax.random.key(0)), gpt2.make_batch(size)
    loss, grads = jax.value_and_grad(gpt2.loss_fn)(params, tokens, heads=size.heads)
    for fused_attention in (False, True):
        theirs = gpt2.to_torch(params)
        leaves = [leaf.requires_grad_() for leaf in jax.tree.leaves(theirs)]
        own = gpt2.torch_loss(theirs, gpt2.to_torch(tokens).long(), size.heads, fused_attention)
        assert abs(own.item() - float(loss)) < 1e-5
        for ours, other in zip(
            jax.tree.leaves(grads), torch.autograd.grad(own, leaves), strict=True
        ):
            np.testing.assert_allclose(ours, other.numpy(), atol=1e-5)


@pytest.mark.whole
def test_the_whole_program_writes_one_table_and_one_file(tmp_path):
    out = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--tiny", "--no-tests", "--out", str(out)]
    run = subprocess.run(command, cwd=program.ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    result = program.Result.read(out)
    assert {row.part for row in result.rows} == set(parts.PARTS)
    assert run.stdout.count("\n### ") == 2 and "Adopted" not in run.stdout


def test_without_a_gpu_it_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(program, "_describe_device", lambda: ("cpu", "cpu", "jax 1"))
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU"):
        program.main(["--no-tests", "--parts", "float8"])


# --- the rules -----------------------------------------------------------------------------------


def setting(case, candidate, ratio):
    return Row("kernels", case, candidate, ratio, ratio, ratio, kernels.DEFAULT)


def test_a_setting_wins_by_its_mean_and_loses_by_one_bad_case():
    default = {"elements": 1024, "vector": 4, "leaves": 16}
    good = in_all_cases("2048 elements, 4 a load", 0.9, 0.9, 0.9)
    assert adopting.choose_plan(good) == {"elements": 2048, "vector": 4, "leaves": 16}
    bad = in_all_cases("2048 elements, 4 a load", 0.9, 0.9, 1.03)
    assert adopting.choose_plan(bad) == default
    assert adopting.choose_plan(good[:2]) == default  # a case is missing
    wide = setting(kernels.FEW, "2048 elements, 8 a load", 0.8)
    assert adopting.choose_plan([*bad, wide]) == adopting.choose_plan([wide]) == default
    assert adopting.choose_plan([*good, wide])["vector"] == 8
    better = [
        *good,
        *in_all_cases("512 elements, 4 a load", 0.95, 0.95, 0.95),
        setting(kernels.MANY, "8 arrays a launch", 0.97),
        setting(kernels.MANY, "64 arrays a launch", 0.96),
    ]
    for order in (better, better[::-1]):
        assert adopting.choose_plan(order) == {"elements": 2048, "vector": 4, "leaves": 64}
    assert adopting.choose_plan([]) == {"elements": 1024, "vector": 4, "leaves": 16}


def in_all_cases(candidate, *ratios):
    cases = kernels.FEW, kernels.MANY, kernels.INT8
    return [setting(case, candidate, own) for case, own in zip(cases, ratios, strict=True)]


def by_both(case, xla, kernel):
    """Rows of a case, or of several."""
    if not isinstance(case, str):
        return [row for own in case for row in by_both(own, xla, kernel)]
    return [Row("tails", case, tails.XLA, xla), Row("tails", case, tails.KERNELS, kernel)]


def on_two(name):
    return [f"{name}, 1 x 50 M", f"{name}, GPT-2 small"]


def test_kernels_win_a_kind_of_work_in_all_of_its_cases():
    lamb = by_both(on_two("LAMB"), 1.0, 0.8)
    assert adopting.choose_work(lamb) == ["norms"]
    assert adopting.choose_work(lamb[:2]) == []  # one case says little
    assert adopting.choose_work([*lamb, *by_both("LAMB, 400 x 125 k", 1.0, 1.05)]) == []
    failed = Row("tails", "LAMB, 400 x 125 k", tails.KERNELS, note="failed: ValueError: a layout")
    assert adopting.choose_work([*lamb, failed]) == []
    assert adopting.choose_work(by_both(on_two("SGD, momentum"), 1.0, 0.99)) == []
    assert adopting.choose_work(by_both(on_two("AdamW, int8 moments"), 1, 0.5)) == ["blocks"]
    assert adopting.choose_work(by_both(on_two("AdamW, split masters"), 1, 0.5)) == ["narrow"]
    norm = [
        Row("kernels", f"{kernels.NORM}, {tree}", by, ms)
        for by, ms in ((kernels.XLA, 2), (kernels.KERNELS, 1))
        for tree in ("x", "y")
    ]
    assert adopting.choose_work(norm) == ["squares"]
    assert {*adopting._KINDS.values(), "squares"} == set(KindOfWork.__args__)


def test_what_won_is_kept_beside_what_is_known_and_the_library_reads_it(tmp_path, monkeypatch):
    path = tmp_path / measured.FILE
    path.write_text(json.dumps({"another": {"work": []}}))
    found = [
        *by_both(on_two("LAMB"), 1, 0.8),
        *in_all_cases("512 elements, 4 a load", 0.99, 1.0, 1.0),
        setting(kernels.FEW, "512 elements, 2 a load", 0.9),
    ]
    result = program.Result("H100", "jax 1", rows=found)
    result.write(tmp_path / "gpu.json")
    again = program.Result.read(tmp_path / "gpu.json")
    assert again.rows == found and again.chosen["work"] == ["norms"]
    adopting.adopt(again.device, again.versions, again.rows, path)
    monkeypatch.setattr(measured, "_read", lambda: json.loads(path.read_text()))
    plan = measured.plan_for("H100")
    assert (plan.elements, plan.vector, plan.leaves, plan.work) == (512, 2, 16, ("norms",))
    assert json.loads(path.read_text())["another"] == {"work": []}


def test_goals_name_the_worst_case():
    def row(case, by, ms, share=None):
        return Row("tails", case, by, ms, ms, of_copy=share)

    found = [
        row("AdamW, 1 x 50 M", tails.XLA, 2.0, 0.95),
        row("AdamW, 1 x 50 M", tails.KERNELS, 3.0, 0.6),
        row("AdamW, 1 x 50 M", goals.TORCH, 4.0, 0.5),
        row("AdamW, 1 x 50 M", tails.OPTAX, 2.0),
        row("AdamW, 1 x 50 M", tails.SCALED, 3.0),
        row("AdamW, 1 x 50 M", tails.BRANCH, 4.0),
        row("LAMB, 1 x 50 M", tails.XLA, 2.0, 0.5),
        row("LAMB, 1 x 50 M", tails.KERNELS, 2.0, 0.91),
        row("GPT-2 small", gpt2.OPT_1, 1.03),
        row("GPT-2 small", gpt2.BY_HAND, 1.0),
        row("GPT-2 small", gpt2.OPT_1 + gpt2.CUDNN, 0.5),
        row("GPT-2 small", gpt2.BY_HAND + gpt2.CUDNN, 0.5),
    ]
    share, torch, scale, branch, level, by_cudnn, scaled_step = goals.judge(found)
    assert (share.worst, share.case, share.is_met) == (0.91, "LAMB, 1 x 50 M", True)
    assert (torch.worst, torch.is_met) == (0.5, True)
    assert (level.worst, level.is_met) == (1.03, False)
    assert (by_cudnn.worst, by_cudnn.is_met) == (1.0, True) and "cuDNN" in by_cudnn.what
    assert (scale.worst, scale.is_met, branch.worst, branch.is_met) == (1.5, False, 0.75, True)
    assert (scaled_step.worst, scaled_step.case) == (None, "not measured")
    assert not scaled_step.is_met
