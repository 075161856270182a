"""Where a run that was stopped, or died, goes on: its newest checkpoint, and the journal from there.

Invariants:
- everything that is needed is read and compared with its checksums before anything is loaded or written;
- a damaged file is named, and nothing is done about it unless the user says so; then it is kept under another name.
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
from april.reporting.run_log import SUMMARY
from april.rollout.disk import free_name, write_whole
from april.rollout.journal import Journal
from april.rollout.journal_file import DamageError, repair_journal
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
RECIPE = "recipe.json"
JOB = "job"
"""The file that holds the id of torchrun's job, if the run goes on in one."""
Repair = Literal["none", "salvage", "rewind"]
"""What to do about the state that is there: take it as it is; leave out what is damaged; leave out what happened after
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
        "seed",
    ),
}
"""The settings, beside those of algorithm and adapters, that steps which are trained on again depend on."""


def newest_checkpoint(run: Path) -> Path | None:
    """The newest checkpoint of the run in directory `run`; None if it died before the first, with a journal."""
    found = checkpoints(run / "checkpoints")
    return found[-1] if found else None


def note_beginning(run: Path, recipe: Recipe) -> None:
    """Note that the run has begun, or goes on, by this recipe: there is something to resume from here on."""
    if (own := torchrun_id()) is not None:
        write_whole(run / JOB, own)
    write_whole(run / RECIPE, json.dumps(recipe.redacted(), indent=2))


def began_here(run: Path) -> bool:
    """Whether this job of torchrun's has begun or resumed the run in `run` before, so that its ranks start anew.

    What is on disk says so: how often torchrun starts ranks anew is counted on each machine by itself.
    """
    noted = [run / JOB, run / RECIPE]
    return all(path.is_file() for path in noted) and noted[0].read_text() == torchrun_id()


def saved_recipe(run: Path) -> Recipe:
    """The recipe that the run in `run` last went by.

    Raises:
        CheckpointError: there is no run, or its recipe cannot be read.
    """
    checkpoint = newest_checkpoint(run)
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
        CheckpointError, DamageError: something is damaged, and `repair` is "none"; the message says what to do.
        ConfigError: the run is going on in another process.
    """
    with lock_directory(run):
        checkpoint = yield from _whole_checkpoint(run, repair)
        mark = load_mark(checkpoint) if checkpoint else None
        journal = run / JOURNAL
        if repair == "rewind" and journal.exists():
            kept, _ = repair_journal(journal, mark, events=False)
            yield f"going back to {checkpoint.name if checkpoint else 'the beginning'}; what came after it is in {kept}"
        try:
            if mark is not None and not journal.exists():
                raise DamageError(f"{journal}: missing")
            again = steps_to_redo(run)
        except DamageError as error:
            if repair == "none":
                raise DamageError(
                    f"{error}\nTo go on with what is whole: april resume {run} --salvage, which goes back to "
                    f"{checkpoint.name if checkpoint else 'the beginning'} and on from there as far as the journal can "
                    "be read, and keeps the damaged file"
                ) from None
            kept, events = repair_journal(journal, mark)
            yield f"{error}; {events} events before that are whole, the damaged file is kept as {kept}"
            again = steps_to_redo(run)
        start = checkpoint.name if checkpoint else "the beginning"
        redone = f"; steps after it that are trained on again, from the journal: {again}" if again else ""
        yield f"going on from {start}{redone}"


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
                    f"{error}\nTo go on from the state before: april resume {run} --salvage, which goes back "
                    f"to {before} and on from there with the journal, and keeps the damaged checkpoint"
                ) from None
            damaged = found.pop()
            kept = damaged.rename(free_name(damaged, "damaged-"))
            yield f"{error}; going back to {before}, the damaged checkpoint is kept as {kept}"
    return None


def steps_to_redo(run: Path) -> int:
    """The steps after the newest checkpoint that the journal holds, and that will be trained on again.

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
    """Steps of the run in `run` if it has finished; 0 if it has not."""
    try:
        return int(json.loads((run / SUMMARY).read_text(encoding="utf-8"))["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def check_unchanged(run: Path, before: Recipe, after: Recipe) -> None:
    """Steps that are trained on again must be trained on as they were, or their tokens' versions would be untrue.

    Raises:
        ConfigError: there are such steps, and settings that they depend on differ.
    """
    old, new = before.to_dict(), after.to_dict()
    names = {**ALIKE, **{section: tuple(new[section]) for section in ("algorithm", "lora")}}
    if after.training.lr_schedule != "constant":
        names["training"] = (*ALIKE["training"], "steps")
    changed = [f"{s}.{n}" for s in names for n in names[s] if json.dumps(old[s][n]) != json.dumps(new[s][n])]
    if changed and (steps := steps_to_redo(run)):
        raise ConfigError(
            f"{', '.join(changed)}: cannot change yet: {steps} steps after the last checkpoint were not saved when the "
            "run died, and have to be trained on again as they were. Resume without this, stop the run with Ctrl-C, "
            "and resume it with the change; or go back to the checkpoint without those steps, by --rewind"
        )
