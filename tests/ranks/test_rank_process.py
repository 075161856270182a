"""When a rank counts as hung, and what a rank that crashes leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from april.training import rank_launcher
from april.training.rank_process import RankProcess, RankState
from april.training.rank_protocol import STATUS_FD


@pytest.mark.parametrize(("in_pipe", "state"), [(b"{}\n", RankState.RUNNING), (b"", RankState.HUNG)])
def test_heartbeats_that_were_not_read_yet_count(in_pipe: bytes, state: RankState) -> None:
    """The process that supervises may have stood still for a long time."""
    read_end, write_end = os.pipe()
    process = subprocess.Popen(["sleep", "1000"], text=True)
    rank = RankProcess(1, process, read_end, last_heartbeat=time.monotonic() - 7200)
    try:
        os.write(write_end, in_pipe)
        assert rank.check(timeout=3600) is state
    finally:
        rank.stop()
        os.close(read_end)
        os.close(write_end)


def test_a_rank_that_crashes_leaves_its_stack(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    with subprocess.Popen(
        rank_launcher.COMMAND,
        cwd=tmp_path,
        env={**os.environ, STATUS_FD: str(write_end)},
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[write_end],
        text=True,
    ) as rank:
        os.close(write_end)
        assert os.read(read_end, 1), "the rank has started"
        rank.send_signal(signal.SIGSEGV)
        _, said = rank.communicate()
    os.close(read_end)
    assert "Fatal Python error: Segmentation fault" in said
    assert "commands/rank.py" in said
