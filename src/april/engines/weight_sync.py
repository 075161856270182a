"""Weights of the replicas of a pool: updates of all replicas together, and recovery of lost replicas.

Invariants:
- a replica is READY only while it holds the pool's current weights;
- an update and a recovery never change weights at the same time;
- the pool's version changes only if every replica that is alive took the new weights.

States and transitions of a replica are in `member.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from april.engines.member import Member, ReplicaState
from april.engines.patience import within
from april.engines.replica import ReplicaGoneError
from april.engines.weight_transfer import Share, WithdrawnError, shares_of
from april.rollout.engine import EngineError

log = logging.getLogger(__name__)


class WeightSync:
    """Keeps the replicas of a pool on one version of the weights.

    Args:
        members: replicas of the pool; the pool may append to them.
        on_recovery: called when a recovery has ended: the replica is READY, STALE or DEAD.
        health_timeout: seconds that a health check may take.
        update_timeout: seconds that a replica may take to load weights.
        patience: seconds that an update waits while no replica can be updated.

    Attributes:
        version: of the weights that all READY replicas hold.
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

    async def update_all(self, version: int, weights: Any) -> None:
        """Update all replicas that are alive; wait for one if there is none. See `EnginePool.update_weights`."""
        deadline = asyncio.get_running_loop().time() + self._patience
        while True:
            # Cleared before the attempt, so that a recovery that ends during it is not missed.
            self._recovered.clear()
            if await self._update_alive(version, weights):
                return
            self.require_recoverable()
            try:
                async with asyncio.timeout_at(deadline):
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
            shares = shares_of(weights, len(targets))
            results = await asyncio.gather(
                *(self._load(member, version, share) for member, share in zip(targets, shares, strict=True)),
                return_exceptions=True,
            )
            for error in results:
                if isinstance(error, ValueError):  # there are no such weights: no replica has changed
                    raise error
            errors = [(m, e) for m, e in zip(targets, results, strict=True) if isinstance(e, BaseException)]
            # A replica that died during the update gets the new weights when it is back: it fails no update.
            died = [member for member, _ in errors if await self._lose_if_dead(member)]
            targets = [member for member in targets if member not in died]
            errors = [(member, error) for member, error in errors if member not in died]
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

    async def _find_if_alive(self, member: Member) -> None:
        """Take a replica that does not answer for lost before the update: an update waits only for those alive."""
        problem = None
        if member.ready:
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
            await within(self._health_timeout, member.replica.refresh())
        except TimeoutError:
            raise EngineError(f"it has not answered for {self._health_timeout:g} s") from None

    async def _load(self, member: Member, version: int, weights: Any) -> None:
        try:
            async with asyncio.timeout(self._update_timeout):
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
        lost = member.state is ReplicaState.LOST
        try:
            if lost:  # without the lock: an update must not wait until a server has started
                await self._refresh(member)
            async with self._lock:
                if member.ready:  # an update came first
                    return True
                if not lost:
                    await self._refresh(member)
                if self.updated:
                    await self._load(member, self.version, self._weights)
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

    def require_recoverable(self) -> None:
        """Raise EngineError if no replica will ever be ready again."""
        if all(member.state is ReplicaState.DEAD for member in self._members):
            raise EngineError(f"no replica is left: {self.problems()}")

    def problems(self) -> str:
        """Return why replicas are not ready, for a message."""
        return "; ".join(f"{member.name}: {member.reason}" for member in self._members if not member.ready)
