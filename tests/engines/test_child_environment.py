"""Processes that are no ranks do not inherit the launcher's variables from the rank that starts them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from april.engines.child_environment import inherited
from april.engines.servers.process_group import process_group

TORCHRUN = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
)


def test_variables_of_torchrun_are_not_inherited() -> None:
    assert inherited({**dict.fromkeys(TORCHRUN, "1"), "PATH": "/bin"}) == {"PATH": "/bin"}


async def test_a_server_inherits_no_variable_of_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("LOCAL_SCRATCH", "kept")
    log = tmp_path / "log"
    script = "import os; print(sorted(os.environ))"
    async with process_group([sys.executable, "-c", script], log, {"MASTER_KEY": "given"}) as process:
        await process.wait()
    names = eval(log.read_text())
    assert not set(TORCHRUN) & set(names)
    assert {"LOCAL_SCRATCH", "MASTER_KEY", "PATH"} <= set(names)
