"""How much memory a process may plan with."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from april.engines.device_memory import free_bytes, release_cached


def test_memory_that_servers_have_released_is_collected_before_caches_are_emptied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    for name in ("ipc_collect", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: calls.append(name))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for initialised, expected in ((True, ["ipc_collect", "empty_cache"]), (False, ["empty_cache"])):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda initialised=initialised: initialised)
        release_cached(garbage=False)
        assert calls == expected
        calls.clear()


def test_the_ranks_of_a_machine_share_its_available_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of files that the system would drop are available: a machine that has read much has few free pages."""
    monkeypatch.setattr("april.engines.device_memory._cgroup_room", lambda: sys.maxsize)
    monkeypatch.setattr(Path, "read_text", lambda path: "MemFree: 8 kB\nMemAvailable: 4000 kB\n")
    assert free_bytes(torch.device("cpu")) == 4_096_000
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert free_bytes(torch.device("cpu")) == 512_000
