"""Many replicas as one engine, with replicas whose every token follows from (seed, index)."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from april.engines.embedded import EmbeddedEngine
from april.engines.member import ReplicaState
from april.engines.pool import EnginePool
from april.engines.stream_engine import StreamEngine, Tokens
from april.engines.weight_transfer import WithdrawnError
from april.rollout.engine import Capacity, Chunk, EngineError, KVPolicy
from april.rollout.params import FaultSettings, RolloutParams
from april.rollout.sampling import SamplingParams
from april.rollout.scheduler import RolloutScheduler
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.sample import Sample
from april.rollout.wrapped_engine import WrappedEngine
from tests.engines import architectures
from tests.limits import HANG, NEVER
from tests.scheduling import scheduler_of

SLOTS = 4


def token_at(seed: int, index: int) -> int:
    return random.Random(seed * 1_000_003 + index).randrange(1000)


def length_of(seed: int, budget: int) -> int:
    return min(budget, 20 + int(random.Random(seed).paretovariate(0.9) * 3))


class Machine(StreamEngine):
    """A replica that can be killed, hung, made to fail, and restarted without its weights."""

    def __init__(self, name: str = "replica", slots: int = SLOTS) -> None:
        super().__init__(self._sample, Capacity(slots, 10_000))
        self.name = name
        self.version = 0
        self.on_update = "recompute"
        self.alive = True
        self.forgotten: list[str] = []
        self.served: set[str] = set()
        self.updates: list[int] = []
        self.refuses_update = False
        self.fault: str | None = None
        self.fails_each = 0
        """The first of this many requests fails."""
        self.requests = 0
        self.chance = 1.0
        self._rng = random.Random(name)
        self._resumed = asyncio.Event()
        self._resumed.set()

    def __repr__(self) -> str:
        return self.name

    async def _sample(self, sample: Sample) -> AsyncIterator[Tokens]:
        self.served.add(sample.id)
        self.requests += 1
        if self.fails_each and self.requests % self.fails_each == 1:
            raise RuntimeError("HTTP 500")
        index, length = sample.length, length_of(sample.seed, sample.sampling.max_tokens)
        seed = sample.seed
        while True:
            await asyncio.sleep(0)
            await self._resumed.wait()
            if not self.alive:
                raise ConnectionError("nobody answers")
            if self.fault and self._rng.random() < self.chance:
                raise RuntimeError(self.fault)
            tokens = [token_at(seed, i) for i in range(index, min(index + 2, length))]
            index += len(tokens)
            yield tokens, [-0.5] * len(tokens)
            if index == length:
                return

    async def abandon(self) -> list[Chunk]:
        return await self.interrupt()

    def hang(self) -> None:
        self._resumed.clear()

    def go_on(self) -> None:
        self._resumed.set()

    def restart(self) -> None:
        self.alive = True
        if self.updates:
            self.version = -1  # else it began with the weights that it has again
        self.go_on()

    async def check(self) -> None:
        await self._resumed.wait()
        if not self.alive:
            raise EngineError(f"{self.name} is dead")
        if self.version == -1:
            raise EngineError(f"{self.name} was restarted")

    async def refresh(self) -> None:
        await self._resumed.wait()
        if not self.alive:
            raise EngineError(f"{self.name} is dead")
        self.version = max(self.version, 0)

    async def update_weights(self, version: int, weights: Any = None) -> None:
        await self._resumed.wait()
        if not self.alive or self.refuses_update:
            raise EngineError(f"{self.name} does not take weights")
        assert not self.running, "weights changed under running samples"
        self.version = version
        self.updates.append(version)

    def forget(self, sample_ids: Any = None) -> None:
        self.forgotten.extend(sample_ids or ())


@asynccontextmanager
async def pool_of(*machines: Machine, **settings: Any) -> AsyncIterator[EnginePool]:
    limits = {"health_interval": 0.02, "health_timeout": 0.05, "update_timeout": 0.1, "patience": NEVER}
    pool = EnginePool(machines, **{**limits, **settings})
    try:
        yield pool
    finally:
        await pool.close()
    async with asyncio.timeout(HANG):  # a reward whose wait was cancelled runs on in its thread, and ends by itself
        while outlived := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(outlived)


def make_samples(n: int, budget: int = 400) -> list[Sample]:
    return [Group.start(i, Prompt((1, 2)), 1, SamplingParams(budget), 0).samples[0] for i in range(n)]


def check(sample: Sample) -> None:
    assert sample.response_ids == [token_at(sample.seed, i) for i in range(sample.length)]


async def run(pool: EnginePool, samples: list[Sample], until: int | None = None) -> None:
    by_id = {sample.id: sample for sample in samples}
    async with asyncio.timeout(HANG):
        while any(s.finish is None for s in samples) and (until is None or sum(s.length for s in samples) < until):
            for chunk in await pool.poll():
                sample = by_id[chunk.sample_id]
                sample.extend(chunk.token_ids, chunk.logprobs, chunk.version, chunk.finish)
                if chunk.error is not None:  # as the scheduler does, after a while
                    pool.submit(sample)


def absorb(chunks: list[Chunk], samples: list[Sample]) -> None:
    by_id = {sample.id: sample for sample in samples}
    for chunk in chunks:
        by_id[chunk.sample_id].extend(chunk.token_ids, chunk.logprobs, chunk.version, chunk.finish)


def submit(pool: EnginePool, samples: list[Sample]) -> None:
    for sample in samples:
        if sample.finish is None:
            pool.submit(sample)


def finished(samples: list[Sample]) -> bool:
    for sample in samples:
        check(sample)
    return all(sample.length == length_of(sample.seed, sample.sampling.max_tokens) for sample in samples)


async def test_capacity_is_that_of_all_replicas() -> None:
    async with pool_of(Machine(slots=3), Machine(slots=5)) as pool:
        assert pool.capacity == Capacity(8, 10_000, None)
        assert pool.running == 0
    with pytest.raises(ValueError, match="at least one replica"):
        EnginePool([])


async def test_samples_spread_by_share_of_slots() -> None:
    small, large = Machine("small", slots=2), Machine("large", slots=6)
    async with pool_of(small, large) as pool:
        samples = make_samples(8)
        submit(pool, samples)
        await run(pool, samples)
        assert (len(small.served), len(large.served)) == (2, 6)
        assert finished(samples)


@pytest.mark.parametrize("on_update", ["recompute", "keep"])
async def test_a_resumed_sample_returns_to_the_replica_with_its_prefix(on_update: str) -> None:
    machines = [Machine("a"), Machine("b")]
    for machine in machines:
        machine.on_update = on_update
    async with pool_of(*machines) as pool:
        samples = make_samples(8)
        submit(pool, samples)
        await run(pool, samples, until=20)
        absorb(await pool.interrupt(), samples)
        left = [sample for sample in samples if sample.finish is None]
        homes = {sample.id: next(m for m in machines if sample.id in m.served) for sample in left}
        assert len(left) >= 2
        submit(pool, left[::-1])
        await run(pool, samples)
        assert all([m.name for m in machines if s.id in m.served] == [homes[s.id].name] for s in left)
        assert not machines[0].forgotten
        assert finished(samples)


async def test_samples_return_to_local_engines_that_keep_caches_over_an_update() -> None:
    class Keeping(StreamEngine):
        on_update = "keep"

        def __init__(self) -> None:
            super().__init__(self._sample, Capacity(SLOTS, 10_000))
            self.served: list[str] = []

        async def _sample(self, sample: Sample) -> AsyncIterator[Tokens]:
            self.served.append(sample.id)
            while True:
                await asyncio.sleep(0)
                yield [1], [-0.5]

    engines = [Keeping(), Keeping()]
    pool = EnginePool(engines)
    samples = make_samples(4)
    submit(pool, samples)
    absorb(await pool.poll(), samples)
    absorb(await pool.interrupt(), samples)
    await pool.update_weights(1)
    submit(pool, samples[::-1])
    absorb(await pool.poll(), samples)
    absorb(await pool.interrupt(), samples)
    await pool.close()
    assert all(sorted(set(engine.served)) == sorted(engine.served[:2]) for engine in engines)


async def test_a_sample_that_crashes_replicas_is_quarantined_and_the_remaining_samples_are_trained_on() -> None:
    class Fragile(Machine):
        async def _sample(self, sample: Sample) -> AsyncIterator[Tokens]:
            if sample.prompt_ids == (1, 3):
                self.alive = False
                asyncio.get_running_loop().call_later(0.02, self.restart)
            async for tokens in super()._sample(sample):
                yield tokens

    machines = [Fragile("a", slots=64), Fragile("b", slots=64)]
    async with pool_of(*machines) as pool:
        rollouts = scheduler_of(
            pool,
            (Prompt((1, i)) for i in range(100)),
            lambda prompt, sample: 1.0,
            rollout_batch_size=6,
            over_sampling_batch_size=8,
            n_samples_per_prompt=1,
            sampling=SamplingParams(200),
            retry_delay=0.05,
            max_retries=1,
        )
        async with rollouts, asyncio.timeout(HANG):
            steps = [await rollouts.next_batch()]
            while not steps[-1].quarantined:
                await rollouts.update_weights()
                steps.append(await rollouts.next_batch())
        (quarantine,) = steps[-1].quarantined
        assert quarantine.group_id == 3
        assert "with this sample as the only suspect" in quarantine.error
        assert {id for step in steps for id, _ in step.rejections} == {3}
        assert all(len(step.groups) == 6 for step in steps)


async def test_replicas_that_die_of_every_request_are_an_outage_and_no_group_is_rejected() -> None:
    class Broken(Machine):
        async def _sample(self, sample: Sample) -> AsyncIterator[Tokens]:
            self.alive = False
            asyncio.get_running_loop().call_later(0.02, self.restart)
            raise ConnectionError("the server died")
            yield

    async with pool_of(Broken("a"), Broken("b")) as pool:
        rollouts = scheduler_of(
            pool,
            (Prompt((1, i)) for i in range(100)),
            lambda prompt, sample: 1.0,
            rollout_batch_size=2,
            n_samples_per_prompt=1,
            over_sampling_batch_size=3,
            retry_delay=0.01,
            max_retries=0,
            outage_limit=1.5,
        )
        async with rollouts:
            with pytest.raises(EngineError, match=r"answered no request for .*outage_limit"):
                await asyncio.wait_for(rollouts.next_batch(), HANG)
            assert len(rollouts.buffer) == 3


async def test_a_moved_sample_is_forgotten_by_its_former_replica() -> None:
    machines = [Machine("a", slots=8), Machine("b", slots=8)]
    async with pool_of(*machines, affinity=0.0) as pool:
        first = make_samples(1)
        submit(pool, first)
        await run(pool, first, until=1)
        absorb(await pool.interrupt(), first)
        others = make_samples(2)[1:]
        submit(pool, [*others, *first])
        assert pool.members[1].samples.keys() == {"0.0"}
        assert machines[0].forgotten == ["0.0"]


async def test_a_failing_replica_loses_no_token() -> None:
    bad, good = Machine("bad"), Machine("good")
    bad.fault, bad.chance = "HTTP 500", 0.3
    async with pool_of(bad, good) as pool:
        samples = make_samples(12)
        submit(pool, samples)
        await run(pool, samples)
        assert finished(samples)


@pytest.mark.parametrize("trouble", ["kill", "hang", "restart"])
async def test_a_replica_lost_in_mid_flight(trouble: str) -> None:
    victim, other = Machine("victim"), Machine("other")
    async with pool_of(victim, other) as pool:
        await pool.update_weights(1, "one")
        samples = make_samples(8)
        submit(pool, samples)
        await run(pool, samples, until=15)
        if trouble == "kill":
            victim.alive = False
        elif trouble == "hang":
            victim.hang()
        else:
            victim.version = -1
        if trouble == "restart":
            # Its tokens now come from other weights: it must be found out by its version, not by an error.
            while pool.members[0].ready:
                await asyncio.sleep(0.001)
        await run(pool, samples)
        assert finished(samples)
        assert {v for s in samples for v in s.versions} == {1}
        victim.restart()
        async with asyncio.timeout(HANG):
            while not pool.members[0].ready:
                await asyncio.sleep(0.01)
        assert victim.updates == [1, 1]
        victim.served.clear()
        more = make_samples(8)
        submit(pool, more)
        await run(pool, more)
        assert len(victim.served) >= 4


async def test_interrupt_while_a_replica_is_dying() -> None:
    victim, other = Machine("victim"), Machine("other")
    async with pool_of(victim, other) as pool:
        samples = make_samples(8)
        submit(pool, samples)
        await run(pool, samples, until=10)
        victim.alive = False
        await asyncio.sleep(0.001)
        absorb(await pool.interrupt(), samples)
        assert await pool.poll() == []
        submit(pool, samples)
        await run(pool, samples)
        assert finished(samples)


async def test_a_cancelled_interrupt_can_be_repeated() -> None:
    class Slow(Machine):
        async def interrupt(self, sample_ids: Any = None) -> list[Chunk]:
            await asyncio.sleep(0.01)
            return await super().interrupt(sample_ids)

    machines = [Slow("a"), Slow("b")]
    async with pool_of(*machines) as pool:
        samples = make_samples(8)
        submit(pool, samples)
        await run(pool, samples, until=20)
        interrupting = asyncio.create_task(pool.interrupt())
        await asyncio.sleep(0.001)
        interrupting.cancel()
        with suppress(asyncio.CancelledError):
            await interrupting
        absorb(await pool.interrupt(), samples)
        assert not any(machine.running for machine in machines)
        submit(pool, samples)
        await run(pool, samples)
        assert finished(samples)


async def test_an_unexpected_exception_of_a_replica_is_raised_without_a_hang() -> None:
    class Defective(Machine):
        async def poll(self) -> list[Chunk]:
            raise RuntimeError("out of memory")

    async with pool_of(Defective("defective"), Machine("other")) as pool:
        samples = make_samples(8)
        submit(pool, samples)
        with pytest.raises(RuntimeError, match="out of memory"):
            await asyncio.wait_for(run(pool, samples), HANG)
        await pool.interrupt()


async def test_samples_resume_after_the_last_replica_recovers() -> None:
    only = Machine("only")
    async with pool_of(only) as pool:
        samples = make_samples(4)
        submit(pool, samples)
        await run(pool, samples, until=5)
        only.alive = False
        asyncio.get_running_loop().call_later(0.3, only.restart)
        await run(pool, samples)
        assert finished(samples)


async def test_the_loss_of_all_replicas_is_an_error() -> None:
    machines = [Machine("a"), Machine("b")]
    async with pool_of(*machines, patience=0.3) as pool:
        samples = make_samples(4)
        submit(pool, samples)
        for machine in machines:
            machine.alive = False
        with pytest.raises(EngineError, match=r"no replica was ready for 0\.3 s: a: .*; b: "):
            await run(pool, samples)
        absorb(await pool.interrupt(), samples)
        for sample in samples:
            check(sample)


async def test_a_failed_request_is_reported_and_its_sample_moves_to_another_replica() -> None:
    bad, good = Machine("bad"), Machine("good")
    bad.fault = "cannot do this one"
    async with pool_of(bad, good) as pool:
        (sample,) = make_samples(1)
        pool.submit(sample)
        (chunk,) = await pool.poll()
        assert chunk.error is not None
        assert chunk.error.startswith("bad: ")
        assert "cannot do this one" in chunk.error
        assert await pool.poll() == []
        pool.submit(sample)
        await run(pool, [sample])
        assert finished([sample])
        assert good.served == {"0.0"}


async def test_failures_are_recorded_in_the_step_and_a_few_of_them_lose_no_replica() -> None:
    """5 % of the requests of one of two replicas fail, the first ones of a step at once."""
    bad, good = Machine("bad", slots=64), Machine("good", slots=64)
    bad.fails_each = 20
    async with pool_of(bad, good) as pool:
        rollouts = scheduler_of(
            pool,
            iter(lambda: Prompt((1, 2)), None),
            lambda prompt, sample: 1.0,
            rollout_batch_size=40,
            n_samples_per_prompt=4,
            sampling=SamplingParams(200),
            retry_delay=0.01,
        )
        async with rollouts:
            step = await rollouts.next_batch()
        assert len(step.failures) >= 4
        assert {failure.kind for failure in step.failures} == {"engine"}
        assert all(failure.error.startswith("bad: ") for failure in step.failures)
        assert all(member.ready for member in pool.members)


async def test_samples_of_an_evaluation_keep_their_names() -> None:
    async with pool_of(Machine("one"), Machine("other")) as pool:
        rollouts = scheduler_of(pool, iter(()), lambda prompt, sample: 1.0, rollout_batch_size=1)
        async with rollouts:
            groups = await rollouts.evaluate([Prompt((1, 2)), Prompt((3,))], 3, SamplingParams(40))
        assert all(group.complete for group in groups)


async def test_a_replica_that_fails_most_of_its_requests_is_lost() -> None:
    bad, good = Machine("bad"), Machine("good")
    bad.fault = "HTTP 500"
    async with pool_of(bad, good) as pool:
        samples = make_samples(24)
        submit(pool, samples)
        async with asyncio.timeout(HANG):
            while pool.members[0].ready:
                await pool.poll()
        assert "requests failed, the last with: " in pool.members[0].reason


async def test_an_update_fails_as_a_whole_and_is_undone() -> None:
    good, bad = Machine("good"), Machine("bad")
    async with pool_of(good, bad) as pool:
        await pool.update_weights(1, "one")
        bad.refuses_update = True
        with pytest.raises(EngineError, match="not all replicas took up weights 2; failed: bad: bad does not take"):
            await pool.update_weights(2, "two")
        assert pool.version == 1
        assert all(replica.state is ReplicaState.STALE for replica in pool.members)
        samples = make_samples(4)
        submit(pool, samples)
        await run(pool, samples)
        assert {v for s in samples for v in s.versions} == {1}
        assert good.updates == [1, 2, 1]
        bad.refuses_update = False
        await pool.update_weights(2, "two")
        assert (good.version, bad.version, pool.version) == (2, 2, 2)


async def test_a_failed_first_update_can_be_retried() -> None:
    good, bad = Machine("good"), Machine("bad")
    async with pool_of(good, bad) as pool:
        bad.refuses_update = True
        with pytest.raises(EngineError, match="failed: bad"):
            await pool.update_weights(1, "one")
        bad.refuses_update = False
        await pool.update_weights(1, "one")
        assert (good.version, bad.version) == (1, 1)


async def test_an_update_that_hangs_fails() -> None:
    good, hung = Machine("good"), Machine("hung")
    async with pool_of(good, hung) as pool:
        hung.check = good.check  # type: ignore[method-assign]
        hung.hang()
        with pytest.raises(EngineError, match=r"failed: hung: it took longer than 0\.1 s"):
            await pool.update_weights(1, "one")


async def test_a_hanging_update_ends_when_the_pool_fails() -> None:
    good, hung = Machine("good"), Machine("hung")
    pool = EnginePool([hung])
    hung.check = good.check  # type: ignore[method-assign]
    hung.hang()
    updating = asyncio.create_task(pool.update_weights(1, "one"))
    await asyncio.sleep(0)
    pool.fail(EngineError("the head hangs"))
    with pytest.raises(EngineError, match="the head hangs"):
        await asyncio.wait_for(updating, HANG)
    await pool.close()


async def test_a_replica_that_died_between_steps_does_not_stop_an_update() -> None:
    good, dead = Machine("good"), Machine("dead")
    async with pool_of(good, dead) as pool:
        dead.alive = False
        await pool.update_weights(1, "one")
        assert good.version == 1
        assert not pool.members[1].ready


@pytest.mark.parametrize("others", [0, 2])
async def test_a_replica_that_dies_during_an_update_does_not_stop_it(others: int) -> None:
    class Mortal(Machine):
        dies = False

        async def update_weights(self, version: int, weights: Any = None) -> None:
            self.alive, self.dies = self.alive and not self.dies, False
            await super().update_weights(version, weights)

    mortal, machines = Mortal("mortal"), [Machine(f"other {i}") for i in range(others)]
    async with pool_of(mortal, *machines) as pool:
        await pool.update_weights(1, "one")
        mortal.dies = True
        update = asyncio.create_task(pool.update_weights(2, "two"))
        while pool.members[0].state is not ReplicaState.LOST:
            await asyncio.sleep(0)
        mortal.restart()
        async with asyncio.timeout(HANG):
            await update
            while not pool.members[0].ready:
                await asyncio.sleep(0.01)
        assert {machine.version for machine in (mortal, *machines)} == {2}


async def test_an_added_replica_gets_current_weights_and_samples_and_lost_replicas_can_be_retried_at_once() -> None:
    first, second, late = Machine("first"), Machine("second"), Machine("late")
    async with pool_of(first, second) as pool:
        await pool.update_weights(1, "one")
        samples = make_samples(12)
        submit(pool, samples)
        late.alive = False
        pool.add(late)
        assert pool.capacity.slots == 3 * SLOTS
        while "dead" not in pool.members[2].reason:
            await asyncio.sleep(0.01)
        late.restart()
        async with asyncio.timeout(HANG):
            while not pool.members[2].ready:
                pool.wake()
                await asyncio.sleep(0.01)
        assert late.updates == [1]
        await run(pool, samples)
        pool.fail(EngineError("the head is gone"))
        submit(pool, make_samples(14)[12:])
        with pytest.raises(EngineError, match="the head is gone"):
            await pool.poll()


async def test_an_update_does_not_wait_for_a_lost_replica_that_is_being_started() -> None:
    class Slow(Machine):
        def __init__(self, name: str) -> None:
            super().__init__(name)
            self.starting, self.started = asyncio.Event(), asyncio.Event()

        async def refresh(self) -> None:
            self.starting.set()
            await self.started.wait()

    good, slow = Machine("good"), Slow("slow")
    async with pool_of(good, health_timeout=NEVER) as pool, asyncio.timeout(HANG):
        pool.add(slow)
        await slow.starting.wait()
        await pool.update_weights(1, "one")
        assert (good.version, pool.members[1].ready) == (1, False)
        slow.started.set()
        while not pool.members[1].ready:
            await asyncio.sleep(0)
        assert slow.updates == [1]


async def test_an_update_waits_for_replicas_that_are_all_lost() -> None:
    one, other = Machine("one"), Machine("other")
    async with pool_of(one, other) as pool:
        one.alive = other.alive = False
        update = asyncio.create_task(pool.update_weights(1, "one"))
        while any(replica.state is not ReplicaState.LOST for replica in pool.members):
            await asyncio.sleep(0)
        assert not update.done()
        one.restart()
        async with asyncio.timeout(HANG):
            await update
        assert one.version == pool.version == 1


async def test_an_update_fails_when_no_replica_recovers() -> None:
    one, other = Machine("one"), Machine("other")
    async with pool_of(one, other, patience=0.1) as pool:
        one.alive = other.alive = False
        with pytest.raises(EngineError, match=r"weights 1: no replica was ready for 0\.1 s: one: .*; other: "):
            await pool.update_weights(1, "one")
        assert pool.version == 0


async def test_a_sample_that_does_not_fit_is_refused_at_once() -> None:
    class Strict(Machine):
        def submit(self, sample: Sample) -> None:
            raise ValueError(f"sample {sample.id} does not fit")

    async with pool_of(Strict()) as pool:
        with pytest.raises(ValueError, match=r"sample 0\.0 does not fit"):
            pool.submit(make_samples(1)[0])
        assert await pool.poll() == []


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.sampled_from(["kill", "hang", "heal", "fail"]), max_size=6))
def test_steps_conserve_tokens_under_random_trouble(seed: int, troubles: list[str]) -> None:
    asyncio.run(steps_under_trouble(seed, troubles))


async def steps_under_trouble(seed: int, troubles: list[str]) -> None:
    rng = random.Random(seed)
    machines = [Machine(str(i)) for i in range(3)]

    def prompts() -> Iterator[Prompt]:
        while True:
            yield Prompt((1, 2))

    async def make_trouble() -> None:
        for trouble in troubles:
            await asyncio.sleep(rng.random() * 0.01)
            machine = machines[rng.randrange(1, 3)]
            if trouble == "kill":
                machine.alive = False
            elif trouble == "hang":
                machine.hang()
            elif trouble == "fail":
                machine.fault, machine.chance = "HTTP 500", 0.2
            else:
                machine.fault = None
                machine.restart()

    async with pool_of(*machines) as pool:
        rollouts = RolloutScheduler(
            pool,
            prompts(),
            lambda prompt, sample: 1.0,
            RolloutParams(rollout_batch_size=3, over_sampling_batch_size=6, n_samples_per_prompt=2),
            sampling=SamplingParams(200),
            faults=FaultSettings(max_retries=50, retry_delay=0.01),
            seed=seed % 1000,
        )
        trouble = asyncio.create_task(make_trouble())
        async with rollouts, asyncio.timeout(HANG):
            for version in range(3):
                while rollouts.engine_version < version:
                    # One that dies in mid-update fails it for all; the trainer tries again.
                    with suppress(EngineError):
                        await rollouts.update_weights(str(version))
                step = await rollouts.next_batch()
                rollouts.buffer.check()
                assert len(step.groups) == 3
                for group in step.groups:
                    assert finished(group.samples)
                for group in rollouts.buffer:
                    for sample in group.samples:
                        check(sample)
        await trouble


async def test_a_recovered_replica_gets_the_version_of_its_shared_weights() -> None:
    """Engines that share the trainer's parameters are given no weights, only their version."""
    first, second = Machine("first"), Machine("second")
    async with pool_of(first, second) as pool:
        await pool.update_weights(1)
        second.alive = False
        await pool.update_weights(2)
        assert second.version == 1
        second.restart()
        async with asyncio.timeout(HANG):
            while second.version != 2:
                await asyncio.sleep(0.01)
        assert second.updates == [1, 2]


