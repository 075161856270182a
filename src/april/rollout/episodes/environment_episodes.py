"""Episodes with environments, which answer turns while generation continues.

Invariants:
- a sample that awaits its environment is not in the engine: it holds no slot, and neither generation nor an interrupt
  waits for an environment; a step of an environment continues during training, and is used when it has ended;
- an answer of an environment becomes one event, `Stepped`, for each turn of an attempt, and has no effect before that
  event;
- an environment lives from the beginning of its episode to its end. After a crash, a lost process or a failed turn, a
  new environment is made and brought to the latest turn of the episode;
- a failure affects only its own sample: `EpisodeLimits` decides its effect, and nothing is raised here;
- only an environment's own failure is put into an observation. After an error of april's, the group is left out.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from april.rollout.batch import Failure
from april.rollout.buffer import Buffer
from april.rollout.episodes.environment import (
    Bridge,
    CalledEnvironment,
    Environment,
    EnvironmentLost,
    EnvStep,
    Message,
    Observation,
    ObservationError,
    Saves,
    TokenIds,
    Turn,
    checked,
    checked_observation,
    environment_error,
    fingerprint,
    holds_images,
    saved,
)
from april.rollout.episodes.episodes import Answer, prompt_row
from april.rollout.events import Restarted, Stepped
from april.rollout.journal.journal_file import JournalError
from april.rollout.params import EpisodeLimits
from april.rollout.patience import patient_timeout
from april.rollout.sampling import FinishReason
from april.rollout.trajectory.features import Feature, PromptImages, expanded
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.sample import Sample
from april.rollout.trajectory.transition import Transition
from april.rollout.user_code.user_code import HangingError, Threads, UserCode, end_tasks

THREADS = 64
"""Environments without coroutines that work at a time in this process."""
CLOSE_SECONDS = 10.0
"""Seconds that an environment may take to close."""


class _Behind(NamedTuple):
    """What follows a turn, or a prompt: tokens with their images, or the reason that there are none."""

    token_ids: Sequence[int] = ()
    finish: FinishReason | None = None
    features: tuple[Feature, ...] = ()


class _Diverged(Exception):
    """An environment cannot be brought to the latest turn of its episode."""


ENVIRONMENT_ERRORS = (EnvironmentLost, ObservationError, TimeoutError)
"""Failures of environments. Any other exception of a turn is a fault of april's."""


@contextmanager
def _environment_code() -> Iterator[None]:
    """Raise each exception of an environment as one of `ENVIRONMENT_ERRORS`; april's own errors pass."""
    try:
        with UserCode():
            yield
    except (*ENVIRONMENT_ERRORS, HangingError):
        raise
    except Exception as error:
        raise ObservationError(environment_error(error)) from error


Kind = Literal["environment", "environment timeout", "environment lost", "environment restart"]


def _cause(error: Exception) -> tuple[Kind, str]:
    """Return the kind of failure, and the message of the error."""
    if isinstance(error, EnvironmentLost):
        return "environment lost", str(error)
    if isinstance(error, TimeoutError):
        return "environment timeout", str(error) or "the environment did not answer in time"
    return "environment", environment_error(error)


def _saves(environment: Environment) -> Saves:
    if not isinstance(environment, Saves):
        raise ObservationError('recovery = "snapshot": the environment has no state() and restore(state)')
    return environment


