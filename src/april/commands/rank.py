"""Process of one rank, started by `april.training.rank_supervisor` (`python -m april.commands.rank`) or by torchrun.

The supervisor passes JSON on standard input: the recipe, and whether a run is resumed.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import traceback
from typing import TYPE_CHECKING, NoReturn

from april.training.rank_protocol import EXIT_RANK_LOST, RankLostError, StatusReporter, is_rank_zero
from april.training.stop import status_of, unwind_on_signals

if TYPE_CHECKING:
    from april.config.recipe import Recipe


def main() -> int:
    faulthandler.enable()  # a crash in native code leaves the stack of each thread in the rank's log
    report = StatusReporter()  # before the slow imports
    payload = json.load(sys.stdin)
    from april.config.recipe import recipe_from_dict

    return train(recipe_from_dict(payload["recipe"]), payload["resume"], report)


def train(recipe: Recipe, resume: bool, report: StatusReporter) -> int:
    """Run the rank named by the environment to the end of the run, and return the exit status."""
    from april.commands.failure import fail
    from april.commands.trainer import run_trainer
    from april.config.error import ConfigError
    from april.engines.device_memory import is_out_of_memory
    from april.training.distributed import run_follower
    from april.training.sharded import MemoryShortage

    go_on = f"resume the run: april resume {recipe.reporting.output}"
    try:
        if is_rank_zero():
            return run_trainer(recipe, resume)
        run_follower(recipe)
        return 0
    # The status of a lost rank makes the supervisor restart all ranks; the report carries the smaller budget.
    except MemoryShortage as error:
        advice = f"lower training.max_tokens_per_micro_batch (to {error.tokens}, say), then {go_on}"
        report.report(f"out of memory; {advice}", memory=error.tokens)
        return EXIT_RANK_LOST
    except RankLostError as error:
        report.report(f"lost another rank ({error}); unless torchrun restarts all ranks, {go_on}", lost=str(error))
        return EXIT_RANK_LOST
    except ConfigError as error:
        if not is_rank_zero():  # rank 0 alone reports an error that all ranks find
            report.report(failed=str(error))
        return fail(str(error))
    except Exception as error:
        traceback.print_exc()
        if is_out_of_memory(error):  # outside a pass over a batch, where smaller micro-batches would help
            why = f"ran out of memory: {str(error).partition(chr(10))[0] or type(error).__name__}"
            report.report(f"{why}; unless torchrun restarts all ranks, {go_on}", died=why)
            return EXIT_RANK_LOST
        report.report(failed=f"{type(error).__name__}: {error}")
        return 1


def leave(status: int) -> NoReturn:
    """End this process at once, because torch's threads may wait for a rank that is gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    unwind_on_signals()
    try:
        leave(main())
    except KeyboardInterrupt as interrupt:
        leave(status_of(interrupt))
