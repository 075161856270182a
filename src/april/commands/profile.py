"""`april profile RECIPE`: measure whether partial rollouts pay for a recipe, without training."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from april.commands.arguments import read_options, read_recipe, ready_for_output
from april.commands.failure import fail
from april.config.error import ConfigError
from april.rollout.engine import EngineError
from april.secrets import redact
from april.simulation.page import print_points
from april.simulation.plan import kept_caches
from april.simulation.profile import Profile, profile
from april.simulation.profile_page import lines_of, profile_page, trust_of


@dataclass(kw_only=True)
class ProfileOptions:
    """Roll out the recipe's prompts with its model and engine, without training. Measures response lengths, their
    similarity within a prompt and the time for which the longest responses delay a synchronous step; predicts the gain
    of partial rollouts at several N'; and recommends whether to use them.

    The command also measures the engine for seconds to minutes; nothing else should use the engine during that time.
    Continue with april simulate --cost-model OUTPUT/cost_model.json --lengths-from OUTPUT."""

    output: Path = Path("runs/profile")
    """Output directory of profile.html, profile.json, trace.jsonl and cost_model.json."""
    rollouts: int = 2
    """Synchronous steps of the recipe's batch size to roll out; the first of several is a warm-up."""
    simulated_steps: int = 32
    """Simulated steps per N'."""

    def __post_init__(self) -> None:
        if self.rollouts < 1:
            raise ConfigError(f"--rollouts {self.rollouts}: must be at least 1")
        if self.simulated_steps < 8:
            raise ConfigError(f"--simulated-steps {self.simulated_steps}: must be at least 8")


def run(args: list[str]) -> int:
    """`april profile RECIPE [OPTIONS] [FLAGS OF april train]`."""
    path, options, flags = read_options(ProfileOptions, "april profile", args)
    recipe = read_recipe([path, *flags], "april profile")
    if (options.output / "metrics.jsonl").exists():
        raise ConfigError(f"--output {options.output}: a run is there; choose another directory")
    ready_for_output(options.output)
    console = Console(stderr=True)
    try:
        with console.status("") as status:

            def on_status(what: str) -> None:
                status.update(what)
                if not console.is_terminal:  # without a live status line
                    print(what, file=sys.stderr, flush=True)

            found = profile(recipe, options.output, options.rollouts, options.simulated_steps, on_status)
    except (EngineError, ValueError, OSError) as error:
        return fail(f"{type(error).__name__}: {error}")
    _write(f"{Path(path).stem}: profile", options.output, found, kept_caches(recipe, found.chosen), args)
    return 0


def _write(title: str, output: Path, found: Profile, advice: str, args: list[str]) -> None:
    (output / "profile.html").write_text(profile_page(title, found), encoding="utf-8")
    document = {"command": redact(" ".join(["april", "profile", *args])), **found.to_dict()}
    (output / "profile.json").write_text(json.dumps(document, indent=2) + "\n")
    console = Console(highlight=False, markup=False)
    for line in lines_of(found):
        console.print(line)
    print_points(found.points, found.chosen)
    for line in ("", trust_of(found), "", found.verdict, *filter(None, [advice])):
        console.print(line)
    print(f"written: {output / 'profile.html'}")
