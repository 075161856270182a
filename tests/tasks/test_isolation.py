"""Workers run the standard library's own functions: `operator.call(f, *args)` runs f in the worker."""

from __future__ import annotations

import asyncio
import operator
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from april.rollout.trajectory.reward import Reward
from april.rollout.user_code.user_code import UserCodeError
from april.rollout.user_code.workers import WorkerDied
from april.tasks.build import build_task
from april.tasks.isolation import RewardWorkers
from april.tasks.scoring import SpecScorer
from april.tasks.task import Problem, TaskSpec
from tests.limits import HANG

FOREVER = 1e9


@pytest.fixture
async def workers():
    async with RewardWorkers(operator.call, most=2, time_limit=HANG) as workers:
        yield workers


async def alive(pid: int) -> bool:
    """Wait until the process has ended; return whether it is still there after a long time."""
    with suppress(TimeoutError):
        async with asyncio.timeout(HANG):
            while True:
                try:
                    os.kill(pid, 0)
                except ProcessLookupError:
                    return False
                await asyncio.sleep(0.02)
    return True


async def test_calls_run_in_worker_processes(workers):
    pids = {await workers(os.getpid) for _ in range(5)}
    assert len(pids) == 1
    assert os.getpid() not in pids


async def test_a_call_that_hangs_is_killed_and_its_worker_replaced():
    async with RewardWorkers(operator.call, most=1, time_limit=HANG) as workers:
        pid = await workers(os.getpid)
        workers.time_limit = 1
        with pytest.raises(TimeoutError, match="ran past its time limit of 1 s"):
            await workers(time.sleep, FOREVER)
        workers.time_limit = HANG
        assert not await alive(pid)
        assert await workers(os.getpid) != pid


def fork_and_exit(end):
    if os.fork() == 0:
        while not os.path.exists(end):
            time.sleep(0.05)
        os._exit(0)
    os._exit(3)


async def test_the_end_of_a_worker_is_detected_while_its_child_process_lives(tmp_path):
    async with RewardWorkers(operator.call, most=1, time_limit=100) as workers:
        with pytest.raises(WorkerDied, match=r"its process ended .exit code 3"):
            await workers(fork_and_exit, str(tmp_path / "end"))
        (tmp_path / "end").touch()
        assert await workers(os.getpid)


async def test_the_time_limit_excludes_waiting_for_a_worker():
    async with RewardWorkers(operator.call, most=1, time_limit=4) as workers:
        assert await asyncio.gather(*(workers(time.sleep, 0.5) for _ in range(9))) == [None] * 9


async def test_workers_are_added_while_calls_wait_behind_hanging_calls():
    async with RewardWorkers(operator.call, most=3, time_limit=300) as workers:
        assert workers.processes == 1
        hanging = [asyncio.create_task(workers(time.sleep, FOREVER)) for _ in range(2)]
        assert await asyncio.gather(*(workers(abs, -i) for i in range(50))) == list(range(50))
        assert workers.processes == 3
        assert not any(call.done() for call in hanging)
        for call in hanging:
            call.cancel()


async def test_quick_calls_share_one_worker(workers, monkeypatch):
    monkeypatch.setattr("april.tasks.isolation.PATIENCE", FOREVER)
    calls = [asyncio.create_task(workers(os.getpid)) for _ in range(50)]
    await asyncio.sleep(0)
    assert workers.waiting > 0
    assert len(set(await asyncio.gather(*calls))) == workers.processes == 1
    assert workers.waiting == 0


def touch_and_sleep(path):
    Path(path).touch()
    time.sleep(FOREVER)


async def test_cancelling_a_call_kills_it(workers, tmp_path):
    pid = await workers(os.getpid)
    call = asyncio.create_task(workers(touch_and_sleep, str(tmp_path / "began")))
    while not (tmp_path / "began").exists():
        await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not await alive(pid)
    assert await workers(abs, -1) == 1


async def test_exceptions_keep_their_type_and_bring_the_workers_traceback(workers):
    with pytest.raises(ZeroDivisionError, match="division by zero") as caught:
        await workers(operator.truediv, 1, 0)
    assert "In the worker process:\nTraceback" in caught.value.__notes__[0]


async def test_a_timeout_raised_by_the_function_is_not_the_time_limit(workers):
    with pytest.raises(TimeoutError, match="mine"):
        await workers(exec, "raise TimeoutError('mine')")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("class Odd(Exception): pass\nraise Odd('x')", "Odd: x"),
        ("raise SystemExit('bye')", "SystemExit: bye"),
        ("import tomllib\nclass E(tomllib.TOMLDecodeError):\n def __init__(self, a, b): pass\nraise E(1, 2)", "E: "),
    ],
)
async def test_exceptions_that_cannot_be_pickled_are_described(workers, code, message):
    with pytest.raises(UserCodeError, match=message):
        await workers(exec, code, {"__name__": "user"})
    assert await workers(abs, -1) == 1


async def test_a_result_that_cannot_be_carried_over_fails_its_call_only(workers):
    with pytest.raises(Exception, match=r"pickle|lambda"):
        await workers(eval, "lambda: 0")
    assert await workers(abs, -1) == 1


async def test_a_process_that_dies_fails_its_call_only(workers):
    with pytest.raises(WorkerDied, match=r"its process ended .exit code 3"):
        await workers(os._exit, 3)
    assert await workers(abs, -1) == 1


