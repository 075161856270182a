"""The weights that the members of a pool hold: all go over to new ones together, and who was lost is brought back to
the current ones.

Invariants:
- a member is ready only while it holds the current weights;
- an update and a member that is brought back never touch weights at the same time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from april.engines.member import Member, State
from april.engines.replica import ReplicaGoneError
from april.engines.weight_transfer import Share, WithdrawnError, shares_of
from april.rollout.engine import EngineError

log = logging.getLogger(__name__)


class WeightSync:
    """Brings members to weights.

    Args:
        members: of the pool.
        came_back: called when a member is ready again, or will never be.
        health_timeout: seconds a member may take to say how it is.
        update_timeout: seconds a member may take to take up weights.
        patience: seconds to wait with no member to update.
    """

    def __init__(
        self,
        members: Sequence[Member],
        came_back: Callable[[], None],
        health_timeout: float,
        update_timeout: float,
        patience: float,
    ) -> None:
        self.version = 0
        self._members = members
        self._came_back = came_back
        self._health_timeout = health_timeout
        self._update_timeout = update_timeout
        self._patience = patience
        self._weights: Any = None
        self.updated = False
        """Members hold weights that they were given, if only by name: an engine may share the trainer's own."""
        self._updating = asyncio.Lock()

    async def update_all(self, version: int, weights: Any) -> None:
        """See `EnginePool.update_weights`."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._patience
        while not await self._update_reachable(version, weights):
            self.require_hope()
            if loop.time() >= until:
                raise EngineError(f"weights {version}: no replica was ready for {self._patience:g} s: {self.reasons()}")
            await asyncio.sleep(min(0.5, self._patience))

    async def _update_reachable(self, version: int, weights: Any) -> bool:
        """Whether there was a member to go over."""
        async with self._updating:
            await asyncio.gather(*(self._find_out(member) for member in self._members))
            targets = [member for member in self._members if member.state in (State.READY, State.STALE)]
            if not targets:
                return False
            shares = shares_of(weights, len(targets))
            results = await asyncio.gather(
                *(self._give(member, version, share) for member, share in zip(targets, shares, strict=True)),
                return_exceptions=True,
            )
            for error in results:
                if isinstance(error, ValueError):
                    raise error
            errors = [(m, e) for m, e in zip(targets, results, strict=True) if isinstance(e, BaseException)]
            died = [member for member, _ in errors if await self._has_died(member)]
            targets = [member for member in targets if member not in died]
            errors = [(member, error) for member, error in errors if member not in died]
            if not targets:
                return False
            if not errors:
                self.version, self._weights, self.updated = version, weights, True
                for member in targets:
                    member.become(State.READY)
                return True
            for member in targets:
                member.become(State.STALE, f"the update to version {version} failed")
                if self.updated:
                    self.bring_back(member)
        failed = "; ".join(f"{member.name}: {error}" for member, error in errors)
        raise EngineError(f"not all replicas took up weights {version}; failed: {failed}") from errors[0][1]

    async def _has_died(self, member: Member) -> bool:
        """Whether it was not the weights that an update failed on. Who died is brought back to what is current then."""
        if (trouble := await member.trouble(self._health_timeout)) is None:
            return False
        member.become(State.LOST, trouble)
        self.bring_back(member)
        return True

    async def _find_out(self, member: Member) -> None:
        """See whether an update can count on a member: it is ready, or torn and alive."""
        if member.ready:
            trouble = await member.trouble(self._health_timeout)
        elif member.state is State.STALE:
            trouble = await self._silence(member)
        else:
            return
        if trouble is not None:
            member.become(State.LOST, trouble)
            self.bring_back(member)

    async def _silence(self, member: Member) -> str | None:
        """Why a member cannot be learned about; None if it can."""
        try:
            await self._refresh(member)
        except (EngineError, TimeoutError) as error:
            return str(error) or type(error).__name__
        return None

    async def _refresh(self, member: Member) -> None:
        try:
            async with asyncio.timeout(self._health_timeout):
                await member.replica.refresh()
        except TimeoutError:
            raise EngineError(f"it has not answered for {self._health_timeout:g} s") from None

    async def _give(self, member: Member, version: int, weights: Any) -> None:
        try:
            async with asyncio.timeout(self._update_timeout):
                await member.replica.update_weights(version, weights)
        except TimeoutError:
            raise EngineError(f"it took longer than {self._update_timeout:g} s") from None
        finally:
            if isinstance(weights, Share):
                weights.let_go()

    def bring_back(self, member: Member) -> None:
        """Try in the background until it has the current weights, or is gone."""
        if member.revival is None or member.revival.done():
            member.revival = asyncio.create_task(self._revive(member), name=f"revive {member.name}")

    async def _revive(self, member: Member) -> None:
        member.supervisor.died(member.reason)
        while not member.ready:
            await member.supervisor.back_off()
            member.supervisor.starting()
            if await self._revived(member):
                self._came_back()
                return
            member.supervisor.died(member.reason)

    def wake(self) -> None:
        """Try at once to bring lost members back."""
        for member in self._members:
            member.supervisor.wake()

    async def _revived(self, member: Member) -> bool:
        """Whether the wait for a member is over: it is ready, or gone, or its weights are."""
        lost = member.state is State.LOST
        try:
            if lost:  # no update counts on it, so none waits for it to start
                await self._refresh(member)
            async with self._updating:
                if member.ready:
                    return False
                if not lost:
                    await self._refresh(member)
                if self.updated:
                    await self._give(member, self.version, self._weights)
                log.warning("%s is back, with weights %d", member.name, self.version)
                member.become(State.READY)
        except ReplicaGoneError as error:
            member.become(State.DEAD, str(error))
        except WithdrawnError as error:
            member.become(State.STALE, str(error))  # the next update counts on it
        except (EngineError, ValueError, TimeoutError) as error:
            member.reason = str(error) or type(error).__name__
            return False
        return True

    def require_hope(self) -> None:
        """Raises EngineError if no member will ever be ready again."""
        if all(member.state is State.DEAD for member in self._members):
            raise EngineError(f"no replica is left: {self.reasons()}")

    def reasons(self) -> str:
        """Why those who are not ready are not."""
        return "; ".join(f"{member.name}: {member.reason}" for member in self._members if not member.ready)
