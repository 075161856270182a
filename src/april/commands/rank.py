"""`python -m april.commands.rank`: one of several ranks, as `april.training.agent` starts them; nobody else does.

What to do is on standard input, as JSON: the recipe, and whether a run is resumed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback

from april.training.rank_process import LOST, RankLostError, Report


def main() -> int:
    report = Report()  # before the imports that take long
    payload = json.load(sys.stdin)
    leads = os.environ["RANK"] == "0"
    if not leads:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # who leads decides when the run ends

    from april.commands.failure import fail
    from april.commands.trainer import run_trainer
    from april.config.error import ConfigError
    from april.config.recipe import recipe_from_dict
    from april.training.crew import following
    from april.training.sharded import MemoryShortage

    recipe = recipe_from_dict(payload["recipe"])
    try:
        if leads:
            return run_trainer(recipe, payload["resume"])
        following(recipe)
        return 0
    except MemoryShortage as error:
        report.say(memory=error.tokens)
        return LOST
    except RankLostError as error:
        report.say(lost=str(error))
        return LOST
    except ConfigError as error:
        if not leads:  # what all ranks find wrong is said once
            report.say(failed=str(error))
        return fail(str(error))
    except Exception as error:
        traceback.print_exc()
        report.say(failed=f"{type(error).__name__}: {error}")
        return 1


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # what is left of torch's threads may wait for a rank that is gone
