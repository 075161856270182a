"""Settings of the frameworks' launch scripts: the command of a shell script, or a file in YAML, and the values that it
gives, by the framework's own configuration classes where they can be imported.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import runpy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import yaml
from benchmarks.launch_scripts.shell_reader import ShellScript

from april.integrations.rules.rule import ValueOf
from april.integrations.settings import at


@dataclass(frozen=True)
class Launch:
    """A training run that a script starts.

    Args:
        script: path of the shell script or YAML file.
        arguments: of the training command, with april's lines.
    """

    script: Path
    arguments: Sequence[str]


@dataclass(frozen=True)
class LaunchFormat:
    """How a framework's runs are started.

    Args:
        entries: patterns of the word before the arguments, in the shell's command.
        lines: arguments that april's page asks for.
        read: makes the settings from arguments, with the framework's configuration classes.
        plain: makes the settings from arguments alone.
        module: module of the framework that `read` needs.
        without_samples: words of runs that generate no samples, such as supervised training.
    """

    entries: Sequence[str]
    lines: Sequence[str]
    read: Callable[[Launch], ValueOf]
    plain: Callable[[Launch], ValueOf]
    module: str
    without_samples: Sequence[str] = ()

    def settings(self, launch: Launch) -> ValueOf:
        """Return the values of a run's settings.

        Raises:
            ValueError: the framework does not accept the script.
        """
        if not self.whole:
            return self.plain(launch)

        def fail(_: argparse.ArgumentParser, message: str) -> NoReturn:
            raise ValueError(message)

        try:
            with patch.object(argparse.ArgumentParser, "error", fail):
                return self.read(launch)
        except (Exception, SystemExit) as error:
            raise ValueError(" ".join(f"{type(error).__name__}: {error}".split())[:300]) from error

    @property
    def whole(self) -> bool:
        """Whether the framework's configuration classes can be imported."""
        with suppress(ModuleNotFoundError, ValueError):
            return importlib.util.find_spec(self.module) is not None
        return False


def value(text: str) -> Any:
    """Return a value as a framework reads it from a command line."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def of_overrides(launch: Launch) -> ValueOf:
    """Read arguments of the form `name=value`."""
    given = {}
    for word in launch.arguments:
        name, equals, text = word.partition("=")
        if equals and not name.startswith("-"):
            given[name.lstrip("+~")] = value(text)
    return given.get


def of_verl_overrides(launch: Launch) -> ValueOf:
    """Read arguments of the form `name=value`, where `null` means unset."""
    value_of = of_overrides(launch)

    def or_default(name: str, default: Any) -> Any:
        given = value_of(name, None)
        return default if given is None else given

    return or_default


def of_flags(launch: Launch) -> ValueOf:
    """Read arguments of the form `--name value`; a name without a value is a switch."""
    given: dict[str, Any] = {}
    name = ""
    for word in launch.arguments:
        if word.startswith("--"):
            name, equals, text = word[2:].partition("=")
            given[name] = value(text) if equals else True
        elif name:
            given[name] = value(word) if given[name] is True else [given[name], word]
    return given.get


def of_namespace(parsed: argparse.Namespace) -> ValueOf:
    """Read flags with the names of argparse, `-` as `_`."""
    return lambda name, default: getattr(parsed, name.replace("-", "_"), default)


def verl(launch: Launch) -> ValueOf:
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    name, folder, overrides = "ppo_trainer", "", []
    words = iter(launch.arguments)
    for word in words:
        option, equals, text = word.partition("=")
        if option in ("--config-name", "--config-path"):
            text = text if equals else next(words, "")
            name, folder = (text.removesuffix(".yaml"), folder) if option == "--config-name" else (name, text)
        elif equals:
            overrides.append(word)
    spec = importlib.util.find_spec("verl")
    assert spec is not None, "verl is not installed"
    theirs = Path(str(spec.origin)).parent / "trainer" / "config"
    folders = [parent / folder for parent in launch.script.resolve().parents]
    found = next((path for path in folders if folder and path.is_dir() and (path / f"{name}.yaml").exists()), None)
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(found or theirs), version_base=None):
        if found:
            overrides.append(f"hydra.searchpath=[file://{theirs}]")
        config = compose(name, overrides)

    def value_of(name: str, default: Any) -> Any:
        selected = OmegaConf.select(config, name)
        return default if selected is None else selected

    return value_of


def openrlhf(launch: Launch) -> ValueOf:
    """Run OpenRLHF's start module up to its parser, which is not in a function."""

    class ParsedError(Exception):
        pass

    def parse(parser: argparse.ArgumentParser, *_: Any) -> Any:
        raise ParsedError(argparse.ArgumentParser.parse_known_args(parser, list(launch.arguments)))

    with patch.object(argparse.ArgumentParser, "parse_args", parse):
        try:
            runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")
        except ParsedError as parsed:
            known, unknown = parsed.args[0]
    flags = [word for word in unknown if word.startswith("--")]
    if flags:
        raise ValueError(f"unknown: {' '.join(flags)}")
    return lambda name, default: getattr(known, name, default)


