"""Resumption of a run that was stopped or died, from its newest checkpoint and the journal after it.

Invariants:
- all files needed are read and compared with their checksums before anything is loaded or written;
- a damaged file is named in the error and is changed only on the user's request; it is kept under another name.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from april.config.error import ConfigError
from april.config.recipe import Recipe, recipe_from_dict
from april.disk import free_name, write_whole
from april.reporting.run_log import SUMMARY
from april.rollout.journal.journal import Journal
from april.rollout.journal.journal_file import DamageError, repair_journal
from april.training.checkpoint import (
    STATE,
    CheckpointError,
    DamagedCheckpointError,
    check_checkpoint,
    checkpoints,
    load_mark,
)
from april.training.rank_protocol import torchrun_id
from april.training.run_directory import lock_directory

JOURNAL = "journal"
"""The directory that holds the journal of a run."""
FORMER_JOURNAL = "journal.sqlite"
"""Journal of runs before format 8 of checkpoints."""
RECIPE = "recipe.json"
JOB = "job"
"""File with the id of the torchrun job that last started or resumed the run."""
Repair = Literal["none", "salvage", "rewind"]
"""Repair of the state on disk: "none" uses it as it is, "salvage" drops damaged parts, "rewind" drops everything after
the newest checkpoint."""
ALIKE = {
    "model": ("path", "dtype", "compute_dtype"),
    "rollout": ("max_response_length", "temperature", "top_p", "top_k", "min_p"),
    "training": (
        "updates_per_step",
        "learning_rate",
        "critic_learning_rate",
        "lr_schedule",
        "warmup_steps",
        "betas",
        "weight_decay",
        "max_grad_norm",
        "router_replay",
        "seed",
    ),
}
"""Settings outside the sections algorithm and lora on which retrained steps depend."""


def newest_checkpoint(run: Path) -> Path | None:
    """Return the newest checkpoint of the run in directory `run`; None if it died before its first one."""
    found = checkpoints(run / "checkpoints")
    return found[-1] if found else None


def note_beginning(run: Path, recipe: Recipe) -> None:
    """Record that the run has begun, or was resumed, with this recipe: from now on it can be resumed."""
    if (own := torchrun_id()) is not None:
        write_whole(run / JOB, own)
    write_whole(run / RECIPE, json.dumps(recipe.redacted(), indent=2))


def began_here(run: Path) -> bool:
    """Whether this torchrun job has begun or resumed the run in `run` before, so that this is a restart of its ranks.

    The files on disk decide: torchrun counts restarts on each machine separately.
    """
    noted = [run / JOB, run / RECIPE]
    return all(path.is_file() for path in noted) and noted[0].read_text() == torchrun_id()


def saved_recipe(run: Path) -> Recipe:
    """Return the recipe that the run in `run` last used.

    Raises:
        CheckpointError: there is no run, or its recipe cannot be read.
    """
    checkpoint = newest_checkpoint(run)
    # The recipe file may be damaged or lost; the checkpoint contains a copy.
    sources = [run / RECIPE, *([checkpoint / STATE] if checkpoint else [])]
    if not any(source.is_file() for source in sources):
        raise CheckpointError(f"{run}: no run to resume here; april train begins one")
    problem = ""
    for source in sources:
        try:
            settings = json.loads(source.read_text())
            return recipe_from_dict(settings["recipe"] if source.name == STATE else settings)
        except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
            problem = problem or f"{source}: cannot be read as a recipe: {str(error).splitlines()[0]}"
    raise CheckpointError(problem)


def check_run(run: Path, repair: Repair = "none") -> Iterator[str]:
    """Check the state of the run in `run`, and repair it by `repair`; yield a line for each repair, and one
    with the step from which the run resumes.

    Raises:
        CheckpointError, DamageError: a file is damaged and `repair` is "none"; the message names the remedy.
        ConfigError: another process is running the run.
    """
    with lock_directory(run):
        checkpoint = yield from _whole_checkpoint(run, repair)
        mark = load_mark(checkpoint) if checkpoint else None
        journal = run / JOURNAL
        if (run / FORMER_JOURNAL).exists() and not journal.exists():
            raise CheckpointError(
                f"{run / FORMER_JOURNAL}: an earlier version of april wrote this run, and this version cannot resume "
                "it: finish the run with the april that began it"
            )
        if repair == "rewind" and journal.exists():
            kept, _ = repair_journal(journal, mark, events=False)
            yield f"going back to {checkpoint.name if checkpoint else 'the beginning'}; what came after it is in {kept}"
        try:
            # The checkpoint was written with a journal. Without it, tokens sampled afterwards would be lost silently.
            if mark is not None and not journal.exists():
                raise DamageError(f"{journal}: missing")
            again = steps_to_redo(run)
        except DamageError as error:
            if repair == "none":
                raise DamageError(
                    f"{error}\nTo resume from the intact part: april resume {run} --salvage, which returns to "
                    f"{checkpoint.name if checkpoint else 'the beginning'}, replays the journal as far as it can be "
                    "read, and keeps the damaged file"
                ) from None
            kept, events = repair_journal(journal, mark)
            yield f"{error}; {events} events before that are whole, the damaged file is kept as {kept}"
            again = steps_to_redo(run)
        start = checkpoint.name if checkpoint else "the beginning"
        redone = f"; steps after it in the journal, which are retrained: {again}" if again else ""
        yield f"resuming from {start}{redone}"


def _whole_checkpoint(run: Path, repair: Repair) -> Generator[str, None, Path | None]:
    found = checkpoints(run / "checkpoints")
    while found:
        try:
            check_checkpoint(found[-1])
            return found[-1]
        except DamagedCheckpointError as error:
            before = found[-2].name if len(found) > 1 else "the beginning"
            if repair == "none":
                raise DamagedCheckpointError(
                    f"{error}\nTo resume from an earlier state: april resume {run} --salvage, which returns to "
                    f"{before}, replays the journal from there, and keeps the damaged checkpoint"
                ) from None
            damaged = found.pop()
            kept = damaged.rename(free_name(damaged, "damaged-"))
            yield f"{error}; going back to {before}, the damaged checkpoint is kept as {kept}"
    return None


def steps_to_redo(run: Path) -> int:
    """Return the number of steps in the journal after the newest checkpoint; a resumed run trains on them again.

    Raises:
        DamageError: the journal is damaged, or does not belong to the checkpoint.
    """
    checkpoint = newest_checkpoint(run)
    mark = load_mark(checkpoint) if checkpoint else None
    if mark is None and not (run / JOURNAL).exists():
        return 0
    with closing(Journal(run / JOURNAL)) as journal:
        journal.seek(mark)
        return journal.check()


def finished_steps(run: Path) -> int:
    """Return the number of steps of the run in `run` if it has finished; 0 otherwise."""
    try:
        return int(json.loads((run / SUMMARY).read_text(encoding="utf-8"))["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def check_unchanged(run: Path, before: Recipe, after: Recipe) -> None:
    """Check that retrained steps are trained with the same settings; otherwise their tokens' versions would be wrong.

    Raises:
        ConfigError: there are steps to retrain, and settings that they depend on differ.
    """
    old, new = before.to_dict(), after.to_dict()
    names = {**ALIKE, **{section: tuple(new[section]) for section in ("algorithm", "lora")}}
    if after.training.lr_schedule != "constant":
        names["training"] = (*ALIKE["training"], "steps")
    changed = [f"{s}.{n}" for s in names for n in names[s] if json.dumps(old[s][n]) != json.dumps(new[s][n])]
    if changed and (steps := steps_to_redo(run)):
        raise ConfigError(
            f"{', '.join(changed)}: cannot change yet: {steps} steps after the last checkpoint were not saved when the "
            "run died, and have to be retrained as they were. Resume without this, stop the run with Ctrl-C, "
            "and resume it with the change; or go back to the checkpoint without those steps, by --rewind"
        )
