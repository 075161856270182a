"""What user code gives is checked and copied when it arrives, so that it can be saved at any later time."""

from __future__ import annotations

import itertools
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from april import EnvStep, Prompt, Reward, RolloutBatch, Sample, SamplingParams, TokenIds
from april.rollout.events import Stepped
from april.rollout.journal.journal import Journal
from april.rollout.journal.journal_file import JournalError
from april.rollout.json_types import json_types
from april.rollout.params import EpisodeLimits
from april.rollout.rewards import RewardError
from april.rollout.trajectory.transition import Transition
from tests.rollout.test_episodes import build, run
from tests.scheduling import scheduler_of
from tests.scripted_engine import ScriptedEngine
from tests.talking import World


class Colour(StrEnum):
    RED = "red"


def endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "an integer of 400 digits": (lambda: {"n": 10**400}, r"\['n'\] is an integer beyond"),
    "an integer of 5000 digits": (lambda: {"n": [10**5000]}, r"\['n'\]\[0\] is an integer beyond"),
    "a set": (lambda: {"seen": {1}}, r"\['seen'\] is a set"),
    "NaN": (lambda: {"kl": float("nan")}, r"\['kl'\] is nan"),
    "NaN of NumPy": (lambda: {"kl": np.float32("nan")}, r"\['kl'\] is nan"),
    "infinity in an array": (lambda: {"kl": np.array([1.0, np.inf])}, r"\['kl'\]\[1\] is inf"),
    "bytes": (lambda: {"image": b"x"}, r"\['image'\] is a bytes"),
    "a key that is a number": (lambda: {1: "a"}, r"has the key 1"),
    "a key that is a tuple": (lambda: {"by": {(1, 2): "a"}}, r"\['by'\] has the key \(1, 2\)"),
    "an object": (lambda: {"model": object()}, r"\['model'\] is a object"),
    "a list that contains itself": (lambda: {"self": endless()}, "contains itself"),
    "a list of 200 levels": (lambda: {"deep": json.loads("[" * 200 + "]" * 200)}, "more than 100 levels"),
}
refused = pytest.mark.parametrize(("make", "part"), REFUSED.values(), ids=REFUSED)


@refused
def test_other_kinds_are_refused_by_name(make: Callable[[], Any], part: str) -> None:
    with pytest.raises(ValueError, match=f"^metadata.*{part}"):
        json_types(make(), "metadata")


def test_json_types_are_copied() -> None:
    given = OrderedDict(a=(1, 2.5, None, True), b=Colour.RED, c=np.arange(2), d=torch.tensor(1.5), e={"f": "x\ud83d"})
    copy = json_types(given, "metadata")
    assert copy == {"a": [1, 2.5, None, True], "b": "red", "c": [0, 1], "d": 1.5, "e": {"f": "x\ufffd"}}
    assert json.loads(json.dumps(copy)) == copy
    assert type(copy["b"]) is str
    given["e"]["f"] = "changed"
    assert copy["e"]["f"] == "x\ufffd"


def prompts(metadata: Callable[[int], Any]) -> Iterator[Prompt]:
    return (Prompt((1, 2), str(number), metadata(number)) for number in itertools.count())


def rollouts_of(reward: Any, journal: Journal | None = None, metadata: Any = lambda _: {}, **settings: Any) -> Any:
    size = {"rollout_batch_size": 2, "over_sampling_batch_size": 3, "n_samples_per_prompt": 2}
    sampling = SamplingParams(max_tokens=8)
    return scheduler_of(
        ScriptedEngine(), prompts(metadata), reward, sampling=sampling, journal=journal, **size, **settings
    )


def journal_in(folder: Path, delay: float = 0.0) -> Journal:
    journal = Journal(folder / "journal", delay)
    journal.seek(None)
    return journal


@refused
async def test_a_reward_s_info_is_a_failure_of_the_reward(make: Callable[[], Any], part: str, tmp_path: Path) -> None:
    async def reward(prompt: Prompt, sample: Sample) -> Reward:
        return Reward(1.0, make() if prompt.id == "0" else {"length": sample.length})

    journal = journal_in(tmp_path)
    steps = await run(rollouts_of(reward, journal, on_reward_error="zero"), 2)
    journal.close()
    failures = [failure for step in steps for failure in step.failures]
    assert len(failures) == 2
    assert all(failure.error.startswith("ValueError: the reward's info") for failure in failures)
    with pytest.raises(RewardError, match=part):
        await run(rollouts_of(reward), 1)


@refused
async def test_an_environment_s_info_is_a_failure_of_the_environment(make: Callable[[], Any], part: str) -> None:
    world = World()

    class Odd(type(world())):  # type: ignore[misc]
        async def step(self, turn: Any) -> EnvStep:
            return EnvStep(TokenIds((5,)), 1.0, False, make())

    steps = await run(build(world, EpisodeLimits(on_error="end", retry_delay=0.0), make=lambda: Odd(world)), 1)
    (failure, *_) = steps[0].failures
    assert failure.kind == "environment"
    assert failure.error.startswith("info must be JSON types")