def slime(launch: Launch) -> ValueOf:
    from slime.utils.arguments import get_slime_extra_args_provider

    parser = argparse.ArgumentParser(allow_abbrev=False)
    # Flags of Megatron that slime expects are in the parser already.
    for flag in ("--micro-batch-size", "--global-batch-size", "--seed"):
        parser.add_argument(flag)
    get_slime_extra_args_provider(None)(parser)
    for action in parser._actions:
        action.required = False
    return of_namespace(parser.parse_known_args(list(launch.arguments))[0])


def skyrl(launch: Launch) -> ValueOf:
    from skyrl.train.config import SkyRLTrainConfig

    config = SkyRLTrainConfig.from_cli_overrides([word for word in launch.arguments if "=" in word])
    return lambda name, default: at(config, name, default)


def areal(launch: Launch) -> ValueOf:
    from areal.api.cli_args import PPOConfig, parse_cli_args, to_structured_cfg
    from omegaconf import OmegaConf

    loaded, _ = parse_cli_args(["--config", str(launch.script), *launch.arguments])
    config = OmegaConf.to_object(to_structured_cfg(loaded, config_cls=PPOConfig))
    return lambda name, default: at(config, name, default)


def of_yaml(launch: Launch) -> ValueOf:
    """Read a file in YAML, and arguments of the form `name=value`."""
    tree = yaml.safe_load(launch.script.read_text()) or {}
    given = of_overrides(launch)

    def value_of(name: str, default: Any) -> Any:
        found: Any = tree
        for part in name.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return given(name, default if found is None else found)

    return value_of


FORMATS = {
    "verl": LaunchFormat(
        (r"verl\.trainer\.main_ppo", r"main_ppo\.py"),
        (
            "trainer.v1.trainer_mode=april",
            "+trainer.v1.april.max_staleness=5",
            "algorithm.rollout_correction.rollout_is=token",
        ),
        verl,
        of_verl_overrides,
        "verl",
    ),
    "slime": LaunchFormat(
        (r"train(?:_async)?\.py",),
        (
            "--rollout-function-path",
            "april.integrations.slime.rollout",
            "--data-source-path",
            "april.integrations.slime.DataSource",
            "--partial-rollout",
            "--use-tis",
        ),
        slime,
        of_flags,
        "slime.utils.arguments",
        ("--debug-train-only", "sft_rollout.generate_rollout"),
    ),
    "openrlhf": LaunchFormat(
        (r"openrlhf\.cli\.train_ppo_ray",),
        ("--algo.advantage.is_correction_level", "token"),
        openrlhf,
        of_flags,
        "vllm",  # OpenRLHF's start module imports it
    ),
    "skyrl": LaunchFormat(
        (r"skyrl\.train\.entrypoints\.main_base", r"examples\.[\w.]+\.main_(?!sft|generate|harbor_generate)\w+"),
        (
            "trainer.algorithm.off_policy_correction.tis_ratio_type=token",
            "generator.inference_engine.engine_init_kwargs.logprobs_mode=processed_logprobs",
        ),
        skyrl,
        of_overrides,
        "skyrl",
    ),
    "areal": LaunchFormat((), ("++scheduler.type=local",), areal, of_yaml, "areal"),
}
"""Formats of launch scripts by the name of the framework."""


def _sections(path: Path) -> set[str]:
    try:
        tree = yaml.safe_load(path.read_text())
    except yaml.YAMLError:
        return set()
    return set(tree) if isinstance(tree, Mapping) else set()


def launches(form: LaunchFormat, script: Path) -> Iterator[Launch]:
    """Yield the training runs that a script starts."""
    if script.suffix in (".yaml", ".yml"):
        # AReaL's files; those of supervised training have no rollouts.
        if not form.entries and {"rollout", "gconfig"} <= _sections(script):
            yield Launch(script, form.lines)
        return
    for command in ShellScript(script).commands if form.entries else ():
        for index, word in enumerate(command):
            entry = re.search(rf"(?:^|[\s/])(?:{'|'.join(form.entries)})(?:\s|$)", word)
            if entry:
                # `bash -c "python -m ... name=value"` has the command in one word.
                rest = [*word[entry.end() :].split(), *command[index + 1 :]]
                without = tuple(form.without_samples)
                if rest and not (without and any(given.endswith(without) for given in rest)):
                    yield Launch(script, [*rest, *form.lines])
                break
