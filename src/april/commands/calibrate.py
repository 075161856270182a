"""`april calibrate RECIPE`: measure the recipe's engine and write a cost model."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from april.commands.arguments import read_options, read_recipe, ready_for_output
from april.commands.failure import fail
from april.config.error import ConfigError
from april.rollout.engine import EngineError
from april.simulation.cost_model import CostModel
from april.simulation.idle_engine import calibrate_recipe
from april.simulation.plan import refuse_speculation


@dataclass(kw_only=True)
class CalibrateOptions:
    """Measure the recipe's engine for seconds to minutes and write a cost model for april simulate.

    Measures the engine in the recipe's section [engine]: the embedded engine, running servers (urls), or servers that
    the command starts. Nothing else should use the engine during the measurement."""

    output: Path = Path("cost_model.json")
    """Output file of the cost model."""
    longest: int = 512
    """Longest prompt to prefill, in tokens."""
    repeats: int = 3
    """Repetitions of each measurement; the median is used."""

    def __post_init__(self) -> None:
        for name in ("longest", "repeats"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} {getattr(self, name)}: must be at least 1")
        if self.output.is_dir():
            raise ConfigError(f"--output {self.output}: this is a directory; name a file")


def run(args: list[str]) -> int:
    """`april calibrate RECIPE [OPTIONS] [FLAGS OF april train]`."""
    path, options, flags = read_options(CalibrateOptions, "april calibrate", args)
    recipe = read_recipe([path, *flags], "april calibrate")
    refuse_speculation(recipe.engine)
    ready_for_output(options.output.parent)
    try:
        measured = asyncio.run(calibrate_recipe(recipe, options.longest, options.repeats))
    except (EngineError, ValueError, OSError) as error:
        return fail(f"{type(error).__name__}: {error}")
    cost = measured.fit(f"measured: {recipe.engine.engine}, {recipe.model.path}")
    cost.save(options.output)
    _print_costs(cost)
    print(f"written: {options.output}")
    return 0


def _print_costs(cost: CostModel) -> None:
    largest = cost.decode_batches[-1]
    print(f"decode step: {1e3 * cost.base()[1]:.3g} ms alone, {1e3 * cost.base()[largest]:.3g} ms at {largest} samples")
    print(f"prefill: {cost.prefill_token_seconds * 1e6:.3g} us a token; a request: {cost.request_seconds * 1e3:.3g} ms")
    print(f"interrupt: {cost.interrupt_seconds * 1e3:.3g} ms; weight update: {cost.update_seconds * 1e3:.3g} ms")
    print(f"mean error of the fit: {', '.join(f'{name} {error:.1%}' for name, error in cost.errors.items())}")
