"""Weights in buckets over a process group of this process alone: nccl loads, a group is made, used, and left.

nccl connects no two ranks on one device, so nothing travels; packing and the cost of a collective are seen.
"""

from __future__ import annotations

import time
from datetime import timedelta

from gpu_parts.bench import Bench
from parts import Figures
from record import spread

from april.engines.servers import weight_group
from april.engines.weight_buckets import buckets_of, packed
from april.engines.weight_transfer import BUCKET_BYTES, Meeting

TIMEOUT = timedelta(seconds=15)


def measure(bench: Bench) -> Figures:
    backend = "nccl" if bench.on_gpu else "gloo"
    yield "backend", backend
    yield "version", weight_group.nccl_version() if bench.on_gpu else None
    tensors = list(bench.model(bench.shape).state_dict().items())
    store = weight_group.listen("127.0.0.1", TIMEOUT)
    began = time.perf_counter()
    group = weight_group.join(Meeting("127.0.0.1", store.port, 1, 0, "april_alone", backend), TIMEOUT, store)
    yield "join_seconds", time.perf_counter() - began
    packing, sending, size, buckets = [], [], 0, 0
    for _ in range(3):
        packed_seconds = sent_seconds = 0.0
        buckets = size = 0
        for bucket in buckets_of(iter(tensors), bench.size(BUCKET_BYTES, 1 << 16)):
            began = bench.clock()
            flat = packed([tensor for _, tensor in bucket])
            between = bench.clock()
            weight_group.send(flat, group, TIMEOUT)
            sent_seconds += bench.clock() - between
            packed_seconds += between - began
            size, buckets = size + flat.nbytes, buckets + 1
        packing.append(packed_seconds)
        sending.append(sent_seconds)
    yield "bytes", size
    yield "buckets", buckets
    yield "packing_seconds", spread(packing)
    yield "sending_seconds", spread(sending)
    began = time.perf_counter()
    weight_group.leave(group)
    yield "leave_seconds", time.perf_counter() - began
