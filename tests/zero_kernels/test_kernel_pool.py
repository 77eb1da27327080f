"""The thread pool and the face of Kernels: several callers, forks, closing, binding, refusals, rounding modes."""

import os
import subprocess
import sys
import threading
import time
import warnings

import psutil
import pytest
import torch
from planes import adam_planes, bits, random_planes, run_adam

from lamina.zero.adam import kernels as kernels_module
from lamina.zero.adam.kernels import (
    AdamBatch,
    AdamHyper,
    AdamPlanes,
    AdamScalars,
    DType,
    Kernels,
    SingleCoreWarning,
    available_paths,
    default_num_threads,
)

HYPER = AdamHyper(lr=1e-2, weight_decay=0.1, step=3)


def thread_ids() -> set[int]:
    return {t.id for t in psutil.Process().threads()}


def are_gone(threads: set[int]) -> bool:
    """Whether these have ended: the kernel lists a thread for a moment after it was joined."""
    until = time.monotonic() + 60
    while thread_ids() & threads and time.monotonic() < until:
        time.sleep(0.001)
    return not thread_ids() & threads


def test_many_callers_at_once_get_right_results():
    wanted = random_planes("split", DType.BF16, 70_000, seed=1)
    start = wanted.copy()
    with Kernels(2) as kernels:
        run_adam(kernels, wanted, HYPER)
        failures: list[str] = []

        def work(name: int) -> None:
            for _ in range(20):
                mine = start.copy()
                run_adam(kernels, mine, HYPER)
                if not torch.equal(bits(mine.param), bits(wanted.param)):
                    failures.append(f"caller {name}")

        callers = [threading.Thread(target=work, args=(i,)) for i in range(5)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        assert failures == []


def test_a_call_lets_other_python_threads_run():
    """Holding the GIL the counter would not move. On a core that both share it may not move in one call, but in some."""
    planes = random_planes("fp32", DType.FP32, 1 << 21, seed=1)
    turns = 0
    stop = threading.Event()

    def count() -> None:
        nonlocal turns
        while not stop.is_set():
            turns += 1

    def turns_meanwhile() -> int:
        before = turns
        run_adam(kernels, planes, HYPER)
        return turns - before

    with Kernels(1, path="portable") as kernels:
        counter = threading.Thread(target=count)
        counter.start()
        try:
            assert any(turns_meanwhile() > 100 for _ in range(50))
        finally:
            stop.set()
            counter.join()


def test_idle_workers_sleep():
    planes = random_planes("fp32", DType.FP32, 200_000, seed=1)
    with Kernels(4) as kernels:
        run_adam(kernels, planes, HYPER)
        time.sleep(0.05)
        before = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before < 0.1


def test_close_ends_the_threads_and_later_calls_say_so():
    planes = random_planes("fp32", DType.FP32, 100, seed=1)
    before = thread_ids()
    kernels = Kernels(3)
    own = thread_ids() - before
    assert len(own) == 2  # the caller is the third
    kernels.close()
    kernels.close()
    assert are_gone(own)
    with pytest.raises(ValueError, match="closed"):
        run_adam(kernels, planes, HYPER)


def test_close_while_others_call_waits_for_them():
    for _ in range(10):
        kernels = Kernels(3)
        errors: list[BaseException] = []

        def call(kernels: Kernels = kernels, errors: list[BaseException] = errors) -> None:
            mine = random_planes("fp32", DType.FP32, 100_000, seed=1)
            try:
                for _ in range(50):
                    run_adam(kernels, mine, HYPER)
            except ValueError as error:
                errors.append(error)

        caller = threading.Thread(target=call)
        caller.start()
        time.sleep(0.003)
        kernels.close()
        caller.join()
        assert all("closed" in str(e) for e in errors)


def test_dropping_the_object_ends_the_threads():
    before = thread_ids()
    kernels = Kernels(3)
    own = thread_ids() - before
    del kernels
    assert are_gone(own)


def test_a_forked_child_is_told_to_make_its_own():
    planes = random_planes("fp32", DType.FP32, 100_000, seed=1)
    with Kernels(2) as kernels:
        run_adam(kernels, planes, HYPER)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads: what is tested
            child = os.fork()
        if child == 0:
            code = 1
            try:
                run_adam(kernels, planes, HYPER)
            except RuntimeError as error:
                code = 0 if "fork" in str(error) else 2
                with Kernels(2) as fresh:
                    run_adam(fresh, planes, HYPER)
                kernels.close()
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        run_adam(kernels, planes, HYPER)


def test_bound_workers_stay_on_their_cores_and_the_caller_is_not_bound():
    core = max(os.sched_getaffinity(0))
    mine = os.sched_getaffinity(0)
    before = thread_ids()
    planes = random_planes("fp32", DType.FP32, 300_000, seed=1)
    reference = planes.copy()
    with Kernels(cores=[core]) as kernels, Kernels(1) as plain:
        workers = thread_ids() - before
        assert [os.sched_getaffinity(w) for w in workers] == [{core}]
        run_adam(kernels, planes, HYPER)
        run_adam(plain, reference, HYPER)
    assert os.sched_getaffinity(0) == mine
    assert torch.equal(planes.param, reference.param)


def torch_threads(num_threads: int, code: str) -> str:
    """What a process prints in which torch has so many threads."""
    start = f"import torch, psutil, threading; torch.set_num_threads({num_threads})\n"
    start += "from lamina.zero.adam.kernels import Kernels, DType\nn = 1 << 18; x, y = torch.ones(n), torch.zeros(n)\n"
    start += "def call(k): k.accumulate(n, dst=y.data_ptr(), src=x.data_ptr(), src_dtype=DType.FP32)\n"
    done = subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_team_of_torch_does_the_calls_of_the_thread_that_asked():
    """Told by the processor time of the kernels' own worker, which sleeps all the while."""
    code = (
        "def own(): return {t.id: t.user_time + t.system_time for t in psutil.Process().threads()}\n"
        "(x + y).sum(); before = own()\n"
        "with Kernels(3) as k:\n"
        "    mine = set(own()) - set(before)\n"
        "    used = k.use_team()\n"
        "    for _ in range(400): call(k)\n"
        "    slept = sum(own()[t] for t in mine)\n"
        "    late = set(own()) - set(before) - mine\n"
        "    thread = threading.Thread(target=lambda: [call(k) for _ in range(100)]); thread.start(); thread.join()\n"
        "    print(used, len(mine), slept <= 0.02, len(late) == 0, bool((y == 500).all()))\n"
    )
    assert torch_threads(3, code) == "True 2 True True True"


def test_without_a_fitting_team_the_own_threads_work():
    code = (
        "with Kernels(3) as k:\n"
        "    before = len(psutil.Process().threads())\n"
        "    used = k.use_team()\n"
        "    for _ in range(20): call(k)\n"
        "    print(used, bool((y == 20).all()), len(psutil.Process().threads()) - before)\n"
    )
    assert torch_threads(1, code) == "True True 0"
    bound = "with Kernels(cores=[min(__import__('os').sched_getaffinity(0))]) as k: print(k.use_team())\n"
    assert torch_threads(2, bound) == "False"


def test_a_forked_child_has_no_team():
    code = (
        "import os, warnings; warnings.simplefilter('ignore'); (x + y).sum()\n"
        "if (child := os.fork()) == 0:\n"
        "    k = Kernels(2); used = k.use_team(); call(k)\n"
        "    os._exit(0 if not used and bool((y[:9] == 1).all()) else 1)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    assert torch_threads(2, code) == "0"


def test_cores_that_are_not_ours_are_refused():
    with pytest.raises(ValueError, match=r"cores = \[4095\].*may use"):
        Kernels(cores=[4095])
    with pytest.raises(ValueError, match="cores"):
        Kernels(cores=[])


def test_paths_are_chosen_forced_and_refused():
    assert available_paths()[-1] == "portable"
    with Kernels(1) as best:
        assert best.path == available_paths()[0]
    with pytest.raises(ValueError, match=r"'sse9'.*avx512"):
        Kernels(1, path="sse9")
    missing = {"avx512", "avx2", "neon"} - set(available_paths())
    assert missing
    for path in missing:
        with pytest.raises(ValueError, match=f"{path}.*cannot run it.*portable"):
            Kernels(1, path=path)


@pytest.mark.filterwarnings("error")
def test_one_core_left_by_default_is_said_once_and_not_when_asked_for(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(len(os.sched_getaffinity(0))))
    assert default_num_threads() == 1
    with pytest.warns(SingleCoreWarning, match="one core"):
        Kernels().close()
    Kernels(1).close()  # asked for: no warning


def test_default_shares_the_cores_among_local_ranks(monkeypatch):
    monkeypatch.setattr(kernels_module.os, "sched_getaffinity", lambda _: set(range(12)))
    for ranks, wanted in [("1", 12), ("3", 4), ("24", 1), ("", 12), ("junk", 12), ("0", 12)]:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert default_num_threads() == wanted


@pytest.mark.parametrize("num_threads", [0, -1, 100_000])
def test_senseless_thread_counts_are_refused(num_threads):
    with pytest.raises(ValueError, match="num_threads"):
        Kernels(num_threads)


@pytest.mark.parametrize("path", available_paths())
def test_flushing_of_subnormals_in_the_calling_thread_changes_nothing(path):
    planes = random_planes("fp32", DType.FP32, 60_000, seed=1)
    planes.param *= 1e-38
    planes.exp_avg *= 1e-38
    planes.grad.mul_(1e-38)
    reference = planes.copy()
    hyper = AdamHyper(lr=1e-38, weight_decay=0.1, step=3, eps=1.0)
    with Kernels(2, path=path) as kernels:
        run_adam(kernels, reference, hyper)
        assert torch.set_flush_denormal(True)
        try:
            run_adam(kernels, planes, hyper)
        finally:
            torch.set_flush_denormal(False)
    assert torch.equal(bits(planes.param), bits(reference.param))
    assert torch.equal(bits(planes.exp_avg), bits(reference.exp_avg))
    assert ((reference.exp_avg != 0) & (reference.exp_avg.abs() < 1e-38)).any()


def test_a_batch_does_what_single_calls_do():
    sizes = [0, 1, 5, 16384, 16385, 50_000, 3, 0]
    single = [random_planes("split", DType.BF16, n, seed=n) for n in sizes]
    together = [p.copy() for p in single]
    batch = AdamBatch()
    with Kernels(2) as kernels:
        for round_ in range(2):
            batch.clear()
            for i, planes in enumerate(together):
                scalars = AdamScalars(AdamHyper(lr=0.01, step=i % 3 + 1), 1.0 + i)
                assert batch.add(adam_planes(planes), scalars) == i
            kernels.adam_batch(batch)
            for i, planes in enumerate(single):
                run_adam(kernels, planes, AdamHyper(lr=0.01, step=i % 3 + 1), 1.0 + i)
            for a, b in zip(single, together, strict=True):
                assert all(torch.equal(bits(x), bits(y)) for x, y in zip(a.written(), b.written(), strict=True))
            assert len(batch) == len(sizes), round_


def test_wrong_planes_are_refused_with_their_names():
    planes = random_planes("fp32", DType.FP32, 64, seed=1)
    good = {
        "n": 32,
        "param": planes.param.data_ptr(),
        "param_dtype": DType.FP32,
        "grad": planes.grad.data_ptr(),
        "grad_dtype": DType.FP32,
        "exp_avg": planes.exp_avg.data_ptr(),
        "exp_avg_sq": planes.exp_avg_sq.data_ptr(),
    }
    cases = [
        ({"exp_avg": good["exp_avg"] + 2}, "exp_avg = .*multiple of 4"),
        ({"param": 0}, "param is a null address"),
        ({"grad": good["grad"] + 1, "grad_dtype": DType.BF16}, "grad = .*multiple of 2"),
        ({"param_dtype": DType.BF16}, "bf16 param needs remainder"),
        ({"param_dtype": DType.FP16}, "fp16 param needs master"),
        ({"param_dtype": DType.FP16, "remainder": 8}, "cannot be split"),
        ({"param_dtype": DType.BF16, "remainder": 8, "master": 8}, "not both"),
        ({"param_dtype": DType.BF16, "remainder": 7}, "remainder = 0x7"),
        ({"param_dtype": DType.FP16, "master": 6}, "master = 0x6"),
        ({"master": 8}, "its own master"),
        ({"counter": 6}, "counter = 0x6"),
        ({"n": -1}, "n = -1"),
    ]
    before = planes.copy()
    with Kernels(1) as kernels:
        for change, message in cases:
            with pytest.raises(ValueError, match=message):
                kernels.adam(AdamPlanes(**{**good, **change}), HYPER)
    assert torch.equal(planes.param, before.param)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 0}, "step = 0"),
        ({"beta1": 1.0}, "beta1 = 1.0"),
        ({"beta2": -0.1}, "beta2 = -0.1"),
        ({"eps": -1.0}, "eps"),
        ({"weight_decay": float("nan")}, "weight_decay"),
        ({"lr": float("nan")}, "lr"),
    ],
)
def test_senseless_options_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        AdamHyper(**{"lr": 0.1, "step": 1, **change})


def test_works_in_an_empty_environment_without_torch(tmp_path):
    """G-05: run by the interpreter's full path with nothing in the environment; the kernels need no torch."""
    code = (
        "import sys; sys.path[:0] = {path!r}\n"
        "import types; zero = types.ModuleType('lamina.zero'); zero.__path__ = [{zero!r}]\n"
        "import lamina; sys.modules['lamina.zero'] = zero\n"
        "from lamina.zero.adam.kernels import Kernels, DType\n"
        "from array import array\n"
        "x = array('f', [3.0, 4.0])\n"
        "print(Kernels(1).squared_norm(2, src=x.buffer_info()[0], dtype=DType.FP32)[0], 'torch' in sys.modules)\n"
    )
    zero = os.path.dirname(os.path.dirname(kernels_module.__file__))
    code = code.format(path=sys.path, zero=zero)
    done = subprocess.run(
        [sys.executable, "-c", code], env={}, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("25.0 False\n", "")
