"""When a rank counts as hung."""

from __future__ import annotations

import os
import subprocess
import time

import pytest

from april.training.rank_process import RankProcess, RankState


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
