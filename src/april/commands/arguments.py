"""Command lines: a recipe, flags that override it, and a command's own options."""

from __future__ import annotations

import copy
import inspect
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

from april.commands.help import help_asked_for, parse
from april.config.checking import check_recipe
from april.config.error import ConfigError
from april.config.paths import anchor
from april.config.reading import load_recipe, setting_line
from april.config.recipe import Recipe
from april.config.settings.engine_settings import EngineSettings
from april.config.settings.model_settings import ModelSettings
from april.config.settings.rollout_settings import RolloutSettings

Options = TypeVar("Options")
FLAGS = (
    "Flags of april train may stand among these, and change the recipe; one that is listed here too is meant for april "
    "train after --."
)


def read_recipe(args: Sequence[str], program: str, description: str = "", loads: bool = True) -> Recipe:
    """Return the checked recipe that `RECIPE [FLAGS]` describe.

    Args:
        loads: whether the model will be loaded; else its configuration is enough.

    Raises:
        ConfigError: something about it is wrong; each line names the setting and where it stands.
    """
    path = Path(args[0]) if args and not args[0].startswith("-") else None
    flags = args[1:] if path else args
    written = load_recipe(path) if path else Recipe()
    # The recipe as written is kept, to find out which values a flag has changed.
    recipe = override(copy.deepcopy(written), flags, f"{program} {path or 'RECIPE'}", description)
    try:
        check_recipe(recipe, loads)
    except ConfigError as error:
        if path is None:
            raise
        anchor(written, Path.cwd())  # as `override` does, so that only values from flags differ
        lines = (_located(line, path, written, recipe) for line in str(error).splitlines())
        raise ConfigError("\n".join(lines)) from None
    return recipe


def override(recipe: Recipe, flags: Sequence[str], program: str, description: str) -> Recipe:
    """Return the recipe with the settings of the flags; paths in flags are relative to the current directory."""
    changed: Recipe = parse(Recipe, program, description, flags, default=recipe)
    anchor(changed, Path.cwd())
    return changed


def _located(problem: str, path: Path, written: Recipe, recipe: Recipe) -> str:
    """Return the problem with the line of the recipe that sets its setting, unless a flag overrides it."""
    name = problem.split(" ")[0].rstrip(":")
    setting = ".".join(name.split(".")[:2])
    with suppress(AttributeError):  # the problem does not start with the name of a setting
        value = attrgetter(setting)
        if value(written) != value(recipe):
            return f"command line: {problem}"
    line = setting_line(path, name)
    return f"{path}:{line}: {problem}" if line else problem


def read_options(kind: type[Options], program: str, args: Sequence[str]) -> tuple[str, Options, list[str]]:
    """Return the recipe's path, the command's own options, and the flags of `april train` (also after `--`).

    Raises:
        ConfigError: an option has a value that it cannot have, or no recipe is named.
    """
    path, own = (args[0], args[1:]) if args and not args[0].startswith("-") else (None, args)
    if path is None and not help_asked_for(args):
        raise ConfigError(f"name the recipe first: {program} RECIPE")
    own, flags = (own[: own.index("--")], own[own.index("--") + 1 :]) if "--" in own else (own, [])
    about = f"{inspect.getdoc(kind)}\n\n{FLAGS}"
    options, others = parse(kind, f"{program} {path or 'RECIPE'}", about, own, rest=True)
    return path or "", options, [*others, *flags]


def check_context(model: ModelSettings, rollout: RolloutSettings, engine: EngineSettings) -> None:
    """Check that a full response and a prompt fit into the context, by the model's configuration alone.

    Raises:
        ConfigError: they do not fit, or the configuration cannot be read.
    """
    from april.training.context import context_of, prompt_limit
    from april.training.memory_plan import read_configuration

    prompt_limit(rollout, engine, context_of(read_configuration(model.path)))


def ready_for_output(directory: Path) -> None:
    """Create the directory and check that it is writable, before the work rather than when its result would be lost.

    Raises:
        ConfigError: nothing can be written there.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigError(f"--output: nothing can be written to {directory}: {error.strerror}") from None
