"""A hanging head of a cluster blocks no caller."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from april.engines.ray.head import call_head, head_hangs, release
from april.rollout.engine import EngineError
from tests.limits import HANG

HANGING = """
import asyncio, atexit, threading
from april.engines.ray.head import call_head, exit_if_head_hangs
from april.rollout.engine import EngineError

never = threading.Event()
atexit.register(never.wait)  # as Ray does while it is connected
try:
    asyncio.run(call_head(never.wait, seconds=0.01))
except EngineError as error:
    print(error)
exit_if_head_hangs(3)
"""


def test_a_hanging_head_is_given_up_and_polled_with_a_short_timeout() -> None:
    answers = threading.Event()

    async def asks() -> None:
        assert await call_head(lambda: 7) == 7
        with pytest.raises(ZeroDivisionError):
            await call_head(lambda: 1 // 0)
        given_back: list[int] = []
        await release(given_back.append, 7)
        assert given_back == [7]
        assert not head_hangs()
        with pytest.raises(EngineError, match=r"has not answered for 0\.01 s"):
            await call_head(answers.wait, seconds=0.01)
        assert head_hangs()
        with pytest.raises(EngineError, match="has not answered for 1 s"):
            await call_head(answers.wait, seconds=3600)
        await release(answers.wait)  # not done, and no caller waits

    hanging = set(threading.enumerate())
    asyncio.run(asks())
    answers.set()
    for thread in set(threading.enumerate()) - hanging:
        thread.join()
    assert not head_hangs()


def test_a_process_ends_though_its_head_hangs() -> None:
    ended = subprocess.run([sys.executable, "-c", HANGING], stdout=subprocess.PIPE, text=True, timeout=HANG)
    assert (ended.returncode, ended.stdout.strip()) == (3, "the head of the Ray cluster has not answered for 0.01 s")
