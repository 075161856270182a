"""Runs all ranks of a run, and starts all of them again when one is lost.

    ┌─> start all ranks ──> RankGroup.run ──> exit status known ──> return it
    │                            │
    │                       ranks lost ──> too many restarts, or a stop was requested ──> return 1
    │                            │
    └── resume from disk <───────┘  (after an out-of-memory error with smaller micro-batches)

Invariants:
- restarted ranks resume from the newest checkpoint and the journal, so nothing is lost or done twice;
- the run has the exit status of the first rank, if that rank ended by itself;
- signals to stop or to save go to the first rank alone; the other ranks end with it;
- if this process dies, the first rank notices it and stops the run in order.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from april.config.recipe import Recipe
from april.engines.supervisor import RestartPolicy, Supervisor
from april.reporting.metrics_log import last_step
from april.rollout.engine import EngineError
from april.training.rank_group import RankGroup
from april.training.rank_launcher import RankLauncher
from april.training.rank_process import RankProcess
from april.training.resume import RECIPE, check_run
from april.training.stop import SAVING, exit_status, forwarding

if TYPE_CHECKING:
    from april.training.rank_nodes import PlacedRanks, RankNodes

NODES_SECONDS = 30.0
"""Time that a new run waits for nodes with room: another run may just have left them. A restart waits without limit."""


class RankSupervisor:
    """Supervises one run on several ranks.

    Args:
        recipe: the run's recipe. After an out-of-memory error its `max_tokens_per_micro_batch` is lowered.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._directory = Path(recipe.reporting.output)
        self._logs = self._directory / "ranks"
        self._launcher = RankLauncher(recipe, self._logs)
        # A restart follows at once. Only progress, not time, makes earlier losses count no more.
        self._restarts = Supervisor(
            RestartPolicy(delay=0.0, max_restarts=recipe.trainer.max_restarts, forgiven_after=math.inf)
        )
        self._nodes: RankNodes | None = None
        self._leader: RankProcess | None = None
        self._restarted = False
        self._stop_signal = 0
        """The first signal that asked the run to stop; 0 before."""

    def run(self, resume: bool = False) -> int:
        """Run to the end, and return the exit status.

        Raises:
            CheckpointError, JournalError: the run cannot be resumed from disk.
        """
        with forwarding(self._forward), ExitStack() as stack:
            try:
                if self._recipe.ranks_on_nodes:
                    from april.training.rank_nodes import RankNodes

                    recipe = self._recipe
                    cpus = recipe.engine_cpus_per_rank
                    nodes = RankNodes(recipe.ranks_on_nodes, recipe.cluster, recipe.model, self._directory, cpus)
                    self._nodes = stack.enter_context(nodes)
                return self._run(resume)
            except EngineError as error:  # the cluster does not answer, or its nodes have no room for the ranks
                self._note(str(error))
                self._note_how_to_resume()
                return exit_status(self._stop_signal) if self._stop_signal else 1

    def _run(self, resume: bool) -> int:
        furthest = last_step(self._directory)
        while True:
            self._restarts.starting()
            group = self._run_group(resume)
            for rank in group.failed:
                self._note(f"rank {rank.number}: {rank.reports['failed']}")
            if (status := group.exit_status) is not None:
                return status
            if (step := last_step(self._directory)) > furthest:
                furthest = step
                self._restarts.forgive()
            reason = self._adapt(group)
            # Halving micro-batches ends by itself: a rank without memory for one sample reports a failure.
            if self._restarts.died(reason, counts=group.out_of_memory is None) is None or self._stop_signal:
                self._note(f"{reason}; the ranks are not restarted")
                self._note_how_to_resume()
                return 1
            # Ranks that died before the run began have written no recipe: the run starts from the beginning.
            self._restarted, resume = True, (self._directory / RECIPE).is_file()
            if resume:
                # Raises before the ranks start if the state on disk is damaged.
                list(check_run(self._directory))
            self._note(f"{reason}; all ranks restart from the state on disk")

    def _run_group(self, resume: bool) -> RankGroup:
        """Start all ranks and run them until all have ended."""
        self._logs.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            # Called last, when all ranks have ended: a run that failed before its start leaves no directory.
            stack.callback(self._remove_empty_run)
            placed = stack.enter_context(self._reserved_nodes()) if self._nodes else None
            if self._stop_signal:
                raise EngineError("stopped before the ranks were started")
            ranks = stack.enter_context(self._launcher.launch(resume, placed))
            # A signal before this line is pending; the handler sends every later signal to the new leader itself.
            pending, self._leader = self._stop_signal, ranks[0]
            if pending:  # it came while the ranks were started
                self._leader.send_signal(pending)
            self._restarts.running()
            group = RankGroup(ranks, self._recipe.trainer.rank_timeout)
            group.run()
            return group

    def _adapt(self, group: RankGroup) -> str:
        """Lower the micro-batch budget if a rank ran out of memory; return why the ranks are lost."""
        if (short := group.out_of_memory) is None:
            return group.cause.reason
        tokens = self._recipe.training.max_tokens_per_micro_batch = short.reports["memory"]
        return f"rank {short.number} ran out of memory; micro-batches have {tokens} tokens after the restart"

    @contextmanager
    def _reserved_nodes(self) -> Iterator[PlacedRanks]:
        assert self._nodes is not None
        with self._nodes.reserved(self._keeps_waiting(), lambda: bool(self._stop_signal)) as placed:
            self._note(str(placed))
            yield placed

    def _keeps_waiting(self) -> Callable[[str], bool]:
        """Return a function that is given the reason why nodes are missing and decides whether to wait for them."""
        deadline = math.inf if self._restarted else time.monotonic() + NODES_SECONDS
        noted: set[str] = set()

        def keeps_waiting(reason: str) -> bool:
            if reason not in noted:
                self._note(f"waiting for nodes: {reason}")
            noted.add(reason)
            return not self._stop_signal and time.monotonic() < deadline

        return keeps_waiting

    def _forward(self, number: int) -> None:
        """Signal handler: have the first rank stop or save the run."""
        if number != SAVING:
            self._stop_signal = self._stop_signal or number
        if self._leader is not None:
            self._leader.send_signal(number)

    def _remove_empty_run(self) -> None:
        """Remove the directory of a run that has written nothing but the folder of rank logs."""
        if not any(path != self._logs for path in self._directory.iterdir()):
            shutil.rmtree(self._directory)

    def _note_how_to_resume(self) -> None:
        if (self._directory / RECIPE).is_file():
            self._note(f"to resume the run: april resume {self._directory}")

    def _note(self, message: str) -> None:
        print(f"april: {message}", file=sys.stderr, flush=True)
