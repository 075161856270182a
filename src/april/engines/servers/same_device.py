"""Weight transfer from the trainer to servers on the same GPUs, which read the trainer's memory (`cuda_ipc.py`).

Invariants:
- in addition to the trainer's tensors, each GPU holds one packed bucket, and one that a server has not released yet;
- a bucket's memory is used again only when all servers have read it: torch counts the readers of a handle;
- a server reads only memory of its own GPUs, and each of them has a rank of the trainer;
- nothing is exported after an update: other servers fill the GPUs then. A server that comes back loads from disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import suppress
from pathlib import Path

from april.engines.servers.sent_together import JointTransfer, all_receivers
from april.engines.weight_transfer import Exported, Offer, OnDisk, Receiver
from april.rollout.engine import EngineError

Exports = Callable[[], Generator[Exported, None, None]]
"""Yields the policy's tensors in buckets on the trainer's GPUs. A bucket was read when the next one is asked for."""


class SameDevice(JointTransfer):
    """Offers a learner's tensors to servers on its GPUs.

    Args:
        exports: the policy's tensors.
        disk: the same weights for servers that come back between two updates.
    """

    def __init__(self, exports: Exports, disk: OnDisk) -> None:
        super().__init__()
        self._exports = exports
        self._disk = disk

    def after(self, version: int, offer: Offer) -> Callable[[], Awaitable[Path]]:
        return Stored(self._disk, version, offer)

    async def send(self, receivers: Sequence[Receiver], offer: Offer) -> None:
        """Have these servers read all tensors.

        Raises:
            EngineError: a server did not read them, or is on other GPUs; the message names it.
            WithdrawnError: the tensors changed before or during the transfer.
        """
        offer.require()
        buckets = self._exports()
        try:
            await all_receivers(receivers, lambda _, receiver: receiver.prepare())
            await all_receivers(receivers, lambda _, receiver: receiver.begin())
            # In a thread: the source may compute or gather tensors, and must not block the event loop.
            while (exported := await asyncio.to_thread(next, buckets, None)) is not None:
                await self._open(receivers, exported)
            await all_receivers(receivers, lambda _, receiver: receiver.end())
        finally:
            with suppress(ValueError):  # it still runs in its thread, which was cancelled here, and ends by itself
                await asyncio.to_thread(buckets.close)
        offer.require()

    async def _open(self, receivers: Sequence[Receiver], exported: Exported) -> None:
        for receiver in receivers:
            require_same_gpus(receiver, exported)

        async def read(_: int, receiver: Receiver) -> None:
            assert receiver.open is not None
            await receiver.open(exported, receiver.gpus)

        await all_receivers(receivers, read)


class Stored:
    """Weights of one version on disk, written when a server first needs them."""

    def __init__(self, disk: OnDisk, version: int, offer: Offer) -> None:
        self._disk, self._version, self._offer = disk, version, offer
        self._path: Path | None = None
        self._writing = asyncio.Lock()

    async def __call__(self) -> Path:
        """Return their directory.

        Raises:
            EngineError: they were not written.
        """
        async with self._writing:
            self._offer.require()
            if self._path is None:
                try:
                    self._path = await asyncio.to_thread(self._disk.offer, self._version)
                except OSError as error:
                    raise EngineError(f"weights {self._version} cannot be written for a server: {error}") from error
            return self._path


def require_same_gpus(receiver: Receiver, exported: Exported) -> None:
    """Check that a server can read exported tensors.

    Raises:
        EngineError: it cannot.
    """
    if receiver.open is None:
        raise EngineError(f'{receiver.name} cannot read the trainer\'s memory: set engine.weight_transfer = "disk"')
    if not receiver.gpus or (missing := [gpu for gpu in receiver.gpus if gpu not in exported.handles]):
        where = ", ".join(missing) if receiver.gpus else "GPUs that april did not assign"
        raise EngineError(
            f"{receiver.name} is on {where}, where no training process is: CUDA IPC needs trainer and server on the "
            'same GPUs; set trainer.processes to the number of GPUs, or engine.weight_transfer = "disk"'
        )