async def test_a_worker_that_is_killed_between_calls_is_replaced(workers):
    pid = await workers(os.getpid)
    os.kill(pid, signal.SIGKILL)
    while any(worker.alive for worker in workers._workers):
        await asyncio.sleep(0.01)
    assert await workers(os.getpid) != pid


async def test_a_memory_hog_gets_a_memory_error():
    async with RewardWorkers(operator.call, most=1, memory_limit=200 * 2**20) as workers:
        assert len(await workers(bytes, 20 * 2**20)) == 20 * 2**20
        with pytest.raises(MemoryError):
            await workers(bytearray, 2**30)
        assert await workers(abs, -1) == 1


async def test_workers_see_no_secrets(monkeypatch):
    shown = {"PATH": os.environ["PATH"], "TOKENIZERS_PARALLELISM": "false", "JUDGE_API_KEY": "wanted"}
    hidden = {"HF_TOKEN": "x", "WANDB_API_KEY": "x", "AWS_SECRET_ACCESS_KEY": "x", "PGPASSWORD": "x", "my_token": "x"}
    hidden |= {"SSH_AUTH_SOCK": "x", "SESSION_COOKIE": "x", "DATABASE_URL": "postgres://me:word@example.org/db"}
    for name, value in {**shown, **hidden}.items():
        monkeypatch.setenv(name, value)
    async with RewardWorkers(operator.call, most=1, keep_env=["JUDGE_API_KEY"]) as workers:
        names = [*shown, *hidden, "OMP_NUM_THREADS"]
        seen = dict(zip(names, await asyncio.gather(*(workers(os.getenv, name) for name in names)), strict=True))
    assert seen == {**shown, **dict.fromkeys(hidden), "OMP_NUM_THREADS": "1"}


async def test_child_processes_of_a_call_have_no_secrets_and_limited_processor_time(monkeypatch):
    """A process that a reward function leaves behind has no parent; its limits end it."""
    monkeypatch.setenv("HF_TOKEN", "x")
    script = "import os, resource; print(resource.getrlimit(resource.RLIMIT_CPU)[0], 'HF_TOKEN' in os.environ)"
    async with RewardWorkers(operator.call, most=1, time_limit=30) as workers:
        limits = [(await workers(subprocess.check_output, [sys.executable, "-c", script])).split() for _ in range(2)]
    for seconds, secret in limits:
        assert 30 < int(seconds) < 90
        assert secret == b"False"


async def test_workers_are_spawned_without_the_trainers_modules(workers):
    assert "transformers" in sys.modules
    assert not await workers(eval, "'transformers' in __import__('sys').modules")


async def test_a_function_that_cannot_be_loaded_fails_every_call(tmp_path, monkeypatch):
    (tmp_path / "gone_later.py").write_text("def reward(response, answer): return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    import gone_later

    (tmp_path / "gone_later.py").unlink()
    async with RewardWorkers(gone_later.reward, most=1) as workers:
        for _ in range(2):
            with pytest.raises(ModuleNotFoundError, match="gone_later"):
                await workers("4", "4")


async def test_closing_stops_hanging_calls():
    workers = RewardWorkers(operator.call, most=1, time_limit=None)
    pid = await workers(os.getpid)
    call = asyncio.create_task(workers(time.sleep, FOREVER))
    await asyncio.sleep(0.2)
    await workers.close()
    assert not await alive(pid)
    with pytest.raises(asyncio.CancelledError):
        await call
    with pytest.raises(RuntimeError, match="closed"):
        await workers(abs, 1)


def test_workers_end_with_a_killed_trainer(tmp_path):
    script = tmp_path / "trainer.py"
    script.write_text(
        "import asyncio, operator, os, signal\n"
        "from april.tasks.isolation import RewardWorkers\n"
        "async def main():\n"
        "    workers = RewardWorkers(operator.call, most=1)\n"
        "    print(await workers(os.getpid), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "if __name__ == '__main__':\n"
        "    asyncio.run(main())\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    output = subprocess.run([sys.executable, str(script)], stdout=subprocess.PIPE, env=env, timeout=HANG, check=False)
    assert not asyncio.run(alive(int(output.stdout)))


async def test_a_task_is_scored_by_workers_that_build_their_own_scorer():
    task = build_task(TaskSpec("reasoning_gym", "gcd", size=20, eval_size=2))
    problem = task.problem(0)
    async with RewardWorkers(task.scorer, most=1) as workers:
        assert await workers(problem, [f"<answer>{problem.answer}</answer>", "?"]) == [Reward(1.0), Reward(0.0)]


async def test_math_verify_runs_in_workers():
    scorer = SpecScorer(TaskSpec("reasoning_gym", "gcd", reward="math-verify"))
    async with RewardWorkers(scorer, most=1) as workers:
        assert await workers(Problem("p", "?", "1/2"), ["\\boxed{0.5}", "2"]) == [Reward(1.0), Reward(0.0)]


@pytest.mark.parametrize("limits", [{"most": 0}, {"time_limit": 0}, {"time_limit": -1.0}, {"memory_limit": 0}], ids=str)
def test_wrong_limits_are_named(limits):
    with pytest.raises(ValueError, match=f"^{next(iter(limits))} = "):
        RewardWorkers(operator.call, **limits)
