"""A tensor on a GPU that two processes share by CUDA IPC: both see what the other writes, and no copy is made."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
import torch.multiprocessing as mp
from parts import Figures

if TYPE_CHECKING:  # the other processes start faster without it
    from node_parts.given import Given

SECONDS = 20.0


def measure(given: Given) -> Figures:
    size = given.bench.size(1 << 30, 1 << 20)
    shared = torch.ones(size, dtype=torch.uint8, device=given.device)
    context = mp.get_context("spawn")
    tensors: Any = context.Queue()
    answers: Any = context.Queue()
    other = context.Process(target=add_one, args=(tensors, answers), daemon=True)
    other.start()
    answers.get(timeout=SECONDS * given.slower)  # it is up, with a context of its own
    free = torch.cuda.mem_get_info()[0] if given.device != "cpu" else 0
    began = time.perf_counter()
    tensors.put(shared)
    seen = answers.get(timeout=SECONDS * given.slower)
    yield "seconds", time.perf_counter() - began
    yield "bytes", size
    if given.device != "cpu":
        yield "more_bytes_held", free - torch.cuda.mem_get_info()[0]
    wrong = [] if seen == 1 else [f"the other process read {seen} where 1 was written"]
    wrong += [] if bool((shared == 2).all()) else ["what the other process wrote is not seen here"]
    tensors.put(None)
    other.join(SECONDS)
    yield "failures", wrong


def add_one(tensors: Any, answers: Any) -> None:
    if torch.cuda.is_available():
        torch.cuda.init()
    answers.put("up")
    tensor = tensors.get()
    seen = int(tensor[0])
    tensor.add_(1)
    if tensor.is_cuda:
        torch.cuda.synchronize()
    answers.put(seen)
    tensors.get()  # the tensor lives until the other process has read it
