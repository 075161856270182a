"""Buckets of weights from the first GPU to all others over NCCL, one process a GPU; over gloo on the CPU."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from parts import Figures
from record import spread

from april.engines.servers import weight_group
from april.engines.servers.broadcast import BUCKET_BYTES
from april.engines.weight_transfer import Meeting

if TYPE_CHECKING:  # the other processes start faster without it
    from node_parts.given import Given

TIMEOUT = timedelta(seconds=40)
ROUNDS = 5


def measure(given: Given) -> Figures:
    world = len(given.gpus()) if given.device != "cpu" else 2
    yield "ranks", world
    if world < 2:
        yield "failures", ["one GPU: NCCL has nothing to connect"]
        return
    backend = "nccl" if given.device != "cpu" else "gloo"
    size = given.bench.size(BUCKET_BYTES, 1 << 20)
    store = weight_group.listen("127.0.0.1", TIMEOUT)
    context = mp.get_context("spawn")
    answers: Any = context.SimpleQueue()
    meetings = [Meeting("127.0.0.1", store.port, world, rank, "april_node", backend) for rank in range(world)]
    ranks = [context.Process(target=take_part, args=(meeting, size, answers), daemon=True) for meeting in meetings]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(TIMEOUT.total_seconds() * given.slower)
    found = [answers.get() for rank in ranks if rank.exitcode == 0]
    if len(found) < world:
        ends = ["not done" if rank.exitcode is None else f"exit status {rank.exitcode}" for rank in ranks]
        yield "failures", [f"rank {i}: {end}" for i, end in enumerate(ends)]
        return
    slowest = [max(taken[i] for taken, _ in found) for i in range(1, ROUNDS)]  # the first one connects
    yield "join_seconds", max(taken[0] for taken, _ in found)
    yield "bucket_bytes", size
    yield "gigabytes_per_second", spread([size / seconds / 1e9 for seconds in slowest])
    wrong = sum(not right for _, right in found)
    yield "failures", [f"{wrong} ranks received other numbers than were sent"] if wrong else []


def take_part(meeting: Meeting, size: int, answers: Any) -> None:
    """A rank: receives buckets, or sends them as the first; seconds of each, and whether the numbers are right."""
    rank, on_gpu = meeting.first_rank, meeting.backend == "nccl"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    group = weight_group.join(meeting, TIMEOUT)
    taken, right = [], True
    for number in range(ROUNDS):
        bucket = torch.full((size,), number + 1 if rank == 0 else 0, dtype=torch.uint8, device=device)
        began = time.perf_counter()
        if rank == 0:
            weight_group.send(bucket, group, TIMEOUT)
        else:
            dist.broadcast(bucket, src=0, group=group)
        if on_gpu:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
        right = right and bool((bucket == number + 1).all())
    weight_group.leave(group)
    answers.put((taken, right))
