"""An engine with realistic costs: one pass gives each of at most `slots` requests one token, so that a tail of long
responses costs passes. It has no model: it compares a framework's loop with april's plug-in by the waits between engine
and trainer.

Every sample has a length that follows from its prompt and its place in the group, the same in every arm, log-normal
with a long tail. The first token of a response is its place, by which the engine recognises a resumed response.

The clock is the engine's: passes, including empty ones while a trainer trains (`train`). After a pass that ends a
response, the next pass waits until all threads of the framework are idle: a busy or slow machine gives the same result.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

from overlap_real import processor_seconds
from record import save, spread

N, GROUP, SLOTS = 8, 4, 64
"""Groups of a step, samples of a group, requests that an engine runs at a time."""
OVER = {f"{times}N": times * N for times in (2, 3, 4)}
"""Groups in flight, by the end of an arm's name."""
STEPS, WARM_UP = 14, 6
"""Steps of a run, and its first steps, which are not measured: the rest is whole batches of 4 N."""
TRAIN = (0, 60)
"""Passes that a training step takes, in turn."""
BOUND = 5
"""Staleness."""
LONGEST, MEDIAN, SIGMA = 256, 32, 1.0
"""Of a response, in tokens."""
QUIET = 0.001
"""Seconds between two looks at whether a thread has something to do."""
LOOKS = 2
"""Looks in a row that have to find none."""
FIRST = 10
"""The first token of a group's first response."""
END, OTHER = 1, 40
"""The end token, and every token between."""
LOGPROB = -1.0
"""Of every token."""


def length(prompt: Sequence[int], place: int, seed: int) -> int:
    """Of a response with its end token."""
    draw = random.Random(repr((tuple(prompt), place, seed)))
    return max(3, min(LONGEST, round(MEDIAN * draw.lognormvariate(0, SIGMA))))


def busy(pids: Iterable[int]) -> bool:
    """A thread of these processes runs, or would if the machine let it."""
    own = str(threading.get_native_id())
    for pid in pids:
        for task in os.listdir(f"/proc/{pid}/task"):
            try:
                file = os.open(f"/proc/{pid}/task/{task}/stat", os.O_RDONLY)
                said = os.read(file, 256)
                os.close(file)
            except (FileNotFoundError, ProcessLookupError):
                continue
            if said[said.rindex(b") ") + 2 :][:1] == b"R" and task != own:
                return True
    return False


@dataclass
class Response:
    """A sample, over all the requests that it takes."""

    length: int
    versions: list[int] = field(default_factory=list)
    """Of each token so far: how often the weights were new when it was drawn."""
    running: bool = False

    @property
    def whole(self) -> bool:
        return len(self.versions) == self.length


