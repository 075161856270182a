"""Starts the ranks of a run, watches them, and starts all of them anew when one is lost.

Invariants:
- all ranks run, or none: as soon as one is gone, or gives no sign of life, all are ended;
- ranks that are started anew go on from the newest checkpoint and the journal, so nothing is lost or done twice;
- a rank that runs out of memory ends all; in a pass over a batch that is no death: that the micro-batches get smaller
  is what goes on;
- how the first rank ends by itself is how the run ends; it alone is told of signals, and the others end with it;
- when another rank is gone the first one is asked to stop as by a user, so what it was collecting is in the journal;
- no rank outlives the agent for long: the first one then stops the run in good order.

The first rank is here; so are the others, or they are on nodes of a cluster (`rank_nodes.py`).
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from april.config.recipe import Recipe
from april.engines.servers.address import is_loopback
from april.reporting.metrics_log import last_step
from april.rollout.engine import EngineError
from april.training.rank_protocol import EXIT_RANK_LOST, RENDEZVOUS, STATUS_FD
from april.training.resume import RECIPE, check_run
from april.training.stop import SAVING, exit_status, forwarding

if TYPE_CHECKING:
    from april.engines.cluster.node_process import NodeProcess
    from april.training.rank_nodes import PlacedRanks, RankNodes

COMMAND = [sys.executable, "-m", "april.commands.rank"]
GRACE_SECONDS = 20.0
"""That ranks have to end by themselves once one of them is gone."""
ROOM_SECONDS = 30.0
"""That a run waits for nodes at its beginning: another may have just left them. Later it waits as long as it takes."""


@dataclass(eq=False)
class RankProcess:
    """A rank, seen from outside."""

    number: int
    process: subprocess.Popen[str] | NodeProcess
    line: int
    heard: float
    """When it last gave a sign of life."""
    said: dict[str, Any] = field(default_factory=dict)
    ended_here: bool = False
    """The agent ended it, although it gave signs of life."""
    rest: bytes = b""

    def listen(self) -> None:
        """Read what it has written since."""
        data = os.read(self.line, 1 << 16)
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            self.said |= json.loads(line)
        if data:
            self.heard = time.monotonic()

    def send_signal(self, number: int) -> None:
        """To the first rank, which is here."""
        assert isinstance(self.process, subprocess.Popen)
        self.process.send_signal(number)

    @property
    def ending(self) -> str:
        """How it ended, for a message."""
        status = self.process.returncode or 0
        name = f"rank {self.number}"
        if died := self.said.get("died"):
            return f"{name} {died}"
        if lost := getattr(self.process, "lost", ""):
            return f"{name} {lost}"
        if "hung" in self.said:
            return f"{name} gave no sign of life for {self.said['hung']:.0f} s"
        if status < 0:
            return f"{name} was ended by {signal.Signals(-status).name}"
        return f"{name}: {self.said.get('lost', f'ended with status {status}')}"


class RankSupervisor:
    """One run on several ranks.

    Args:
        recipe: the run's.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._directory = Path(recipe.reporting.output)
        self._ranks: list[RankProcess] = []
        self._nodes: RankNodes | None = None
        self._lost = False
        self._stopping = 0
        """The signal that asked the run to stop; 0 before."""

    def run(self, resume: bool = False) -> int:
        """Run to the end, and return the exit status.

        Raises:
            CheckpointError, JournalError: what is on disk cannot be gone on with.
        """
        with forwarding(self._forward), ExitStack() as stack:
            try:
                if self._recipe.ranks_on_nodes:
                    from april.training.rank_nodes import RankNodes

                    self._nodes = stack.enter_context(RankNodes(self._recipe))
                return self._run(resume)
            except EngineError as error:  # the cluster does not answer, or its nodes cannot take the ranks
                self._note(str(error))
                self._say_how_to_go_on()
                return exit_status(self._stopping) if self._stopping else 1

    def _run(self, resume: bool) -> int:
        restarts, furthest = 0, last_step(self._directory)
        while (status := self._until_one_is_gone(resume)) is None:
            if (step := last_step(self._directory)) > furthest:
                restarts, furthest = 0, step
            restarts += not self._short  # halving ends by itself: a rank without memory for one sample says so
            why = self._why()
            if restarts > self._recipe.trainer.max_restarts or self._stopping:
                self._note(f"{why}; the ranks are not started anew")
                self._say_how_to_go_on()
                return 1
            self._lost, resume = True, (self._directory / RECIPE).is_file()
            if resume:
                list(check_run(self._directory))
            self._note(f"{why}; all ranks start anew and go on from what is on disk")
        return status

    def _until_one_is_gone(self, resume: bool) -> int | None:
        """The run's exit status; None if ranks were lost."""
        with self._started(resume) as ranks:
            while not any(self._over(rank) for rank in ranks):
                self._listen(0.5)
            self._end()
        leader = ranks[0].process.returncode or 0
        if self._short or ranks[0].ended_here:
            return None
        if leader >= 0 and leader != EXIT_RANK_LOST:
            return leader
        failed = [rank for rank in ranks if "failed" in rank.said]
        for rank in failed:
            self._note(f"rank {rank.number}: {rank.said['failed']}")
        return 1 if failed else None

    @property
    def _short(self) -> list[RankProcess]:
        """The ranks that ran out of memory."""
        return [rank for rank in self._ranks if "memory" in rank.said]

    def _why(self) -> str:
        """Why the ranks were lost, and what is done about it."""
        if short := self._short:
            tokens = self._recipe.training.max_tokens_per_micro_batch = short[0].said["memory"]
            return f"rank {short[0].number} ran out of memory; micro-batches have {tokens} tokens from now on"

        def only_noticed(rank: RankProcess) -> bool:
            return rank.process.returncode == EXIT_RANK_LOST and "died" not in rank.said

        # Those that ended by themselves, before those that only noticed, before those that had to be ended.
        return min(self._ranks, key=lambda rank: (rank.ended_here, only_noticed(rank))).ending

    def _over(self, rank: RankProcess) -> bool:
        """Whether a rank is gone, hung, or in the case of the first one, done."""
        status = rank.process.poll()
        if status is not None:
            return rank.number == 0 or status != 0
        silent = time.monotonic() - rank.heard
        if silent > self._recipe.trainer.rank_timeout:
            rank.said["hung"] = silent
            rank.process.kill()
            return True
        return False

    def _listen(self, seconds: float) -> None:
        ready, _, _ = select.select([rank.line for rank in self._ranks], [], [], seconds)
        for rank in self._ranks:
            if rank.line in ready:
                rank.listen()
        time.sleep(0.02)  # the line of a rank that has ended is always ready

    def _end(self) -> None:
        """Let the ranks say why they end, and end those that do not."""
        deadline = time.monotonic() + GRACE_SECONDS
        leader, *others = self._ranks
        # One that ended by itself may have seen the first one end, which then says itself how.
        asked = leader.process.poll() is None and any(map(_was_ended, others))
        if asked:
            leader.send_signal(signal.SIGTERM)
        while time.monotonic() < deadline and any(rank.process.poll() is None for rank in self._ranks):
            self._listen(0.1)
        for rank in self._ranks:
            rank.ended_here = rank.process.poll() is None and "hung" not in rank.said
            rank.process.kill()
            rank.process.wait()
            rank.listen()
        if asked and leader.process.returncode in (-signal.SIGTERM, exit_status(signal.SIGTERM)):
            leader.ended_here = True

    @contextmanager
    def _started(self, resume: bool) -> Iterator[list[RankProcess]]:
        logs = self._directory / "ranks"
        logs.mkdir(parents=True, exist_ok=True)
        payload = json.dumps({"recipe": self._recipe.to_dict(), "resume": resume})
        with ExitStack() as stack:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="april-ranks-")))
            self._ranks = []
            stack.callback(self._remove_logs_of_nothing, logs)
            away = None
            if self._nodes:
                away = stack.enter_context(self._nodes.taken(self._waits_for_room(), lambda: bool(self._stopping)))
                self._note(str(away))
            if self._stopping:
                raise EngineError("stopped before the ranks began")
            for number in range(self._recipe.trainer.processes):
                if away and number > 0:
                    process = away.start(number, payload)
                    self._ranks.append(RankProcess(number, process, process.line, time.monotonic()))
                else:
                    log = None if number == 0 else stack.enter_context((logs / f"rank-{number}.log").open("a"))
                    self._ranks.append(self._start(number, place, log, payload, away))
                stack.callback(os.close, self._ranks[-1].line)
                stack.callback(self._ranks[-1].process.kill)
            yield self._ranks

    def _start(self, number: int, place: Path, log: Any, payload: str, away: PlacedRanks | None) -> RankProcess:
        line, theirs = os.pipe()
        meeting = away.of_first if away else {RENDEZVOUS: f"file://{place / 'store'}"}
        process = subprocess.Popen(
            COMMAND,
            env={**self._environment(away), **meeting, "RANK": str(number), "LOCAL_RANK": str(number)}
            | {STATUS_FD: str(theirs)},
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            text=True,
            pass_fds=[theirs, away.listener] if away else [theirs],
            process_group=0,
        )
        os.close(theirs)
        assert process.stdin is not None
        process.stdin.write(payload)
        process.stdin.close()
        return RankProcess(number, process, line, time.monotonic())

    def _environment(self, away: PlacedRanks | None) -> dict[str, str]:
        world = self._recipe.trainer.processes
        here = world - self._recipe.ranks_on_nodes
        own = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(here)}
        usual = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // here))}
        if away:
            usual |= away.network
        elif sys.platform == "linux" and self._all_is_here:
            usual["GLOO_SOCKET_IFNAME"] = "lo"  # nobody elsewhere has to reach the ranks
        return {**usual, **os.environ, **own}

    @property
    def _all_is_here(self) -> bool:
        """Whether engines are on this machine, as the ranks are: those of a cluster get weights over its network."""
        recipe = self._recipe
        return not (recipe.cluster.enabled or recipe.engine.urls) and is_loopback(recipe.engine.server_host)

    def _waits_for_room(self) -> Callable[[str], bool]:
        """Whether to wait for nodes, asked with the reason that there are none: always where the run goes on."""
        until = None if self._lost else time.monotonic() + ROOM_SECONDS
        told: set[str] = set()

        def waits(why: str) -> bool:
            if why not in told:
                self._note(f"waiting for nodes: {why}")
            told.add(why)
            return not self._stopping and (until is None or time.monotonic() < until)

        return waits

    def _forward(self, number: int) -> None:
        """The first rank stops, or saves the run."""
        if number != SAVING:
            self._stopping = self._stopping or number
        if self._ranks and self._ranks[0].process.poll() is None:
            self._ranks[0].send_signal(number)

    def _remove_logs_of_nothing(self, logs: Path) -> None:
        """A run that has not begun leaves nothing behind."""
        if not any(path != logs for path in self._directory.iterdir()):
            shutil.rmtree(self._directory)

    def _say_how_to_go_on(self) -> None:
        if (self._directory / RECIPE).is_file():
            self._note(f"to go on from what is on disk: april resume {self._directory}")

    def _note(self, message: str) -> None:
        print(f"april: {message}", file=sys.stderr, flush=True)


def _was_ended(rank: RankProcess) -> bool:
    """Whether a signal ended it, or is about to."""
    return "hung" in rank.said or (rank.process.poll() or 0) < 0