class EnvironmentEpisodes:
    """Open environments, and their steps in progress.

    `len` counts the samples whose environment is at work. `take` returns the answers since it was last called.

    Args:
        make: returns a new environment. One whose methods are coroutines runs on the event loop, any
            other in threads.
        bridge: converts between the text of environments and tokens.
        context_length: prompt and response tokens of a sample together.
        limits: time limits, and the handling of failures.
        row: returns the argument of `reset` for a prompt.
        let_go: called with each environment that an episode no longer needs, and the name of its sample.
        images: images of observations; None if the policy takes none.
        receive: returns an observation whose images are named by their sources; called in a thread.
    """

    def __init__(
        self,
        make: Callable[[], Environment],
        bridge: Bridge,
        context_length: int,
        limits: EpisodeLimits | None = None,
        row: Callable[[Prompt], dict[str, Any]] | None = None,
        let_go: Callable[[str, Environment], None] | None = None,
        images: PromptImages | None = None,
        receive: Callable[[Sequence[Message]], Sequence[Message]] | None = None,
    ) -> None:
        self.make = make
        self.bridge = bridge
        self.context_length = context_length
        self.limits = limits or EpisodeLimits()
        self.row = row or prompt_row
        self.let_go = let_go
        self.images = images
        self.receive = receive
        self._live: dict[str, Environment] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._answers: dict[str, Answer] = {}
        self._arrived = asyncio.Event()
        self._free = asyncio.Semaphore(self.limits.concurrency)
        self._threads = Threads(THREADS, "run environments in processes, which can be stopped (environment.workers)")

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def live(self) -> int:
        """Number of open environments."""
        return len(self._live)

    @property
    def decode(self) -> None:
        """Environments request no stop strings."""

    def apart(self) -> EnvironmentEpisodes:
        """Return episodes of the same kind for other samples, such as an evaluation's."""
        own = self.make, self.bridge, self.context_length, self.limits, self.row, self.let_go
        return EnvironmentEpisodes(*own, self.images, self.receive)

    def connect(self, buffer: Callable[[], Buffer]) -> None:
        """Do nothing: no request comes from outside."""

    def begin(self, sample: Sample, group: Group, durable: Callable[[], Any] | None = None) -> None:
        """Start the environment's step for a sample, unless it is in progress.

        Args:
            durable: awaited before the environment gets a turn, so that the turn is on disk before it acts.
        """
        assert sample.awaits_environment
        if sample.id not in self._tasks and sample.id not in self._answers:
            work = self._run(sample, group, durable)
            self._tasks[sample.id] = asyncio.create_task(work, name=f"environment {sample.id}")

    def take(self) -> list[Answer]:
        answers = list(self._answers.values())
        self._answers.clear()
        self._arrived.clear()
        return answers

    async def wait(self) -> None:
        """Wait until an answer has arrived that was not taken."""
        await self._arrived.wait()

    def drop(self, samples: Iterable[Sample]) -> None:
        """Discard the environments of samples that have ended."""
        for sample in samples:
            self._answers.pop(sample.id, None)
            if (task := self._tasks.pop(sample.id, None)) is not None:
                task.cancel()
            self._discard(sample.id)

    async def close(self) -> None:
        """End all steps of environments. Turns without an answer are answered after a restart."""
        await end_tasks(list(self._tasks.values()))
        self._tasks.clear()
        for id in list(self._live):
            self._discard(id)
        await asyncio.gather(*self._closing, return_exceptions=True)

    async def _run(self, sample: Sample, group: Group, durable: Callable[[], Any] | None) -> None:
        failures: list[Failure] = []
        try:
            if durable is not None:
                await durable()
            event = await self._event(sample, group, failures)
        except JournalError:  # the rollout loop gets the same error from the journal
            self._arrived.set()
            return
        finally:
            # `drop` may have removed this task already; a later task of the sample must stay.
            if self._tasks.get(sample.id) is asyncio.current_task():
                del self._tasks[sample.id]
        if event is None or isinstance(event, Restarted) or event.finish is not None:
            self._discard(sample.id)
        self._answers[sample.id] = Answer(sample, group, event, failures)
        self._arrived.set()

    async def _event(self, sample: Sample, group: Group, failures: list[Failure]) -> Stepped | Restarted | None:
        """Call the environment until it has answered, or `limits` allows no further attempt."""
        limits = self.limits

        def failed(kind: Kind, reason: str) -> None:
            failures.append(Failure(kind, sample.id, group.prompt.id, reason))

        attempt = 0
        while True:
            began = asyncio.get_running_loop().time()
            try:
                async with self._free:
                    environment = self._live.get(sample.id) or await self._brought(sample, group)
                    # Set again: the wait for a place and the recovery of the environment count towards no deadline.
                    began = asyncio.get_running_loop().time()
                    return await self._answered(environment, sample, group)
            except _Diverged as error:
                failed("environment restart", str(error))
                return Restarted(sample.id, str(error)) if sample.attempt < limits.max_restarts else None
            except ENVIRONMENT_ERRORS as error:
                seconds = asyncio.get_running_loop().time() - began
                kind, reason = _cause(error)
                failed(kind, reason)
                # With recovery `restart`, an environment that only raised is kept: a new one costs the whole episode.
                if kind != "environment" or limits.recovery != "restart" or not sample.transitions:
                    self._discard(sample.id)  # a new one is brought to the state before the turn
                if isinstance(error, EnvironmentLost) and not error.own:
                    # Another call ended the process: no attempt and no delay are charged, but other tasks have to run.
                    await asyncio.sleep(0)
                    continue
                # A turn that raised or timed out would likely fail again: only lost environments and resets are
                # retried.
                lost = isinstance(error, EnvironmentLost) or not sample.transitions
                if not lost or attempt >= limits.max_retries:
                    return self._given_up(sample, reason, seconds)
            except Exception as error:
                failed("environment", f"april failed: {environment_error(error)}")
                return None
            await asyncio.sleep(limits.retry_delay * 2**attempt)
            attempt += 1

    async def _answered(self, environment: Environment, sample: Sample, group: Group) -> Stepped:
        """Call the environment once, and return its answer as an event."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        if not sample.transitions:
            observation = await self._reset(environment, group)
            seconds = loop.time() - began
            behind = self._placed(sample, observation, lambda: self.bridge.begin(group.prompt, observation))
            return self._stepped(sample, behind, observation, seconds, await self._state(environment))
        timeouts = [
            seconds for seconds in (self.limits.step_timeout, self._seconds_left(sample)) if seconds is not None
        ]
        answer = await self._call(min(timeouts, default=None), environment.step, self._turn(sample, sample.turns))
        seconds = loop.time() - began
        step = await self._checked(answer)
        said = step.observation
        behind = _Behind(finish=FinishReason.DONE) if step.done else self._extended(sample, said)
        left = self._seconds_left(sample)
        if behind.finish is None and left is not None and seconds >= left:
            behind = _Behind(finish=FinishReason.DEADLINE)
        state = None if behind.finish else await self._state(environment)
        more = {"reward": step.reward, "done": step.done, "info": step.info}
        return self._stepped(sample, behind, said, seconds, state, **more)

    def _given_up(self, sample: Sample, reason: str, seconds: float) -> Stepped | None:
        """Return the event of a turn that failed in every attempt; None rejects the group."""
        if not sample.transitions or self.limits.on_error == "reject":
            return None
        said = f"Error: {reason}"
        behind = _Behind(finish=FinishReason.FAILED)
        left = self._seconds_left(sample)
        if left is not None and seconds >= left:
            # The deadline of the episode cut the call, so the episode is truncated: the environment did not fail.
            behind = _Behind(finish=FinishReason.DEADLINE)
        elif self.limits.on_error == "observe":
            with suppress(Exception):  # the bridge may fail on this text as well
                behind = self._extended(sample, said)
        return self._stepped(sample, behind, said, seconds, sample.state, failed=True)

    def _stepped(
        self,
        sample: Sample,
        behind: _Behind,
        said: Observation,
        seconds: float,
        state: Any,
        **more: Any,
    ) -> Stepped:
        begins = not sample.transitions
        turn = -1 if begins else sample.turns
        action = fingerprint("" if begins else TokenIds(sample.turn_ids(turn)))
        token_ids, observed = tuple(behind.token_ids), fingerprint(said)
        transition = Transition(sample.length, len(token_ids), observation=observed, seconds=round(seconds, 6), **more)
        return Stepped(sample.id, turn, action, token_ids, transition, behind.finish, state, behind.features)

    def _extended(self, sample: Sample, said: Observation) -> _Behind:
        """Return what follows a turn."""
        if sample.turns + 1 >= sample.sampling.max_turns:
            return _Behind(finish=FinishReason.TURNS)
        if sample.budget_left < 1:
            return _Behind(finish=FinishReason.LENGTH)
        return self._placed(sample, said, lambda: self.bridge.extend(sample, said))

    def _placed(self, sample: Sample, said: Observation, bridged: Callable[[], Sequence[int] | None]) -> _Behind:
        token_ids = said if isinstance(said, TokenIds) else bridged()
        if token_ids is None:
            return _Behind(finish=FinishReason.BRIDGE)
        before, features = len(sample.prompt_ids) + sample.length, tuple[Feature, ...]()
        if not isinstance(said, TokenIds):
            try:
                messages = () if isinstance(said, str) else said
                token_ids, features = expanded(token_ids, messages, self.images, before)
            except ValueError as error:
                raise ObservationError(f"an observation cannot be encoded: {' '.join(str(error).split())}") from None
        # Equality leaves no room for a token of the policy's next turn.
        if before + len(token_ids) >= self.context_length:
            return _Behind(finish=FinishReason.CONTEXT)
        if sample.transitions and sample.sampling.observations_count:
            left = sample.budget_left - len(token_ids)
            if left < 0:
                return _Behind(finish=FinishReason.LENGTH)
            return _Behind(token_ids, FinishReason.LENGTH if left == 0 else None, features)
        return _Behind(token_ids, None, features)

    def _turn(self, sample: Sample, index: int) -> Turn:
        token_ids = sample.turn_ids(index)
        said = self.bridge.read(token_ids)
        return Turn(sample.id, index, said.text, token_ids, said.message, sample.attempt)

    def _seconds_left(self, sample: Sample) -> float | None:
        if self.limits.deadline is None:
            return None
        return max(self.limits.deadline - sum(one.seconds for one in sample.transitions), 0.001)

    async def _brought(self, sample: Sample, group: Group) -> Environment:
        """Return a new environment, brought to the latest turn of the episode."""
        recovery = self.limits.recovery
        if sample.transitions and recovery == "restart":
            raise _Diverged("its environment is gone, and recovery is restart")
        with _environment_code():
            environment = self.make()
        # Before the environment is restored, so that a failure or a cancellation on the way still closes it.
        self._live[sample.id] = environment
        if not sample.transitions:
            return environment
        try:
            if recovery == "snapshot":
                await self._call(self.limits.reset_timeout, _saves(environment).restore, sample.state)
            else:
                await self._replay(environment, sample, group, turns=recovery == "replay")
        except (EnvironmentLost, _Diverged):
            raise
        # A recovery that was too slow is retried with a new environment; any other failure restarts the episode.
        except TimeoutError:
            raise EnvironmentLost(f"{recovery}: it took too long") from None
        except Exception as error:
            raise _Diverged(f"{recovery}: {_cause(error)[1]}") from error
        return environment

    async def _replay(self, environment: Environment, sample: Sample, group: Group, turns: bool) -> None:
        observation = await self._reset(environment, group)
        if not turns:
            return
        if fingerprint(observation) != sample.transitions[0].observation:
            raise _Diverged("replay: reset with the same seed said something else")
        for index, was in enumerate(sample.transitions[1:]):
            if was.failed:
                continue
            answer = await self._call(self.limits.step_timeout, environment.step, self._turn(sample, index))
            step = await self._checked(answer)
            if (fingerprint(step.observation), step.reward, step.done) != (was.observation, was.reward, was.done):
                raise _Diverged(f"replay: turn {index} was answered differently")

    async def _reset(self, environment: Environment, group: Group) -> Observation:
        row, limit = self.row(group.prompt), self.limits.reset_timeout
        observation = await self._received(await self._call(limit, environment.reset, row, group.environment_seed))
        with _environment_code():
            return checked_observation(observation)

    async def _checked(self, answer: Any) -> EnvStep:
        """Return an environment's answer as it is saved, with its images by their sources."""
        if isinstance(answer, EnvStep):
            answer = replace(answer, observation=await self._received(answer.observation))
        with _environment_code():
            return checked(answer)

    async def _received(self, observation: Any) -> Any:
        if self.receive is None or not holds_images(observation):
            return observation
        with _environment_code():
            return await asyncio.to_thread(self.receive, observation)

    async def _state(self, environment: Environment) -> Any:
        """Return the environment's state, to be saved with the answer; None unless episodes are recovered from it."""
        if self.limits.recovery != "snapshot":
            return None
        return saved(await self._call(self.limits.step_timeout, _saves(environment).state), "state()")

    async def _call(self, timeout: float | None, function: Callable[..., Any], *args: Any) -> Any:
        """Call a method of an environment, with a time limit in seconds."""
        # A called environment raises what its environment raised as one of ENVIRONMENT_ERRORS already.
        called = isinstance(getattr(function, "__self__", None), CalledEnvironment)
        with nullcontext() if called else _environment_code():
            if not inspect.iscoroutinefunction(function):
                return await self._threads.call(function, args, timeout)
            async with patient_timeout(timeout):
                with UserCode():
                    return await function(*args)

    def _discard(self, id: str) -> None:
        """Drop an environment, and close it in the background."""
        environment = self._live.pop(id, None)
        if environment is not None:
            if self.let_go is not None:
                self.let_go(id, environment)
            task = asyncio.create_task(self._close(environment), name=f"close environment {id}")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _close(self, environment: Environment) -> None:
        with suppress(Exception):
            await self._call(CLOSE_SECONDS, environment.close)
