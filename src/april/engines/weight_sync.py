"""Weights of the replicas of a pool: updates of all replicas together, and recovery of lost replicas.

Invariants:
- a replica is READY only while it holds the pool's current weights;
- an update and a recovery never change weights at the same time;
- the pool's version changes only if every replica that is alive took the new weights;
- while the trainer has the devices (`device_turns.py`), nothing is loaded into a replica that comes back: it is put to
  sleep with the other replicas, and gets the weights with them;
- a replica that failed to sleep or to wake up is killed, because the memory that it holds is unknown.

States and transitions of a replica are in `member.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from april.engines.member import Member, ReplicaState
from april.engines.replica import ReplicaGoneError, SleepingReplica
from april.engines.weight_transfer import Share, WithdrawnError, again, shares_of
from april.rollout.engine import EngineError
from april.rollout.patience import patient_timeout

log = logging.getLogger(__name__)

RESTART_CHECK = 0.5
"""Seconds between two checks whether a replica has started."""


class NoReplicaError(EngineError):
    """All replicas died while the trainer had the devices: none can start before the trainer gives them back."""


class WeightSync:
    """Keeps the replicas of a pool on one version of the weights.

    Args:
        members: replicas of the pool; the pool may append to them.
        on_recovery: called when a recovery has ended: the replica is READY, STALE or DEAD.
        health_timeout: seconds that a health check may take.
        update_timeout: seconds that a replica may take to load weights.
        patience: seconds that an update waits while no replica can be updated.

    Attributes:
        version: version of the weights that all READY replicas hold.
        verify: checks a replica that serves with the current weights; raises EngineError if it computes another policy.
        updated: whether replicas were ever given weights, if only their version, as engines that share the trainer's
            parameters are.
    """

    def __init__(
        self,
        members: Sequence[Member],
        on_recovery: Callable[[], None],
        health_timeout: float,
        update_timeout: float,
        patience: float,
    ) -> None:
        self.version = 0
        self.updated = False
        self._members = members
        self._on_recovery = on_recovery
        self._health_timeout = health_timeout
        self._update_timeout = update_timeout
        self._patience = patience
        self._weights: Any = None
        self._lock = asyncio.Lock()
        """Held while weights change."""
        self._recovered = asyncio.Event()
        """Set when a recovery ends."""
        self._serving = asyncio.Event()
        """Cleared while the trainer has the devices."""
        self._serving.set()
        self.verify: Callable[[SleepingReplica], Awaitable[None]] | None = None

    async def update_all(self, version: int, weights: Any) -> None:
        """Update all replicas that are alive; wait for one if there is none. See `EnginePool.update_weights`."""
        deadline = asyncio.get_running_loop().time() + self._patience
        while True:
            # Cleared before the attempt, so that a recovery that ends during it is not missed.
            self._recovered.clear()
            if await self._update_alive(version, weights):
                return
            self.require_recoverable()
            if not self._serving.is_set():
                raise NoReplicaError(f"weights {version}: {self.problems()}")
            try:
                async with patient_timeout(max(deadline - asyncio.get_running_loop().time(), 0.0)):
                    await self._recovered.wait()
            except TimeoutError:
                seconds, problems = self._patience, self.problems()
                raise EngineError(f"weights {version}: no replica was ready for {seconds:g} s: {problems}") from None

    async def _update_alive(self, version: int, weights: Any) -> bool:
        """Update all replicas that are alive. Return False if there are none."""
        async with self._lock:
            await asyncio.gather(*(self._find_if_alive(member) for member in self._members))
            targets = [m for m in self._members if m.state in (ReplicaState.READY, ReplicaState.STALE)]
            if not targets:
                return False
            errors = await self._load_together(targets, version, weights)
            targets = [member for member in targets if member.state is not ReplicaState.LOST]
            if not targets:
                return False
            if not errors:
                self.version, self._weights, self.updated = version, weights, True
                for member in targets:
                    member.become(ReplicaState.READY)
                return True
            for member in targets:
                # Some replicas may hold the new weights already: none gets work before it has one known version.
                member.become(ReplicaState.STALE, f"the update to version {version} failed")
                # Without earlier weights there is nothing to load: the replica waits for the next update.
                if self.updated:
                    self.recover(member)
        failed = "; ".join(f"{member.name}: {error}" for member, error in errors)
        raise EngineError(f"not all replicas took up weights {version}; failed: {failed}") from errors[0][1]

    async def _load_together(self, members: Sequence[Member], version: int, weights: Any) -> list[tuple[Member, Any]]:
        """Load weights into replicas. Return the errors of those that are still alive.

        A transfer to several replicas fails for all of them if one dies: it is repeated for those that are left.

        Raises:
            ValueError: there are no such weights: no replica has changed.
        """
        while members:
            shares = shares_of(weights, len(members))
            results = await asyncio.gather(
                *(self._load(member, version, share) for member, share in zip(members, shares, strict=True)),
                return_exceptions=True,
            )
            for error in results:
                if isinstance(error, ValueError):
                    raise error
            errors = [(m, e) for m, e in zip(members, results, strict=True) if isinstance(e, BaseException)]
            # A replica that died during the update gets the new weights when it is back: it fails no update.
            died = [member for member, _ in errors if await self._lose_if_dead(member)]
            errors = [(member, error) for member, error in errors if member not in died]
            if not (errors and died):
                return errors
            log.warning("weights %d are sent again, without %s", version, " and ".join(m.name for m in died))
            members = [member for member in members if member not in died]
        return []

    async def _find_if_alive(self, member: Member) -> None:
        """Take a replica that does not answer for lost before the update: an update waits only for those alive."""
        problem = None
        if member.ready or (member.state is ReplicaState.STALE and not self._serving.is_set()):
            problem = await member.health_problem(self._health_timeout)
        elif member.state is ReplicaState.STALE:
            # A health check would compare its weights with the last ones that it took, and it may hold either version.
            try:
                await self._refresh(member)
            except (EngineError, TimeoutError) as error:
                problem = str(error) or type(error).__name__
        if problem is not None:
            self._lose(member, problem)

    async def _lose_if_dead(self, member: Member) -> bool:
        """Return whether the replica died; otherwise it refused the weights."""
        if (problem := await member.health_problem(self._health_timeout)) is None:
            return False
        self._lose(member, problem)
        return True

    def _lose(self, member: Member, problem: str) -> None:
        member.become(ReplicaState.LOST, problem)
        self.recover(member)

    async def _refresh(self, member: Member) -> None:
        try:
            async with patient_timeout(self._health_timeout):
                await member.replica.refresh()
        except TimeoutError:
            raise EngineError(f"it has not answered for {self._health_timeout:g} s") from None

    async def _load(self, member: Member, version: int, weights: Any) -> None:
        try:
            async with patient_timeout(self._update_timeout):
                await member.replica.update_weights(version, weights)
        except TimeoutError:
            raise EngineError(f"it took longer than {self._update_timeout:g} s") from None
        finally:
            # Also if it failed before it took its share: the transfer waits until each share is taken or released.
            if isinstance(weights, Share):
                weights.release()

    def recover(self, member: Member) -> None:
        """Bring a replica back in the background, with the current weights."""
        if member.recovery is None or member.recovery.done():
            member.recovery = asyncio.create_task(self._recover(member), name=f"recover {member.name}")

    def wake(self) -> None:
        """Try all recoveries at once: something has changed that they may have waited for."""
        for member in self._members:
            member.supervisor.wake()

    async def _recover(self, member: Member) -> None:
        """Try again, with back-off, until the replica is ready or nothing more can be done for it here."""
        # Recorded here, so that the first attempt waits for the back-off as well.
        if not member.ready:
            member.supervisor.died(member.reason)
        while not member.ready:
            await member.supervisor.back_off()
            if member.ready:  # an update came first
                break
            member.supervisor.starting()
            if await self._try_recovery(member):
                self._recovered.set()
                self._on_recovery()
                return
            member.supervisor.died(member.reason)
        self._recovered.set()
        self._on_recovery()

    async def _try_recovery(self, member: Member) -> bool:
        """Return whether the recovery has ended: the replica is READY, or DEAD, or has to wait for the next update."""
        await self._serving.wait()
        lost = member.state is ReplicaState.LOST
        try:
            if lost:  # without the lock: an update must not wait until a server has started
                async with member.refreshing:
                    if not self._serving.is_set():
                        return False
                    await self._refresh(member)
            async with self._lock:
                if member.ready:  # an update came first
                    return True
                if not self._serving.is_set():
                    return False
                if not lost:
                    await self._refresh(member)
                if self.updated:
                    await self._load(member, self.version, await again(self._weights))
                await self._verify(member)
                log.warning("%s is back, with weights %d", member.name, self.version)
                member.become(ReplicaState.READY)
        except ReplicaGoneError as error:
            member.become(ReplicaState.DEAD, str(error))
        except WithdrawnError as error:  # the next update brings weights that are there
            member.become(ReplicaState.STALE, str(error))
        except (EngineError, ValueError, TimeoutError) as error:
            member.reason = str(error) or type(error).__name__
            return False
        return True

    async def _verify(self, member: Member) -> None:
        if self.verify is not None and self.updated:
            await self.verify(sleeping(member))

    async def sleep(self) -> None:
        """Put all replicas to sleep that are alive; kill those that fail."""
        self._serving.clear()
        async with self._lock:
            await asyncio.gather(*(self._put_to_sleep(member) for member in self._members))

    async def _put_to_sleep(self, member: Member) -> None:
        async with member.refreshing:
            await self._release(member)

    async def _release(self, member: Member) -> None:
        if member.state is ReplicaState.DEAD:
            return
        lost = member.state is ReplicaState.LOST
        try:
            if lost:  # a server that has just started has not been brought back yet, but holds memory
                await self._refresh(member)
            await sleeping(member).sleep()
        except (EngineError, TimeoutError) as error:
            if not lost:
                self._lose(member, str(error) or type(error).__name__)
            await sleeping(member).kill()
        else:
            if lost:
                member.become(ReplicaState.STALE, "it was started while the trainer had the devices")

    async def wake_weights(self) -> None:
        """Allocate memory for weights on all replicas that are asleep.

        Raises:
            NoReplicaError: there is none.
        """
        await self._wake(lambda replica: replica.wake_weights())

    async def wake_kv_cache(self) -> None:
        """Make all replicas with the new weights serve, and verify them.

        A replica that computes another policy gets the weights again, and is restarted if that does not help.

        Raises:
            NoReplicaError: there is none.
            EngineError: no replica computes the trainer's policy.
        """
        awake = await self._wake(lambda replica: replica.wake_kv_cache())
        failed = [problem for problem in await asyncio.gather(*map(self._repair, awake)) if problem is not None]
        if len(failed) == len(awake):
            raise EngineError(failed[0])
        self._serving.set()

    @property
    def _asleep(self) -> list[Member]:
        return [member for member in self._members if member.state in (ReplicaState.READY, ReplicaState.STALE)]

    async def _wake(self, call: Callable[[SleepingReplica], Awaitable[None]]) -> list[Member]:
        """Call all replicas that are asleep, and return those that are left.

        Raises:
            NoReplicaError: there is none.
        """
        async with self._lock:
            members = self._asleep
            calls = (call(sleeping(member)) for member in members)
            for member, error in zip(members, await asyncio.gather(*calls, return_exceptions=True), strict=True):
                if isinstance(error, EngineError):
                    self._lose(member, str(error))
                    await sleeping(member).kill()
                elif error is not None:
                    raise error
        if not (awake := self._asleep):
            raise NoReplicaError(self.problems())
        return awake

    async def _repair(self, member: Member) -> str | None:
        """Verify a replica, after another update if need be. Return the problem if it was killed."""
        try:
            await self._verify(member)
        except EngineError as first:
            log.warning("%s; it gets the weights again", first)
        else:
            return None
        try:
            await self._load(member, self.version, await again(self._weights))
            await self._verify(member)
        except (EngineError, TimeoutError) as error:
            self._lose(member, str(error))
            await sleeping(member).kill()
            return str(error)
        return None

    async def restarted(self) -> None:
        """Wait until a replica was started again after all have died; it is put to sleep and updated next.

        Raises:
            EngineError: none was started in time, or none will ever be.
        """
        try:
            async with patient_timeout(self._patience):
                while not await self._any_started():
                    self.require_recoverable()
                    await asyncio.sleep(RESTART_CHECK)
        except TimeoutError:
            raise EngineError(f"no replica was started again in {self._patience:g} s: {self.problems()}") from None

    async def _any_started(self) -> bool:
        """Refresh lost replicas. Return whether one answers."""
        for member in self._members:
            try:
                if member.state is not ReplicaState.DEAD:
                    await self._refresh(member)
                    return True
            except ReplicaGoneError as error:
                member.become(ReplicaState.DEAD, str(error))
            except EngineError as error:
                member.reason = str(error)
        return False

    def require_recoverable(self) -> None:
        """Raise EngineError if no replica will ever be ready again."""
        if all(member.state is ReplicaState.DEAD for member in self._members):
            raise EngineError(f"no replica is left: {self.problems()}")

    def problems(self) -> str:
        """Return why replicas are not ready, for a message."""
        return "; ".join(f"{member.name}: {member.reason}" for member in self._members if not member.ready)


def sleeping(member: Member) -> SleepingReplica:
    """Return the replica of a member that can sleep."""
    assert isinstance(member.replica, SleepingReplica), f"{member.name} cannot release its memory"
    return member.replica
