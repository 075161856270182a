"""Weights that are sent to several servers together.

Invariants:
- a transfer starts when every server's share has been taken or released, and reads the tensors once for all of them;
- the time limit of one server does not cancel the transfer to the others.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from april.engines.servers.client import FAILURES, describe
from april.engines.weight_transfer import Offer, Receiver, Sending, Share
from april.rollout.engine import EngineError


class JointTransfer(ABC):
    """Offers a learner's tensors to several servers, which receive them together."""

    def __init__(self) -> None:
        self._latest = Offer()

    def offer(self, version: int) -> Sending:
        self.withdraw()
        offer = self._latest = Offer()
        return SentTogether(lambda receivers: self.send(receivers, offer), self.after(version, offer))

    def withdraw(self) -> None:
        self._latest.withdraw()

    def after(self, version: int, offer: Offer) -> Callable[[], Awaitable[Any]] | None:
        """Return what `Sending.again` calls, if the weights cannot be sent after the update as they are in it."""
        return None

    @abstractmethod
    async def send(self, receivers: Sequence[Receiver], offer: Offer) -> None:
        """Send all tensors to these servers.

        Raises:
            EngineError: a server did not receive them, and the message names it.
            WithdrawnError: the tensors changed before or during the transfer.
        """
        ...


class SentTogether(Sending):
    """Weights of one version for several servers.

    Args:
        send: sends the weights to servers.
        after: returns the weights for a server that gets them after the update; None: they are sent.
    """

    def __init__(
        self,
        send: Callable[[Sequence[Receiver]], Awaitable[None]],
        after: Callable[[], Awaitable[Any]] | None = None,
    ) -> None:
        self._send = send
        self._after = after
        self._round: _Round | None = None

    def shares(self, count: int) -> Sequence[Share]:
        together = self._round = _Round(self._send, count, self._round)
        return [_Seat(together) for _ in range(count)]

    async def again(self) -> Any:
        return self if self._after is None else await self._after()


class _Round:
    """One transfer to several servers, which starts when every share has been taken or released.

    Args:
        before: the transfer of the same weights before this one; it is cancelled if all servers have given it up.
    """

    def __init__(
        self, send: Callable[[Sequence[Receiver]], Awaitable[None]], count: int, before: _Round | None = None
    ) -> None:
        self._send = send
        self._before = None if before is None else before._sending
        self._missing = count
        self._receivers: list[Receiver] = []
        self._complete = asyncio.Event()
        self._sending: asyncio.Future[None] | None = None

    def arrive(self, receiver: Receiver | None) -> None:
        """Record that a share was taken by `receiver`, or released."""
        self._missing -= 1
        if receiver is not None:
            self._receivers.append(receiver)
        if self._missing == 0 and self._receivers:
            self._sending = asyncio.ensure_future(self._run())
            self._complete.set()

    async def _run(self) -> None:
        if self._before is not None and not self._before.done():
            self._before.cancel()
            await asyncio.wait((self._before,))
        await self._send(self._receivers)

    async def sent(self) -> None:
        await self._complete.wait()
        assert self._sending is not None
        # Shielded: the time limit of one server must not cancel the transfer to all servers.
        await asyncio.shield(self._sending)


class _Seat(Share):
    def __init__(self, together: _Round) -> None:
        self._together = together
        self._settled = False

    async def take(self, receiver: Receiver) -> None:
        assert not self._settled, "a share is taken once"
        self._settled = True
        self._together.arrive(receiver)
        await self._together.sent()

    def release(self) -> None:
        if not self._settled:
            self._settled = True
            self._together.arrive(None)


async def all_receivers(receivers: Sequence[Receiver], call: Callable[[int, Receiver], Awaitable[Any]]) -> None:
    """Call all servers concurrently. The first failure cancels the other calls; the error names its server."""

    async def one(i: int, receiver: Receiver) -> None:
        try:
            await call(i, receiver)
        except FAILURES as error:
            raise EngineError(f"{receiver.name} did not receive weights: {describe(error)}") from error

    try:
        async with asyncio.TaskGroup() as group:
            for i, receiver in enumerate(receivers):
                group.create_task(one(i, receiver))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
