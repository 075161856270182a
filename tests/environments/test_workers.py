"""Episodes whose environments live in worker processes, which die and hang."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from april import EnvironmentLost, FinishReason, RolloutBatch, RolloutScheduler
from april.environments.workers import EnvironmentWorkers
from april.rollout.params import EpisodeLimits
from tests.environments.worlds import Asynchronous, Fragile, Sturdy, missing, secret
from tests.rollout.test_episodes import build, check, run
from tests.talking import World


def one_step(make: Any, limits: EpisodeLimits | None = None, most: int = 2) -> tuple[RolloutBatch, RolloutScheduler]:
    async def collect() -> tuple[RolloutBatch, RolloutScheduler]:
        with EnvironmentWorkers(make, most) as workers:
            rollouts = build(World(), limits, make=workers, over_sampling_batch_size=3)
            (step,) = await run(rollouts, 1)
            assert workers.processes <= most
            return step, rollouts

    return asyncio.run(collect())


@pytest.mark.parametrize("make", [Sturdy, Asynchronous])
def test_an_environment_in_a_process_gives_the_same_answers(make: Any) -> None:
    step, _ = one_step(make)
    for group in step.groups:
        check(group)
    assert not step.failures


def test_environments_do_not_see_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "1")
    step, _ = one_step(secret, most=1)
    assert not step.failures


def test_a_process_that_dies_costs_no_episode(tmp_path: Path) -> None:
    """Lost environments are constructed again in another process, and restored to their state."""
    step, rollouts = one_step(partial(Fragile, tmp_path, "die", ("0.0/1", "1.1/0", "2.0/0")))
    for group in step.groups:
        check(group)
    assert {failure.kind for failure in step.failures} == {"environment lost"}
    assert any("exit code -9" in failure.error for failure in step.failures)
    assert rollouts.buffer.restarted.groups == 0


def test_a_step_that_hangs_costs_its_own_episode_alone(tmp_path: Path) -> None:
    limits = EpisodeLimits(step_timeout=4.0, on_error="end", retry_delay=0.0, max_retries=0)
    step, _ = one_step(partial(Fragile, tmp_path, "hang", ("0.0/0",)), limits, most=1)
    assert step.groups[0].samples[0].finish is FinishReason.FAILED
    for group in step.groups[1:]:
        check(group)
    kinds = [failure.kind for failure in step.failures]
    assert kinds.count("environment timeout") == 1


@pytest.mark.parametrize(("deed", "error"), [("exit", "SystemExit: 3"), ("no such tool", "RuntimeError: no such tool")])
def test_exceptions_of_an_environment_are_reported(tmp_path: Path, deed: str, error: str) -> None:
    step, _ = one_step(partial(Fragile, tmp_path, deed, ("0.0/0",)))
    assert [(f.kind, f.error) for f in step.failures] == [("environment", error)]


def test_an_environment_that_cannot_be_made_is_named() -> None:
    from april.rollout.episodes.episodes import EpisodeError

    with pytest.raises(EpisodeError, match="ImportError: no module of that name"):
        one_step(missing, EpisodeLimits(max_retries=0))


async def test_two_calls_given_up_in_the_same_moment_are_cancelled() -> None:
    """Both lived in the process that the first one ends."""
    with EnvironmentWorkers(Sturdy, 1) as workers:
        calls = [asyncio.ensure_future(workers().reset({}, 0)) for _ in range(2)]
        await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(outcome, asyncio.CancelledError | EnvironmentLost) for outcome in outcomes), outcomes
    assert isinstance(outcomes[0], asyncio.CancelledError)
