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
        return SentTogether(lambda receivers: self.send(receivers, offer))

    def withdraw(self) -> None:
        self._latest.withdraw()

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
    """

    def __init__(self, send: Callable[[Sequence[Receiver]], Awaitable[None]]) -> None:
        self._send = send

    def shares(self, count: int) -> Sequence[Share]:
        together = _Round(self._send, count)
        return [_Seat(together) for _ in range(count)]


class _Round:
    """One transfer to several servers, which starts when every share has been taken or released."""

    def __init__(self, send: Callable[[Sequence[Receiver]], Awaitable[None]], count: int) -> None:
        self._send = send
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
            self._sending = asyncio.ensure_future(self._send(self._receivers))
            self._complete.set()

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
