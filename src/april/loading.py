"""Loads objects of the user's code by name: `my_rewards.py:score`, `package.module:NAME`.

Invariants:
- rewards, environments and tools are looked up in one way, and an error names the setting;
- loading a file twice, in one process or in two, gives the same module.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any


def load_object(setting: str, path: str, folder: Path | None = None) -> Any:
    """Return the object at `FILE.py:NAME` or `package.module:NAME`.

    Files, modules and their imports are searched for in `folder`, then in the current directory. A recipe's names of
    neighbouring files are absolute by then (`april.config.paths`).

    Args:
        setting: setting that holds `path`, for messages.

    Raises:
        ValueError: there is no such file, module or name, or importing it fails; the message names the setting.
    """
    place, _, name = path.partition(":")
    if not place or not name:
        raise ValueError(f'{setting} = {path!r}: must be "FILE.py:NAME" or "package.module:NAME"')
    folders = [folder.resolve()] if folder is not None else []
    folders.append(Path.cwd())
    for each in reversed(folders):
        _search_in(each)
    module = _file(setting, path, place, folders) if place.endswith(".py") else _module(setting, path, place)
    target: Any = module
    for attribute in name.split("."):
        if not hasattr(target, attribute):
            raise ValueError(f"{setting} = {path!r}: {getattr(module, '__file__', place)} has no {attribute!r}")
        target = getattr(target, attribute)
    return target


def importable(place: str) -> str:
    """Return the name under which the module of a file, `FILE.py`, or of a package can be imported from now on.

    Packages import such modules by their names, so files of different folders must have different names.
    """
    _search_in(Path.cwd())
    if not place.endswith(".py"):
        return place
    file = Path(place).resolve()
    _search_in(file.parent)
    return file.stem


def _search_in(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _module(setting: str, path: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise ValueError(
                f"{setting} = {path!r}: there is no module {error.name!r}, neither beside the recipe, nor in the "
                "current directory, nor installed"
            ) from None
        raise _failed(setting, path, error) from error
    except (Exception, SystemExit) as error:  # the user's module may raise anything when it is imported
        raise _failed(setting, path, error) from error


def _failed(setting: str, path: str, error: BaseException) -> ValueError:
    """Name the line of the user's file that raised `error` during the import."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen importlib")
    ]
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames[-1].filename != __file__ else ""
    return ValueError(f"{setting} = {path!r}: importing it failed: {type(error).__name__}: {error}{place}")


def _file(setting: str, path: str, place: str, folders: list[Path]) -> ModuleType:
    found = next((file.resolve() for folder in folders if (file := folder / place).is_file()), None)
    if found is None:
        where = " or ".join(dict.fromkeys(os.path.relpath(folder) for folder in folders))
        raise ValueError(f"{setting} = {path!r}: there is no file {place} in {where}")
    names, folder = [found.stem], found.parent
    while (folder / "__init__.py").is_file():  # a file of a package may import its neighbours relatively
        names, folder = [folder.name, *names], folder.parent
    _search_in(folder)
    if len(names) > 1:
        return _module(setting, path, ".".join(names))
    name = f"april.user.{found}"  # unique: a file may have the name of an installed package
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
        if isinstance(error, (Exception, SystemExit)):
            raise _failed(setting, path, error) from error
        raise
    return module
