"""A training run in this process: console output, exit status and the command that resumes it."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers

from april.commands.failure import fail
from april.commands.kept_caches import advice_of_run
from april.config.recipe import Recipe
from april.reporting.messages import messages
from april.reporting.output import Output
from april.reporting.progress import Progress
from april.reporting.run_log import closing_lines
from april.rollout.engine import EngineError
from april.rollout.episodes.episodes import EpisodeError
from april.rollout.journal.journal_file import JournalError
from april.rollout.rewards import RewardError
from april.rollout.staleness import StalenessError
from april.rollout.step_stats import RejectionError
from april.training.build import train
from april.training.checkpoint import CheckpointError
from april.training.recovery import TrainingError
from april.training.resume import RECIPE
from april.training.stop import StopSignals, exit_status, status_of

FAILURES = (
    RewardError,
    EngineError,
    EpisodeError,
    RejectionError,
    StalenessError,
    CheckpointError,
    JournalError,
    TrainingError,
    MemoryError,
    OSError,
    ValueError,
)
"""Expected failures of a run. Any other exception is a bug in april and shows its traceback."""


def run_trainer(recipe: Recipe, resume: bool = False) -> int:
    """Train, print the outcome, and return the exit status."""
    directory = Path(recipe.reporting.output)
    title = f"{recipe.algorithm.algorithm} on {recipe.task.name or recipe.task.path}"
    signals = StopSignals()
    # A run without a reader of its output saves its state and stops.
    output: Any = Output(sys.stdout, lambda _: signals.stop(signal.SIGPIPE))
    try:
        with Progress(recipe.training.steps, output, title=title) as progress, messages(progress.note, directory):
            _say_nothing_between_our_lines()
            summary = asyncio.run(train(recipe, resume, progress, signals=signals))
    except FAILURES as error:
        return _failed(f"{type(error).__name__}: {error}", 1, directory)
    except SystemExit as error:  # raised in a task of user code, outside the boundary that catches it
        return _failed(f"user code called sys.exit({error.code!r}) in a task of its own", 1, directory)
    except KeyboardInterrupt as interrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the next signal ends the process at once, without a traceback
        return _failed("given up before the run was saved", status_of(interrupt), directory)
    if summary is None:
        stopped = f"Stopped. To resume: april resume {directory}"
        # Standard output has no reader in this case; stderr may have one.
        fail(stopped) if output.broken else print(stopped, file=output)
        return exit_status(signals.number)
    _print_result(recipe, summary, directory, output)
    return 0


def _say_nothing_between_our_lines() -> None:
    transformers.disable_progress_bar()
    transformers.disable_default_handler()
    # Warnings of transformers then reach the root logger, and with it library.log.
    transformers.enable_propagation()


def _failed(message: str, status: int, directory: Path) -> int:
    fail(message)
    if (directory / RECIPE).is_file():
        fail(f"to resume the run: april resume {directory}")
    return status


def _print_result(recipe: Recipe, summary: dict[str, Any], directory: Path, output: Any) -> None:
    advice = advice_of_run(recipe, summary)
    for line in [*closing_lines(summary), *([advice] if advice else [])]:
        print(line, file=output)
    print(f"report: {directory / 'report.html'}", file=output)
