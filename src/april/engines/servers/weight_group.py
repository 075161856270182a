"""Process group of the trainer and its servers, apart from torch's default group: gloo for CPUs, nccl for GPUs.

Invariants:
- the rendezvous is a store that the trainer opens for this group alone, whatever launcher started the trainer;
- a failed or late nccl collective raises in the trainer and never ends its process;
- `leave` frees a group's communicators, also while one of its collectives is in flight.

torch has no public call for a group that is not part of the default group. Servers use the same construction, and both
sides have to agree on it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d_types
from torch.distributed import distributed_c10d as c10d

from april.engines.weight_transfer import Meeting
from april.rollout.engine import EngineError

WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
CLEAN_UP_ONLY = "2"
"""torch's watchdog then aborts the communicator of a failed collective; by default it ends the process."""
POLL_SECONDS = 0.0005
"""Between two looks at a collective that is in flight."""


def listen(address: str, timeout: timedelta) -> c10d_types.TCPStore:
    """Open the store of a new group, on a free port of this machine."""
    return c10d_types.TCPStore(address, 0, is_master=True, timeout=timeout, wait_for_workers=False)


def join(meeting: Meeting, timeout: timedelta, store: c10d_types.TCPStore | None = None) -> Any:
    """Join a group as `first_rank`; returns when all ranks have joined.

    Args:
        store: the group's store, of the process that opened it.
    """
    if store is None:
        store = c10d_types.TCPStore(
            meeting.address, meeting.port, is_master=False, timeout=timeout, wait_for_workers=False
        )
    with _without_teardown():
        group, _ = c10d._new_process_group_helper(
            meeting.world_size,
            meeting.first_rank,
            [],
            c10d.Backend(meeting.backend),
            c10d.PrefixStore(meeting.name, store),
            group_name=meeting.name,  # type: ignore[arg-type]
            timeout=timeout,
        )
    # `broadcast` translates ranks by this table, which torch's helper does not fill.
    c10d._world.pg_group_ranks[group] = {i: i for i in range(meeting.world_size)}
    return group


def leave(group: Any) -> None:
    """Free a group. Collectives of it that are in flight fail."""
    known = c10d._world.pg_map.get(group)
    if known is None:
        return
    if known[0] == "nccl":
        c10d._abort_process_group(group)  # destroying waits for a server that may be gone
    else:
        dist.destroy_process_group(group)


def send(tensor: Tensor, group: Any, timeout: timedelta) -> None:
    """Broadcast a tensor of rank 0; returns when all ranks have received it.

    Raises:
        EngineError: it took longer than `timeout`.
        RuntimeError: a rank is gone.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    work = dist.broadcast(tensor, src=0, group=group, async_op=True)
    assert work is not None
    # Poll instead of `wait`: for NCCL, `wait` only orders the stream, so it would ignore the deadline.
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise EngineError(f"the servers did not receive a bucket of weights in {timeout.total_seconds():g} s")
        time.sleep(POLL_SECONDS)
    # Raises the error of a collective that has failed.
    work.wait()


def nccl_version() -> str:
    """The version of the nccl library that torch uses here."""
    return ".".join(map(str, torch.cuda.nccl.version()))


@contextmanager
def _without_teardown() -> Iterator[None]:
    """Groups made inside raise their errors; torch reads the setting when it makes a group."""
    before = os.environ.get(WATCHDOG)
    os.environ[WATCHDOG] = CLEAN_UP_ONLY
    try:
        yield
    finally:
        if before is None:
            del os.environ[WATCHDOG]
        else:
            os.environ[WATCHDOG] = before
