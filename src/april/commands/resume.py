"""`april resume DIR`: resume a run that was stopped or died."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from april.commands.arguments import override
from april.commands.failure import fail
from april.commands.start import check_ranks, start
from april.config.checking import check_recipe
from april.config.error import ConfigError
from april.config.recipe import Recipe
from april.rollout.journal.journal_file import JournalError
from april.training.checkpoint import CheckpointError, DamagedCheckpointError
from april.training.rank_protocol import is_rank_zero, torchrun_id
from april.training.resume import Repair, began_here, check_run, check_unchanged, finished_steps, saved_recipe
from april.training.resume_check import check_settings

OPTION = "--resume"
REPAIRS: dict[str, Repair] = {"--salvage": "salvage", "--rewind": "rewind"}
DESCRIPTION = """Resume the run in DIR from its newest checkpoint and the journal, with the run's own recipe.

Each flag below changes the setting of the same name from now on; the defaults shown are the run's values. Two further
flags repair the state on disk: --salvage leaves out damaged parts and keeps them under another name; --rewind returns
to the newest checkpoint and leaves out the journal after it.

april train --resume DIR does the same."""


def asked_for(args: Sequence[str]) -> bool:
    """Return whether flags of `april train` contain --resume."""
    return any(argument == OPTION or argument.startswith(f"{OPTION}=") for argument in args)


def arguments(args: Sequence[str]) -> list[str]:
    """Convert arguments of `april train --resume DIR` to arguments of `april resume`.

    Raises:
        ConfigError: no directory follows the option.
    """
    at = next(i for i, argument in enumerate(args) if asked_for([argument]))
    given = args[at].removeprefix(OPTION).removeprefix("=")
    directory, rest = ([given], args[at + 1 :]) if given else (args[at + 1 : at + 2], args[at + 2 :])
    if not directory or directory[0].startswith("-"):
        raise ConfigError("--resume needs the directory of a run")
    if at and not args[0].startswith("-"):
        raise ConfigError(
            f"a run is resumed with the recipe it began with: leave out {args[0]}, change settings by flags"
        )
    return [*directory, *args[:at], *rest]


def run(args: list[str]) -> int:
    """`april resume DIR [--salvage | --rewind] [FLAGS]`."""
    if args[:1] in (["-h"], ["--help"]):
        override(Recipe(), ["--help"], "april resume DIR", DESCRIPTION)
    if not args or args[0].startswith("-"):
        raise ConfigError("name the directory of a run first: april resume DIR")
    directory, flags = Path(args[0]), [flag for flag in args[1:] if flag not in REPAIRS]
    repairs = {REPAIRS[flag] for flag in args[1:] if flag in REPAIRS}
    if len(repairs) > 1:
        raise ConfigError("--salvage and --rewind: choose one")
    try:
        recipe = _prepared(directory, flags, repairs.pop() if repairs else "none")
    except (CheckpointError, JournalError) as error:
        return fail(str(error))
    return 0 if recipe is None else start(recipe, resume=True)


def _prepared(run: Path, flags: Sequence[str], repair: Repair) -> Recipe | None:
    """Check the state on disk, or repair it, and return the recipe to resume with; None if the run has finished."""
    before = saved_recipe(run)
    # The directory may have been moved since the run was written.
    before.reporting.output = str(run)
    recipe = override(copy.deepcopy(before), flags, f"april resume {run}", DESCRIPTION)
    check_recipe(recipe)
    check_ranks(recipe)
    if repair == "none" and (steps := finished_steps(run)) >= recipe.training.steps:
        print(f"{run} has finished after {steps} steps; to train further: april resume {run} --steps N")
        return None
    # All ranks share the files, so one rank checks and repairs them.
    if is_rank_zero():
        if began_here(run) and repair != "none":  # restarted ranks do not repeat the repair
            _note(
                f"torchrun's job {torchrun_id()} has begun or resumed {run} before, so this is a restart of its "
                f"ranks and --{repair} is not done again; if this is another job, give it an id of its own (--rdzv-id)"
            )
            repair = "none"
        if repair == "rewind":
            with suppress(DamagedCheckpointError):  # the run goes back to an older one, which is checked below
                check_settings(run, before, recipe, rewind=True)
        for line in check_run(run, repair):
            _note(line)
        # After the repair, which may have removed the steps that forbid a change.
        check_unchanged(run, before, recipe)
        check_settings(run, before, recipe)
    return recipe


def _note(message: str) -> None:
    print(f"april: {message}", file=sys.stderr)