@dataclass
class Request:
    name: str
    response: Response
    place: int
    new: list[int] = field(default_factory=list)
    """Tokens that have not been taken yet."""
    reason: str | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Passes:
    """The engine.

    Args:
        prompt: tokens of every prompt.
        seed: seed of the lengths.
        slots: requests that a pass advances; further requests wait in order.
        seconds: minimum duration of a pass, for a framework that sleeps between two polls.
    """

    def __init__(self, prompt: int, seed: int = 0, slots: int = SLOTS, seconds: float = 0.0) -> None:
        self.prompt, self.seed, self.slots, self.seconds = prompt, seed, slots, seconds
        self.pids = [os.getpid()]
        """The framework's processes."""
        self.responses: dict[tuple[int, ...], list[Response]] = {}
        """By prompt, in the order of their places."""
        self.version = self.ticks = self.passes = self.lost = 0
        """New weights so far, passes with those that nothing ran in, passes, tokens drawn a second time."""
        self._until = 0
        self._trained = asyncio.Event()
        self._heard = False
        """Since all was quiet a client has asked for something, or has heard of an end."""
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def respond(
        self, name: str, ids: Sequence[int], interval: int = 1
    ) -> AsyncIterator[tuple[list[int], str | None]]:
        """Tokens as they come, `interval` at a time, and why the last is the last."""
        request = self._request(name, tuple(ids))
        self._waiting.append(request)
        self._go()
        try:
            while True:
                await request.changed.wait()
                request.changed.clear()
                if request.reason is None and len(request.new) < interval and len(request.response.versions) > 1:
                    continue
                new, request.new = request.new, []
                self._heard |= request.reason is not None
                yield new, request.reason
                if request.reason is not None:
                    return
        finally:
            self._end(request, "abort")

    def hear(self) -> None:
        """A client talks to the engine: the next pass, also an empty one, waits until the framework is idle."""
        self._heard = True

    def abort(self, names: Collection[str]) -> None:
        """End requests, each with the tokens that it has."""
        for request in [*self._running, *self._waiting]:
            if request.name in names:
                self._end(request, "abort")

    async def train(self, ticks: int) -> None:
        """Passes of a training step, during which the engine runs, or before it continues."""
        self._until = self.ticks + ticks
        if ticks:
            self._trained.clear()
            self._go()
            await self._trained.wait()

    def consumed(self, sequences: Iterable[Sequence[int]]) -> dict[str, Any]:
        """The samples of a step, prompt and response each, as a trainer gets them; new weights follow."""
        taken = []
        for ids in sequences:
            response = self.responses[tuple(ids[: self.prompt])][ids[self.prompt] - FIRST]
            assert len(ids) - self.prompt == response.length == len(response.versions), "not as long as planned"
            taken.append(response)
        ages = [self.version - version for response in taken for version in response.versions]
        whole = [group for group in self.responses.values() if len(group) == GROUP and all(r.whole for r in group)]
        return {
            "ticks": self.ticks,
            "unfinished": len(self.responses) - len(whole),
            "passes": self.passes,
            "lost": self.lost,
            "processor": sum(map(processor_seconds, self.pids)),
            "tokens": len(ages),
            "age": statistics.fmean(ages),
            "staleness": [self.version - response.versions[0] for response in taken],
        }

    def _request(self, name: str, ids: tuple[int, ...]) -> Request:
        prompt, drawn = ids[: self.prompt], ids[self.prompt :]
        group = self.responses.setdefault(prompt, [])
        if drawn:
            place = drawn[0] - FIRST
        else:  # a response without a delivered token starts again
            whole = len(group) == GROUP
            lost = (i for i, r in enumerate(group) if not r.running and (whole or not r.versions) and not r.whole)
            place = next(lost, len(group))
            assert place < GROUP, "more responses than a group has"
        if place == len(group):
            group.append(Response(length(prompt, place, self.seed)))
        response = group[place]
        assert not response.running, "a response is asked for twice at a time"
        self.lost += len(response.versions) - len(drawn)
        del response.versions[len(drawn) :]
        response.running = True
        return Request(name, response, place)

    def _end(self, request: Request, reason: str) -> None:
        if request.reason is None:
            request.reason = reason
            request.response.running = False
            for queue in (self._running, self._waiting):
                if request in queue:
                    queue.remove(request)
            request.changed.set()

    def _go(self) -> None:
        self._changed.set()
        self._heard = True
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="passes")

    async def _run(self) -> None:
        while True:
            while not (self._waiting or self._running or self.ticks < self._until):
                self._changed.clear()
                await self._changed.wait()
            await asyncio.sleep(self.seconds)
            quiet = 0 if self._heard else LOOKS
            while quiet < LOOKS:
                self._heard = False
                await asyncio.sleep(QUIET)
                quiet = 0 if self._heard or busy(self.pids) else quiet + 1
            self._pass()

    def _pass(self) -> None:
        while self._waiting and len(self._running) < self.slots:
            self._running.append(self._waiting.pop(0))
        if not self._running and self.ticks >= self._until:
            return
        self.ticks += 1
        if self.ticks == self._until:
            self._heard = True
            self._trained.set()
        self.passes += bool(self._running)
        for request in list(self._running):
            response = request.response
            number = len(response.versions) + 1
            response.versions.append(self.version)
            request.new.append(END if response.whole else OTHER if number > 1 else FIRST + request.place)
            if response.whole:
                self._end(request, "stop")
            request.changed.set()


