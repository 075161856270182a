"""User code that raises special exceptions, and user code that does not end when it is cancelled."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from april import EnvStep, FinishReason, Group, Prompt, RolloutScheduler, Sample, StreamEngine, TokenIds
from april.engines.stream_engine import Tokens
from april.environments.tools import BoundCall
from april.rollout.engine import Capacity
from april.rollout.episodes.environment import CalledEnvironment, ObservationError
from april.rollout.event_loop import EventLoop
from april.rollout.params import EpisodeLimits
from april.rollout.rewards import RewardError, RewardTasks
from april.rollout.sampling import SamplingParams
from april.rollout.user_code.user_code import UserCode, UserCodeError, in_one_line
from tests.limits import HANG
from tests.rollout.test_episodes import build, run
from tests.rollout.test_rewards import finished
from tests.scheduling import scheduler_of
from tests.scripted_engine import ScriptedEngine
from tests.talking import Room, World

KINDS = [
    asyncio.CancelledError,
    GeneratorExit,
    SystemExit,
    StopIteration,
    StopAsyncIteration,
    BaseException,
    BaseExceptionGroup,
    KeyError,
]
every_kind = pytest.mark.parametrize("kind", KINDS)


def raise_one(kind: type[BaseException]) -> Any:
    raise BaseExceptionGroup("several", [SystemExit(0)]) if kind is BaseExceptionGroup else kind(0)


def prompts() -> Iterator[Prompt]:
    return (Prompt((1, 2), str(number)) for number in itertools.count())


async def two_steps(rollouts: RolloutScheduler) -> list[Any]:
    async with asyncio.timeout(HANG):
        return await run(rollouts, 2)


def rollouts_of(reward: Any, engine: Any = None, **settings: Any) -> RolloutScheduler:
    defaults = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "sampling": SamplingParams(max_tokens=8)}
    return scheduler_of(engine or ScriptedEngine(), prompts(), reward, **{**defaults, **settings})


@every_kind
@pytest.mark.parametrize("way", ["async", "thread", "awaitable", "iterator"])
async def test_every_exception_of_a_reward_function_is_its_failure(kind: type[BaseException], way: str) -> None:
    async def of_event_loop(prompt: Prompt, sample: Sample) -> float:
        await asyncio.sleep(0)
        return float(raise_one(kind))

    class Rewards:
        def __iter__(self) -> Iterator[float]:
            return raise_one(kind)

    functions = {
        "async": of_event_loop,
        "thread": lambda prompt, sample: raise_one(kind),
        "awaitable": lambda prompt, sample: of_event_loop(prompt, sample),
        "iterator": lambda prompt, samples: Rewards(),
    }
    scope = "group" if way == "iterator" else "sample"
    steps = await two_steps(rollouts_of(functions[way], on_reward_error="zero", reward_scope=scope))
    assert all(sample.reward == 0.0 for step in steps for group in step.groups for sample in group.samples)
    name = "RuntimeError" if kind is StopIteration and way in ("async", "awaitable") else kind.__name__
    assert all(failure.kind == "reward" and name in failure.error for step in steps for failure in step.failures)
    with pytest.raises(RewardError, match=name):
        await two_steps(rollouts_of(functions[way], reward_scope=scope))


@every_kind
@pytest.mark.parametrize("on_event_loop", [True, False])
async def test_every_exception_of_an_environment_is_its_failure(kind: type[BaseException], on_event_loop: bool) -> None:
    class Asynchronous(Room):
        async def step(self, turn: Any) -> EnvStep:
            return raise_one(kind)

    class Plain:
        def reset(self, prompt: Any, seed: int) -> TokenIds:
            return TokenIds((5,))

        def step(self, turn: Any) -> EnvStep:
            return raise_one(kind)

        def close(self) -> None:
            raise_one(kind)

    world = World()
    make = (lambda: Asynchronous(world)) if on_event_loop else Plain
    limits = EpisodeLimits(on_error="end", retry_delay=0.0)
    steps = await two_steps(build(world, limits, make=make))
    finishes = {sample.finish for step in steps for group in step.groups for sample in group.samples}
    assert FinishReason.FAILED in finishes
    assert FinishReason.DONE not in finishes
    name = "RuntimeError" if kind is StopIteration and on_event_loop else kind.__name__
    failures = [failure for step in steps for failure in step.failures]
    assert failures
    assert all(failure.kind == "environment" and name in failure.error for failure in failures)


@every_kind
async def test_every_exception_of_a_tool_is_its_failure(kind: type[BaseException]) -> None:
    async def of_event_loop() -> str:
        return raise_one(kind)

    for function in (of_event_loop, lambda: raise_one(kind)):
        answer = await asyncio.wait_for(BoundCall("tool", function, {}).answer_async(), HANG)
        assert answer["content"].startswith("Error: tool failed: ")


@every_kind
async def test_every_exception_of_a_prompt_generator_is_its_failure(kind: type[BaseException]) -> None:
    failed: set[str] = set()

    async def generate(sample: Sample) -> AsyncIterator[Tokens]:
        for token in range(sample.length, 6):
            await asyncio.sleep(0)
            yield [token], [-1.0]
            if token == 2 and sample.id not in failed:
                failed.add(sample.id)
                raise_one(kind)

    async def reward(prompt: Prompt, sample: Sample) -> float:
        return 1.0

    engine = StreamEngine(generate, Capacity(4, 100))
    steps = await two_steps(rollouts_of(reward, engine, over_sampling_batch_size=2, retry_delay=0.0))
    responses = [sample.response_ids for step in steps for group in step.groups for sample in group.samples]
    assert responses == [[0, 1, 2, 3, 4, 5]] * 8
    assert {failure.kind for step in steps for failure in step.failures} == {"engine"}
    assert sum(len(step.failures) for step in steps) == 8


@every_kind
async def test_every_exception_of_a_filter_is_its_failure(kind: type[BaseException]) -> None:
    def first_fails(group: Group) -> bool:
        return bool(group.id > 0 or raise_one(kind))

    async def reward(prompt: Prompt, sample: Sample) -> float:
        return 1.0

    steps = await two_steps(rollouts_of(reward, dynamic_filter=first_fails, on_reward_error="reject"))
    assert [group.id for step in steps for group in step.groups if group.id == 0] == []
    (failure,) = [failure for step in steps for failure in step.failures]
    assert failure.kind == "filter"
    assert kind.__name__ in failure.error
    with pytest.raises(RewardError, match=f"dynamic filter failed on sample 0.0 of prompt '0'.*{kind.__name__}"):
        await two_steps(rollouts_of(reward, dynamic_filter=first_fails))


@pytest.mark.parametrize("kind", [asyncio.CancelledError, SystemExit])
async def test_prompts_that_fail_fail_the_step(kind: type[BaseException]) -> None:
    """A cancellation by user code would look like the end of the run."""

    class Prompts:
        def __iter__(self) -> Iterator[Prompt]:
            return self

        def __next__(self) -> Prompt:
            return raise_one(kind)

    async def reward(prompt: Prompt, sample: Sample) -> float:
        return 1.0

    params = {"rollout_batch_size": 1, "n_samples_per_prompt": 1}
    async with scheduler_of(ScriptedEngine(), Prompts(), reward, **params) as rollouts:
        with pytest.raises(UserCodeError, match=kind.__name__):
            await rollouts.next_batch()


async def test_a_cancellation_and_ctrl_c_pass_through() -> None:
    async def waits() -> None:
        with UserCode():
            await asyncio.sleep(1000)

    task = asyncio.create_task(waits())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(KeyboardInterrupt), UserCode():
        raise KeyboardInterrupt
    closed = asyncio.create_task(waits())
    await asyncio.sleep(0)
    coroutine: Any = closed.get_coro()
    coroutine.close()  # raises GeneratorExit in it, as the interpreter does with coroutines that are left over
    closed.cancel()
    await asyncio.gather(closed, return_exceptions=True)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (KeyError("a"), "KeyError: 'a'"),
        (TimeoutError(), "TimeoutError"),
        (ValueError("two\nlines"), "ValueError: two lines"),
        (ValueError("half \ud83d"), "ValueError: half \ufffd"),
        (Unprintable(), "Unprintable: its message cannot be shown (RuntimeError)"),
    ],
)
def test_an_error_of_user_code_is_one_encodable_line(error: Exception, line: str) -> None:
    assert in_one_line(error) == line


def test_a_task_that_exits_does_not_end_the_event_loop() -> None:
    async def exits() -> None:
        async def child() -> None:
            sys.exit(0)

        with UserCode():
            await asyncio.create_task(child())

    with EventLoop() as loop:
        with pytest.raises(UserCodeError, match="SystemExit"):
            loop.run(exits())
        assert loop.run(asyncio.sleep(0, "alive")) == "alive"


async def test_endless_rewards_are_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    released = asyncio.Event()

    async def stubborn(prompt: Prompt, sample: Sample) -> float:
        try:
            await asyncio.sleep(1000)
        finally:
            await released.wait()
        return 1.0

    monkeypatch.setattr("april.rollout.user_code.user_code.end_tasks.__defaults__", (0.05,))
    tasks = RewardTasks(stubborn)
    group = finished(0)
    tasks.finished(group, group.samples[0])
    while not tasks:
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    async with asyncio.timeout(HANG):
        await tasks.close()
    assert not tasks
    released.set()


async def test_an_error_of_april_is_never_an_observation() -> None:
    """Neither one of the line to an environment that lives elsewhere, nor one of a bridge."""

    class Away(CalledEnvironment):
        def __init__(self, room: Room) -> None:
            self.room = room

        async def close(self) -> None:
            await self.room.close()

        async def _call(self, method: str, *args: Any) -> Any:
            if method == "step" and args[0].key == "0.0/0":
                raise KeyError(5)
            if method == "step" and args[0].key == "0.1/0":
                raise ObservationError("ValueError: no such move")
            return await getattr(self.room, method)(*args)

    world = World()
    rollouts = build(world, EpisodeLimits(on_error="observe", retry_delay=0.0), make=lambda: Away(world()))
    steps = await two_steps(rollouts)
    errors = {failure.sample_id: failure.error for step in steps for failure in step.failures}
    assert errors["0.0"] == "april failed: KeyError: 5"
    assert errors["0.1"] == "ValueError: no such move"
    assert [(quarantine.group_id, quarantine.reason) for step in steps for quarantine in step.quarantined] == [
        (0, "environment")
    ]
    assert all(group.id != 0 for step in steps for group in step.groups)
