"""The user's own names: `my_env.py:Env`, `package.module:Env`.

Invariants:
- a name is looked for in one way everywhere, and what is wrong with it is said with the setting it stands in;
- loading a file twice, in one process or in two, gives the same thing.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def load_object(setting: str, path: str, folder: Path | None = None) -> Any:
    """What `path` names: `FILE.py:NAME` or `package.module:NAME`.

    A file is looked for in `folder` first (the recipe's), then in the current directory; so are modules, and what they
    import.

    Args:
        setting: whose value `path` is, for messages.

    Raises:
        ValueError: there is no such file, module or name, or importing it fails; the message names the setting.
    """
    place, _, name = path.partition(":")
    if not place or not name:
        raise ValueError(f'{setting} = {path!r}: must be "FILE.py:NAME" or "package.module:NAME"')
    folders = [folder.resolve()] if folder is not None else []
    folders.append(Path.cwd())
    for each in reversed(folders):
        if str(each) not in sys.path:
            sys.path.insert(0, str(each))
    module = _file(setting, path, place, folders) if place.endswith(".py") else _module(setting, path, place)
    target: Any = module
    for attribute in name.split("."):
        if not hasattr(target, attribute):
            raise ValueError(f"{setting} = {path!r}: {module.__file__} has no {attribute!r}")
        target = getattr(target, attribute)
    return target


def _module(setting: str, path: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise ValueError(
                f"{setting} = {path!r}: there is no module {error.name!r}, neither beside the recipe, nor in the "
                "current directory, nor installed"
            ) from None
        raise ValueError(f"{setting} = {path!r}: {error}") from error
    except Exception as error:  # whatever the user's module does when it is imported
        raise ValueError(f"{setting} = {path!r}: importing it failed: {type(error).__name__}: {error}") from error


def _file(setting: str, path: str, place: str, folders: list[Path]) -> ModuleType:
    found = next((file for folder in folders if (file := (folder / place)).is_file()), None)
    if found is None:
        where = " or ".join(os.path.relpath(folder) for folder in dict.fromkeys(folders))
        raise ValueError(f"{setting} = {path!r}: there is no file {place} in {where}")
    if str(found.parent) not in sys.path:
        sys.path.insert(0, str(found.parent))
    name = f"april.user.{found.resolve()}"  # of its own: a file may be called like a package
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, found)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, Exception):
            raise ValueError(f"{setting} = {path!r}: importing it failed: {type(error).__name__}: {error}") from error
        raise
    return module
