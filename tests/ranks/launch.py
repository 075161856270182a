"""Real ranks for a test: processes that meet over gloo, each of which calls one function.

All are forked from a process that has imported torch, transformers and april, which takes longer than most of what
ranks then do.
"""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from april.training.rank_protocol import RENDEZVOUS
from april.training.ranks import join_ranks

ROOT = Path(__file__).parents[2]
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [f"tests.ranks.{name}" for name in ("updates", "checkpoints", "memory", "vocabulary", "generation", "images")]
)


def run(function: str, world: int, directory: Path, timeout: float = 900, /, **arguments: Any) -> list[str]:
    """What each of `world` ranks printed that call `function(ranks, **arguments)`; all of them have to succeed.

    Args:
        function: as MODULE:NAME.
    """
    place = Path(tempfile.mkdtemp(dir=directory))
    common = {"WORLD_SIZE": str(world), RENDEZVOUS: f"file://{place}/store"}
    logs = [place / f"rank-{rank}.log" for rank in range(world)]
    of_ranks = ({**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world))
    processes = [
        FORKS.Process(target=_rank, args=(function, arguments, environment, log), daemon=True)
        for environment, log in zip(of_ranks, logs, strict=True)
    ]
    deadline = time.monotonic() + timeout
    for process in processes:
        process.start()
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join()
    said = [log.read_text() if log.exists() else "" for log in logs]
    assert [process.exitcode for process in processes] == [0] * world, "\n".join(said)
    return said


def _rank(function: str, arguments: dict[str, Any], environment: dict[str, str], log: Path) -> None:
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable()
    os.environ.update(environment)
    torch.set_num_threads(1)
    module, _, name = function.partition(":")
    layout = {name: arguments.pop(name, 1) for name in ("replicas", "context", "tensor", "expert")}
    with join_ranks("cpu", 300, **layout) as ranks:
        getattr(importlib.import_module(module), name)(ranks, **arguments)