Steps = list[dict[str, Any]]
"""`Passes.consumed` of each step of a run."""


def figures(steps: Steps) -> dict[str, float]:
    """Of the steps after the warm-up."""
    before, after, measured = steps[WARM_UP - 1], steps[-1], steps[WARM_UP:]
    tokens = sum(step["tokens"] for step in measured)
    staleness = [age for step in measured for age in step["staleness"]]
    return {
        "passes_per_step": (after["ticks"] - before["ticks"]) / len(measured),
        "consumed_tokens_per_pass": tokens / (after["ticks"] - before["ticks"]),
        "processor_ms_per_consumed_token": 1000 * (after["processor"] - before["processor"]) / tokens,
        "staleness_mean": statistics.fmean(staleness),
        "staleness_max": max(staleness),
        "token_age_mean": sum(step["age"] * step["tokens"] for step in measured) / tokens,
        "unfinished_groups": statistics.fmean(step["unfinished"] for step in measured),
        "tokens_drawn_again": after["lost"] - before["lost"],
        **({"samples_dropped": after["dropped"] - before["dropped"]} if "dropped" in after else {}),
    }


def beside(steps: Steps, train: int) -> Steps:
    """What a run, whose trainer and engine take turns, would be if a training step took `train` passes."""
    return [{**step, "ticks": step["ticks"] + train * number} for number, step in enumerate(steps)]


def report(
    script: str,
    runs: Mapping[str, Mapping[str, Sequence[Steps]]],
    bases: Iterable[str],
    variant: str = "",
    steps: int = STEPS,
) -> None:
    """Save the figures of every arm, by what a training step takes, and their ratios to each of the arms `bases`."""
    made: dict[str, Any] = {}
    for train, arms in runs.items():
        by_seed = {arm: [figures(steps) for steps in seeds] for arm, seeds in arms.items()}
        rate = {arm: [f["consumed_tokens_per_pass"] for f in seeds] for arm, seeds in by_seed.items()}
        made[train] = {
            "arms": {
                arm: {name: spread([f[name] for f in seeds]) for name in seeds[0]} for arm, seeds in by_seed.items()
            }
        }
        for base in rate.keys() & bases:
            made[train][f"over_{base}"] = {
                arm: spread([a / b for a, b in zip(rates, rate[base], strict=False)]) for arm, rates in rate.items()
            }
    settings = {"N": N, "G": GROUP, "slots": SLOTS, "steps": steps, "warm_up": WARM_UP, "bound": BOUND}
    lengths = {"longest": LONGEST, "median": MEDIAN, "sigma": SIGMA}
    save(script, {**settings, "lengths": lengths, "passes_of_a_training_step": made}, variant)


def measure(
    script: str,
    description: str | None,
    arms: str,
    run: Callable[[str, int, int], Steps],
    turns: Collection[str] = (),
    alike: Collection[str] = (),
    steps: int = STEPS,
) -> None:
    """Read the command line, run every arm, and save.

    Args:
        arms: by default, in their order.
        run: runs an arm with the given passes of a training step and the given seed.
        turns: arms whose trainer and engine take turns, with any bound.
        alike: arms that equal the synchronous one without training.
        steps: number of steps of a run.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--arms", default=arms)
    parser.add_argument("--over", default="synchronous", help="arms to which the others are compared, seed by seed")
    parser.add_argument("--variant", default="", help="end of the name of the file of figures")
    options = parser.parse_args()
    runs: dict[str, dict[str, list[Steps]]] = {}
    for seed in range(options.first, options.first + options.seeds):
        for arm in options.arms.split():
            for train in TRAIN[1:] if arm in alike else TRAIN:
                alternates = train and arm.partition("_bound")[0] in turns
                taken = beside(runs["0"][arm][-1], train) if alternates else run(arm, train, seed)
                runs.setdefault(str(train), {}).setdefault(arm, []).append(taken)
                print(seed, train, arm, figures(taken), flush=True)
            report(script, runs, options.over.split(), options.variant, steps)