async def test_a_replica_with_withdrawn_weights_recovers_at_the_next_update() -> None:
    class Withdrawn(Machine):
        async def update_weights(self, version: int, weights: Any = None) -> None:
            if weights == "gone":
                raise WithdrawnError("these weights are being trained on")
            await super().update_weights(version, weights)

    first, second = Machine("first"), Withdrawn("second")
    async with pool_of(first, second) as pool:
        second.alive = False
        await pool.update_weights(1, "gone")
        second.restart()
        async with asyncio.timeout(HANG):
            while pool.members[1].state is not ReplicaState.STALE:
                await asyncio.sleep(0.01)
        await pool.update_weights(2, "two")
        assert (first.version, second.version) == (2, 2)
        assert pool.members[1].ready


class Restarting(WrappedEngine):
    """An embedded engine that behaves like one in a separate process: it can be restarted with its initial model, of
    which the pool is not notified."""

    on_update: KVPolicy = "recompute"

    def __init__(self, name: str) -> None:
        super().__init__(self._fresh())
        self.name = name

    def _fresh(self) -> EmbeddedEngine:
        return EmbeddedEngine(architectures.model(), kv_cache_bytes=1 << 24, max_num_seqs=3)

    def restart(self) -> None:
        self.engine = self._fresh()

    async def check(self) -> None: ...

    async def refresh(self) -> None: ...

    async def abandon(self) -> list[Chunk]:
        return await self.engine.interrupt()


async def test_a_replica_restarted_with_old_weights_gets_no_samples_until_it_has_current_weights(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two real engines; one of them goes back to the weights it began with, between two steps."""
    policy = architectures.model()
    architectures.perturb(policy, 1)
    weights = dict(policy.state_dict())
    stays, restarts = Restarting("the one that stays"), Restarting("the one that restarts")
    prompts = (Prompt((1 + i % 20, 2, 3), str(i)) for i in itertools.count())
    async with pool_of(stays, restarts, health_interval=30.0, update_timeout=30.0) as pool:
        rollouts = scheduler_of(
            pool,
            prompts,
            lambda prompt, sample: 0.0,
            rollout_batch_size=4,
            n_samples_per_prompt=2,
            over_sampling_batch_size=8,
            sampling=SamplingParams(24),
        )
        async with rollouts:
            await rollouts.update_weights(weights)
            restarts.restart()
            for _ in range(3):
                step = await rollouts.next_batch()
                architectures.assert_behaviour(policy, [sample for group in step.groups for sample in group.samples])
            assert "tokens of policy version 0 came where it was given 1" in caplog.text
            while not all(member.ready for member in pool.members):
                await asyncio.sleep(0.01)
            assert restarts.engine.version == 1  # type: ignore[attr-defined]
