"""How much memory a process may plan with."""

from __future__ import annotations

import pytest
import torch

from april.engines.device_memory import free_bytes


def test_the_ranks_of_a_machine_share_its_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sysconf", {"SC_AVPHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert free_bytes(torch.device("cpu")) == 4_096_000
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert free_bytes(torch.device("cpu")) == 512_000