@pytest.mark.parametrize(
    "answer",
    [
        EnvStep(TokenIds((5,)), 10**400),
        EnvStep(TokenIds((5,)), None),  # type: ignore[arg-type]
        EnvStep(TokenIds((5,)), np.array([1.0, 2.0])),  # type: ignore[arg-type]
        EnvStep(TokenIds((5,)), 1.0, np.array([True, False])),  # type: ignore[arg-type]
        EnvStep(TokenIds((5,)), info=None),  # type: ignore[arg-type]
        EnvStep(TokenIds((2**31,))),
        EnvStep([{"role": "user", "content": {1}}]),
    ],
)
async def test_an_invalid_answer_is_a_failure_of_the_environment(answer: EnvStep) -> None:
    world = World()

    class Odd(type(world())):  # type: ignore[misc]
        async def step(self, turn: Any) -> EnvStep:
            return answer

    steps = await run(build(world, EpisodeLimits(on_error="end", retry_delay=0.0), make=lambda: Odd(world)), 1)
    assert steps[0].failures
    assert all("april failed" not in failure.error for failure in steps[0].failures)


@refused
async def test_metadata_that_cannot_be_saved_is_refused_when_the_prompt_is_admitted(
    make: Callable[[], Any], part: str, tmp_path: Path
) -> None:
    async def reward(prompt: Prompt, sample: Sample) -> float:
        return 1.0

    journal = journal_in(tmp_path)
    async with rollouts_of(reward, journal, lambda number: make() if number == 1 else {}) as rollouts:
        with pytest.raises(ValueError, match=f"prompt '1': metadata.*{part}"):
            await rollouts.next_batch()
        await rollouts.next_batch()  # without that prompt
    journal.close()


async def test_a_reward_function_that_changes_a_record_breaks_neither_journal_nor_checkpoint(tmp_path: Path) -> None:
    """It runs in threads, and the journal is written while it does."""
    lock = threading.Lock()

    def reward(prompt: Prompt, sample: Sample) -> float:
        with lock:
            prompt.metadata["record"]["seen"] = {sample.id}
            prompt.metadata["again"] = object()  # type: ignore[index]
        return 1.0

    journal = journal_in(tmp_path, delay=60.0)  # nothing is written before the records are changed
    async with rollouts_of(reward, journal, lambda number: {"record": {"answer": number}}) as rollouts:
        for _ in range(2):
            await rollouts.next_batch()
            await rollouts.update_weights()
        state = rollouts.state_dict()
    journal.close()
    json.dumps(state, allow_nan=False)
    saved = [group["prompt"] for group in state["state"]["buffer"]["groups"]]
    assert [prompt["metadata"] for prompt in saved] == [{"record": {"answer": int(prompt["id"])}} for prompt in saved]
    journal = journal_in(tmp_path)
    assert list(journal.replay())
    journal.close()


async def test_enormous_numbers_in_the_info_of_a_reward_are_metrics() -> None:
    async def reward(prompt: Prompt, sample: Sample) -> Reward:
        return Reward(1.0, {"size": 1.7e308})

    steps: list[RolloutBatch] = await run(rollouts_of(reward), 1)
    assert steps[0].reward_metrics == {"reward/size": float("inf")}


def test_only_a_full_disk_is_reported_as_full(tmp_path: Path) -> None:
    journal = journal_in(tmp_path)
    journal.record(Stepped("0.0", 0, "", (), Transition(0, 0, info={"seen": {1}})))
    with pytest.raises(JournalError, match=r"TypeError: .*set.*the disk works") as raised:
        journal.flush()
    assert "make room" not in str(raised.value)
    journal.close()


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, lambda ids: tuple(np.array(ids))])
async def test_a_prompt_s_token_ids_may_be_any_sequence_of_integers(kind: Any) -> None:
    given = (Prompt(kind([1, 2]), str(number)) for number in itertools.count())
    rollouts = scheduler_of(ScriptedEngine(), given, lambda *_: 1.0, rollout_batch_size=1, n_samples_per_prompt=2)
    [step] = await run(rollouts, 1)
    assert [group.prompt.token_ids for group in step.groups] == [(1, 2)]
    assert {type(token) for group in step.groups for token in group.prompt.token_ids} == {int}


@pytest.mark.parametrize(
    ("prompt", "wrong"),
    [
        ("text", "prompts must be april.Prompt objects, not 'text'"),
        (Prompt((1, -2), "p"), "prompt 'p': token id -2 is negative"),
        (Prompt([1.5], "p"), "prompt 'p': token ids must be 31-bit integers"),  # type: ignore[arg-type]
        (Prompt("12", "p"), "prompt 'p': token ids must be 31-bit integers"),  # type: ignore[arg-type]
    ],
)
async def test_an_invalid_prompt_is_refused_by_name(prompt: Any, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        await run(scheduler_of(ScriptedEngine(), iter([prompt]), lambda *_: 1.0, rollout_batch_size=1), 1)
