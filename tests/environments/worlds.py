"""Environments for worker processes: they are imported there."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from april import EnvStep, TokenIds, Turn
from tests.talking import said_by_environment


class Sturdy:
    """Answers as `tests.talking` expects."""

    def reset(self, prompt: Mapping[str, Any], seed: int) -> TokenIds:
        self.seed, self.words = seed, 0
        return said_by_environment(seed, 0)[0]

    def step(self, turn: Turn) -> EnvStep:
        self.words += len(turn.token_ids)
        return EnvStep(*said_by_environment(self.seed, self.words))

    def close(self) -> None: ...


class Fragile(Sturdy):
    """Does `deed` once, at the turns that are named; `folder` remembers that it did."""

    def __init__(self, folder: Path, deed: str, keys: tuple[str, ...]) -> None:
        self.folder, self.deed, self.keys = folder, deed, keys

    def step(self, turn: Turn) -> EnvStep:
        mark = self.folder / turn.key.replace("/", "-")
        if turn.key in self.keys and not mark.exists():
            mark.touch()
            if self.deed == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            elif self.deed == "hang":
                time.sleep(1000)
            elif self.deed == "exit":
                sys.exit(3)
            raise RuntimeError(self.deed)
        return super().step(turn)


class Asynchronous(Sturdy):
    async def step(self, turn: Turn) -> EnvStep:  # type: ignore[override]
        return super().step(turn)


def secret() -> Sturdy:
    assert "MY_API_KEY" not in os.environ, "a worker sees a secret"
    return Sturdy()


def missing() -> Sturdy:
    raise ImportError("no module of that name")
