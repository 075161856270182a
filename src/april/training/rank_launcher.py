"""Start of the processes of all ranks: the first rank on this machine, the others here or on nodes of a cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from april.config.recipe import Recipe
from april.engines.servers.address import is_loopback
from april.training.rank_process import RankProcess
from april.training.rank_protocol import RENDEZVOUS, STATUS_FD

if TYPE_CHECKING:
    from april.training.rank_nodes import PlacedRanks

COMMAND = [sys.executable, "-m", "april.commands.rank"]


class RankLauncher:
    """Starts ranks as often as they are needed.

    Args:
        recipe: the run's recipe; each start passes it to the ranks as it is then.
        logs: existing folder for the followers' logs.
    """

    def __init__(self, recipe: Recipe, logs: Path) -> None:
        self._recipe = recipe
        self._logs = logs

    @contextmanager
    def launch(self, resume: bool, placed: PlacedRanks | None = None) -> Iterator[list[RankProcess]]:
        """Start all ranks; those that run at the end of the block are killed.

        Args:
            resume: whether the run continues from its checkpoint and journal.
            placed: nodes for all ranks but the first one; None starts all of them on this machine.
        """
        payload = json.dumps({"recipe": self._recipe.to_dict(), "resume": resume})
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="april-ranks-")))
            meeting_point = placed.leader_environment if placed else {RENDEZVOUS: f"file://{folder / 'store'}"}
            ranks: list[RankProcess] = []
            for number in range(self._recipe.trainer.processes):
                if placed and number > 0:
                    process = placed.start(number, payload)
                    rank = RankProcess(number, process, process.line)
                else:
                    log = None if number == 0 else stack.enter_context((self._logs / f"rank-{number}.log").open("a"))
                    rank = self._start_here(number, meeting_point, log, payload, placed)
                # Callbacks run in reverse order: a rank is killed before its pipe is closed.
                stack.callback(os.close, rank.status_fd)
                stack.callback(rank.process.kill)
                ranks.append(rank)
            yield ranks

    def _start_here(
        self, number: int, meeting_point: Mapping[str, str], log: Any, payload: str, placed: PlacedRanks | None
    ) -> RankProcess:
        read_end, write_end = os.pipe()
        process = subprocess.Popen(
            COMMAND,
            env={**self._environment(placed), **meeting_point, "RANK": str(number), "LOCAL_RANK": str(number)}
            | {STATUS_FD: str(write_end)},
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            text=True,
            pass_fds=[write_end, placed.listener] if placed else [write_end],
            process_group=0,  # Ctrl-C in a terminal reaches the supervisor alone, which forwards it
        )
        # Only the rank holds the write end now, so its death closes the pipe and wakes `select` in the supervisor.
        os.close(write_end)
        assert process.stdin is not None
        process.stdin.write(payload)
        process.stdin.close()
        return RankProcess(number, process, read_end)

    def _environment(self, placed: PlacedRanks | None) -> dict[str, str]:
        world, here = self._recipe.trainer.processes, self._recipe.ranks_here
        required = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(here)}
        defaults = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // here))}
        if placed:
            defaults |= placed.leader_defaults
        elif sys.platform == "linux" and self._engines_are_here:
            defaults["GLOO_SOCKET_IFNAME"] = "lo"  # no other machine has to reach the ranks
        # The user's variables override defaults, but never the layout of the ranks.
        return {**defaults, **os.environ, **required}

    @property
    def _engines_are_here(self) -> bool:
        """Whether all engines are on this machine; engines of a cluster receive weights over its network."""
        recipe = self._recipe
        return not (recipe.cluster.enabled or recipe.engine.urls) and is_loopback(recipe.engine.server_host)
