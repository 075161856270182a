"""Weight transfer from the trainer to servers over a process group (`weight_group.py`).

Invariants:
- the trainer is rank 0 of one group with all servers that are updated together, and sends each tensor once;
- tensors travel in buckets, one collective each, as the bytes of the tensors in the order of the announced names; wider
  types come first, so that each tensor is aligned;
- a group is left as soon as an update fails on it, or one of its servers has been restarted, and is never used again.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal
from urllib.parse import urlsplit

from torch import Tensor

from april.engines.servers import weight_group
from april.engines.servers.address import is_loopback
from april.engines.servers.sent_together import JointTransfer, all_receivers
from april.engines.weight_buckets import bucket_of, buckets_of, packed
from april.engines.weight_transfer import BUCKET_BYTES, Meeting, Offer, Receiver, TensorSource
from april.rollout.engine import EngineError

GROUP = "april_weights"


class Broadcast(JointTransfer):
    """Sends a learner's tensors to servers. Use one for the whole run: it keeps the process groups.

    Args:
        source: the policy's tensors.
        backend: gloo for tensors on the CPU, nccl for tensors on a GPU.
        address: where servers reach this process; None: the loopback interface if all of them are there, else the
            address of this machine from which the first one is reached.
        interface: the network interface that tensors take on this machine (`eth0`); None leaves it to the backend.
        timeout: seconds that a rendezvous with the servers, or sending a bucket, may take.
        bucket_bytes: bytes of tensors that are announced and sent together.
    """

    def __init__(
        self,
        source: TensorSource,
        backend: Literal["gloo", "nccl"] = "gloo",
        address: str | None = None,
        interface: str | None = None,
        timeout: float = 120.0,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        super().__init__()
        self.source = source
        self.meetings = 0
        """Number of groups made so far."""
        self._backend = backend
        self._address = address
        self._interface = interface
        self._timeout = timedelta(seconds=timeout)
        self._bucket_bytes = bucket_bytes
        self._groups: dict[tuple[tuple[str, int], ...], tuple[list[Meeting], Any]] = {}

    async def send(self, receivers: Sequence[Receiver], offer: Offer) -> None:
        """Send all tensors to these servers.

        Raises:
            EngineError: a server did not take part, and the message names it.
            WithdrawnError: the tensors changed before or during the transfer.
        """
        offer.require()
        key = tuple((receiver.url, receiver.life) for receiver in receivers)
        try:
            if key not in self._groups:
                self._groups[key] = await self._meet(receivers)
            meetings, group = self._groups[key]
            await all_receivers(receivers, lambda i, receiver: receiver.begin())
            buckets = buckets_of(self.source(), self._bucket_bytes)
            # In a thread: the source may copy or compute tensors, and must not block the event loop.
            while (tensors := await asyncio.to_thread(next, buckets, None)) is not None:
                await self._send_bucket(receivers, meetings, group, tensors)
            await all_receivers(receivers, lambda i, receiver: receiver.end())
        except BaseException:
            # After a failure, ranks may be at different buckets, and their next collectives would not match.
            await self._leave(key)
            raise
        # Check again: training may have changed the tensors while they were sent.
        offer.require()

    async def _leave(self, key: tuple[tuple[str, int], ...]) -> None:
        """Leave the group with these servers. In a thread: a hung server may delay it, and must not block the run."""
        if key in self._groups:
            _, group = self._groups.pop(key)
            await asyncio.shield(asyncio.to_thread(weight_group.leave, group))

    async def _send_bucket(
        self, receivers: Sequence[Receiver], meetings: list[Meeting], group: Any, tensors: list[tuple[str, Tensor]]
    ) -> None:
        bucket = bucket_of(tensors)
        own = [tensor for _, tensor in tensors]
        # Started before the calls, in a thread: the collective and the servers' calls wait for each other.
        sending = asyncio.create_task(asyncio.to_thread(_send, own, group, self._timeout))
        await _collective(sending, all_receivers(receivers, lambda i, receiver: receiver.receive(meetings[i], bucket)))

    async def _meet(self, receivers: Sequence[Receiver]) -> tuple[list[Meeting], Any]:
        """Make a group with these servers, and leave all other groups that contain one of them."""
        urls = {receiver.url for receiver in receivers}
        for key in [key for key in self._groups if urls & {url for url, _ in key}]:
            await self._leave(key)
        if self._backend == "nccl":
            await _require_nccl(receivers, weight_group.nccl_version())
        self.meetings += 1
        address = self._address or address_towards(sorted(urls))
        store = weight_group.listen(address, self._timeout)
        # Names must differ from meeting to meeting: torch knows groups by name.
        name = f"{GROUP}_{store.port}_{self.meetings}"
        world_size = 1 + sum(receiver.workers for receiver in receivers)
        own = Meeting(address, store.port, world_size, 0, name, self._backend)
        first = itertools.accumulate((receiver.workers for receiver in receivers), initial=1)
        meetings = [replace(own, first_rank=rank) for rank, _ in zip(first, receivers, strict=False)]
        # The backends take the interface from these variables alone, when a group is made.
        if self._interface:
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = self._interface
        joining = asyncio.create_task(asyncio.to_thread(weight_group.join, own, self._timeout, store))
        try:
            await _collective(joining, all_receivers(receivers, lambda i, receiver: receiver.join(meetings[i])))
        except BaseException:
            # The thread cannot be cancelled: if it does join later, free its group then.
            joining.add_done_callback(_leave_unused)
            raise
        return meetings, joining.result()


def _leave_unused(joining: asyncio.Task[Any]) -> None:
    if not joining.cancelled() and joining.exception() is None:
        weight_group.leave(joining.result())


async def _require_nccl(receivers: Sequence[Receiver], own: str) -> None:
    """Check that servers have the trainer's version of NCCL, which connects to no other version.

    Raises:
        EngineError: a server has another version.
    """
    found: dict[str, str | None] = {}

    async def ask(_: int, receiver: Receiver) -> None:
        found[receiver.name] = await receiver.nccl_version()

    await all_receivers(receivers, ask)
    for name, version in found.items():
        if version not in (None, own):
            raise EngineError(
                f"{name} has NCCL {version} and the trainer {own}, which do not connect: install the same version of "
                'torch in both environments, or set engine.weight_transfer = "disk"'
            )


def _send(tensors: Sequence[Tensor], group: Any, timeout: timedelta) -> None:
    weight_group.send(packed(tensors), group, timeout)


async def _collective(own: asyncio.Task[Any], theirs: Awaitable[None]) -> None:
    """Wait for the servers' part of a collective operation, and then for this process's part."""
    try:
        await theirs
    except BaseException:
        # Without the servers it runs into its timeout. Retrieve its exception, and do not wait for it.
        own.add_done_callback(lambda task: task.cancelled() or task.exception())
        raise
    await own


def address_towards(urls: Sequence[str]) -> str:
    """Return the address of this machine that servers at `urls` reach."""
    elsewhere = [parts for parts in map(urlsplit, urls) if not is_loopback(parts.hostname or "")]
    if not elsewhere:
        return "127.0.0.1"
    host, port = elsewhere[0].hostname, elsewhere[0].port or 80
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # a datagram socket: nothing is sent
        return str(probe.getsockname()[0])
