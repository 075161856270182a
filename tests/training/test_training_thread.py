from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import torch

from april.training.training_thread import TrainingThread
from tests.limits import HANG


@pytest_asyncio.fixture
async def worker() -> AsyncIterator[TrainingThread]:
    async with TrainingThread() as made:
        yield made


async def test_the_event_loop_stays_free_during_work(worker: TrainingThread) -> None:
    seen = threading.Event()
    asyncio.get_running_loop().call_soon(seen.set)
    assert await worker.run(seen.wait, 30), "the loop came to set it while the work was waiting"


async def test_work_is_done_in_one_thread_with_the_number_of_threads_of_the_process(worker: TrainingThread) -> None:
    found = [await worker.run(lambda: (threading.get_ident(), torch.get_num_threads())) for _ in range(3)]
    assert len(set(found)) == 1
    assert found[0] != (threading.get_ident(), torch.get_num_threads())
    assert found[0][1] == torch.get_num_threads()


async def test_exceptions_of_work_are_raised(worker: TrainingThread) -> None:
    with pytest.raises(ZeroDivisionError):
        await worker.run(lambda: 1 / 0)


async def test_cancelled_work_has_ended_when_the_caller_is_notified(
    worker: TrainingThread,
) -> None:
    began, interrupted, over = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        interrupted.wait(HANG)
        over.set()

    task = asyncio.create_task(worker.run(work, interrupt=interrupted.set))
    while not began.is_set():
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert over.is_set()
