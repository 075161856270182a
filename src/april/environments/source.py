"""From settings to environments.

Invariants:
- errors in the settings are found before the run begins: a source makes one environment when it is made;
- a source pickles as the settings it was made from, so that a worker process makes its own environments.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from april.environments.tools import Schema, ToolClassEnvironment, ToolEnvironment, ToolError
from april.extras import missing_package
from april.loading import load_object
from april.rollout.episodes.environment import Environment
from april.secrets import redacted

OPENENV = "openenv:"
"""Beginning of a path that is the URL of an OpenEnv server."""


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """The environment settings of a recipe.

    Args:
        path: `FILE.py:NAME` or `package.module:NAME`: a class with `reset` and `step`, or one with `reset` and public
            methods that are tools, or a function that returns such an object; or `openenv:URL`.
        tools: functions that are tools, in place of `path`: `FILE.py:NAME,NAME,…`.
        params: constructor arguments of the class.
        folder: folder that is searched first for files.
    """

    path: str = ""
    tools: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    folder: str = "."


class EnvironmentSource:
    """Environments of one kind: `source()` makes one.

    Attributes:
        tools: the schemas that the chat template is given.

    Raises:
        ValueError: a setting is wrong, or no environment can be made; the message names the setting.
    """

    def __init__(self, spec: EnvironmentSpec) -> None:
        if bool(spec.path) == bool(spec.tools):
            raise ValueError("path: name an environment, or functions in tools; one of the two")
        self.spec = spec
        self._make = self._of_tools() if spec.tools else self._of_path()
        self.tools: Sequence[Schema] = []
        made = self._made()
        if isinstance(made, ToolEnvironment):
            self.tools = list(made.toolbox.schemas.values())
        # An async `close` cannot be awaited here.
        if not inspect.iscoroutinefunction(close := getattr(made, "close", None)) and close is not None:
            with suppress(Exception):  # it has not begun: nothing is lost
                close()

    def __reduce__(self) -> tuple[type[EnvironmentSource], tuple[EnvironmentSpec]]:
        return EnvironmentSource, (self.spec,)

    def __call__(self) -> Environment:
        return self._make()

    def _made(self) -> Environment:
        try:
            return self._make()
        except ToolError as error:
            raise ValueError(f"{self._named}: {error}") from None
        except ModuleNotFoundError as error:
            raise ValueError(f"{self._named}: {error}") from None
        except Exception as error:  # whatever the user's class does when it is made
            given = json.dumps(redacted(dict(self.spec.params)), default=str)
            raise ValueError(
                f"{self._named}: making one with params {given} failed: {type(error).__name__}: {error}"
            ) from error

    @property
    def _named(self) -> str:
        return f"tools = {self.spec.tools!r}" if self.spec.tools else f"path = {self.spec.path!r}"

    def _of_tools(self) -> Callable[[], Environment]:
        place, _, names = self.spec.tools.partition(":")
        functions = {}
        for name in filter(None, map(str.strip, names.split(","))):
            functions[name] = load_object("tools", f"{place}:{name}", Path(self.spec.folder))
        if not functions:
            raise ValueError(f'{self._named}: must be "FILE.py:NAME,NAME,…"')
        if self.spec.params:
            raise ValueError("params: go with path; functions in tools have none")
        return partial(ToolEnvironment, functions)

    def _of_path(self) -> Callable[[], Environment]:
        if self.spec.path.startswith(OPENENV):
            try:
                from april.environments.openenv_server import OpenEnvServer
            except ModuleNotFoundError as error:
                raise ValueError(missing_package(error, self._named)) from None
            return partial(OpenEnvServer, self.spec.path.removeprefix(OPENENV), **self.spec.params)
        target = load_object("path", self.spec.path, Path(self.spec.folder))
        if not callable(target):
            raise ValueError(f"{self._named}: this is a {type(target).__name__}, which cannot be called to make one")
        return partial(_environment, partial(target, **self.spec.params))


def _environment(factory: Callable[[], Any]) -> Environment:
    """A new environment; an object without `step` is one of tools."""
    made = factory()
    if not callable(getattr(made, "step", None)):
        return ToolClassEnvironment(made)
    if not callable(getattr(made, "reset", None)):
        raise ToolError(f"{type(made).__name__} has no method reset: it is no environment")
    environment: Environment = made
    return environment
