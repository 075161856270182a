"""Real ranks for a test: processes that meet over gloo, each of which calls one function.

`python -m tests.ranks.launch MODULE:FUNCTION ARGUMENTS`, with the environment of a rank.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from april.training.rank_process import RENDEZVOUS
from april.training.ranks import joined

ROOT = Path(__file__).parents[2]


def start(function: str, world: int, directory: Path, /, **arguments: Any) -> list[subprocess.Popen[str]]:
    """Start `world` ranks that call `function(ranks, **arguments)`."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    common = {**os.environ, "PYTHONPATH": path, "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
    common[RENDEZVOUS] = f"file://{tempfile.mkdtemp(dir=directory)}/store"
    command = [sys.executable, "-m", "tests.ranks.launch", function, json.dumps(arguments)]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return [
        subprocess.Popen(command, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, **pipes)
        for rank in range(world)
    ]


def run(function: str, world: int, directory: Path, timeout: float = 300, /, **arguments: Any) -> list[str]:
    """What each rank printed; all of them have to succeed."""
    processes = start(function, world, directory, **arguments)
    try:
        said = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * world, "\n".join(said)
    return said


def main() -> None:
    module, _, name = sys.argv[1].partition(":")
    function = getattr(importlib.import_module(module), name)
    arguments = json.loads(sys.argv[2])
    layout = {name: arguments.pop(name, 1) for name in ("replicas", "context", "tensor", "expert")}
    with joined("cpu", 60, **layout) as ranks:
        function(ranks, **arguments)


if __name__ == "__main__":
    main()
