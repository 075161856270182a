"""Weights that go from the trainer to a server over a broadcast group: gloo between CPUs, nccl between GPUs.

Invariants:
- the trainer is rank 0 of one group per server, the server's workers are the other ranks;
- tensors are sent in the order in which their names were announced;
- a group that an update failed on is never used again.

torch has no public call for a group that is not part of the default one; this is the construction servers use on their
side, and both have to agree on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from april.engines.servers.launch import free_port

GROUP = "april_weights"


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where a group meets. The server's workers are ranks 1 to `world_size` - 1."""

    address: str
    port: int
    world_size: int
    name: str
    backend: str


class Broadcast:
    """Weights to hand to `update_weights(version, broadcast)` of engines that take them over a group.

    Keep one for the whole run: it keeps the groups.

    Args:
        tensors: the weights by their names in the checkpoint; read anew at every update.
        backend: gloo for tensors on the CPU, nccl for tensors on a GPU.
        address: where servers reach this process.
        timeout: seconds that meeting a server, or sending one tensor, may take.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        backend: Literal["gloo", "nccl"] = "gloo",
        address: str = "127.0.0.1",
        timeout: float = 120.0,
    ) -> None:
        self.tensors = tensors
        self.backend = backend
        self.address = address
        self._timeout = timedelta(seconds=timeout)
        self._groups: dict[str, tuple[Meeting, Any]] = {}
        self._meetings = 0

    @property
    def names(self) -> list[str]:
        return list(self.tensors)

    @property
    def dtypes(self) -> list[str]:
        """`float32`, `bfloat16`, …"""
        return [str(tensor.dtype).removeprefix("torch.") for tensor in self.tensors.values()]

    @property
    def shapes(self) -> list[list[int]]:
        return [list(tensor.shape) for tensor in self.tensors.values()]

    async def send(
        self,
        server: str,
        workers: int,
        invite: Callable[[Meeting], Awaitable[Any]],
        receive: Callable[[Meeting], Awaitable[Any]],
    ) -> None:
        """Send everything to one server.

        Args:
            server: names the server among those this object sends to.
            workers: ranks on the server's side.
            invite: has the server's workers join a new group.
            receive: has the server receive the tensors.
        """
        try:
            if server not in self._groups:
                self._groups[server] = await self._meet(server, workers, invite)
            meeting, group = self._groups[server]
            sending = asyncio.create_task(asyncio.to_thread(self._send, group))
            try:
                await receive(meeting)
            except BaseException:
                # Without a receiver the sender waits for its timeout; nobody waits for the sender.
                sending.add_done_callback(lambda task: task.cancelled() or task.exception())
                raise
            await sending
        except BaseException:
            self._groups.pop(server, None)
            raise

    async def _meet(
        self, server: str, workers: int, invite: Callable[[Meeting], Awaitable[Any]]
    ) -> tuple[Meeting, Any]:
        self._meetings += 1
        port = free_port()
        # Names must differ from meeting to meeting: torch knows groups by name.
        meeting = Meeting(self.address, port, 1 + workers, f"{GROUP}_{port}_{self._meetings}", self.backend)
        joining = asyncio.create_task(
            asyncio.to_thread(
                join, self.address, port, 0, meeting.world_size, meeting.name, self.backend, self._timeout
            )
        )
        try:
            await invite(meeting)
        except BaseException:
            joining.add_done_callback(lambda task: task.cancelled() or task.exception())
            raise
        return meeting, await joining

    def _send(self, group: Any) -> None:
        for tensor in self.tensors.values():
            dist.broadcast(tensor.detach().contiguous(), src=0, group=group)


def join(address: str, port: int, rank: int, world_size: int, name: str, backend: str, timeout: timedelta) -> Any:
    """Join a group beside the default one; returns when all ranks have."""
    store, _, _ = next(iter(rendezvous(f"tcp://{address}:{port}", rank, world_size, timeout=timeout)))
    store.set_timeout(timeout)
    group, _ = c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        c10d.Backend(backend),
        c10d.PrefixStore(name, store),
        group_name=name,  # type: ignore[arg-type]
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group
