"""april's extras: the extra that contains a package, and the command that installs it.

Invariant: only pyproject.toml assigns packages to extras; this module reads the metadata of the installed april.
"""

from __future__ import annotations

import json
import re
from importlib import metadata
from urllib.parse import unquote, urlsplit

DISTRIBUTION = "april-rl"
REQUIREMENT = re.compile(r"""([\w.-]+).*;.*extra == ["']([\w-]+)["']""")


def install_command(extra: str) -> str:
    """The command that adds `extra` to april, from where april itself was installed: a checkout, a file, git."""
    try:
        note = json.loads(metadata.distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")  # PEP 610
    except metadata.PackageNotFoundError:
        return f"pip install '.[{extra}]' in a checkout of april"
    address, commit = note.get("url"), note.get("vcs_info", {}).get("commit_id")
    if not address:
        return f"pip install '{DISTRIBUTION}[{extra}]'"
    if (folder := note.get("dir_info")) is not None:
        option = "-e " if folder.get("editable") else ""
        return f"pip install {option}'{unquote(urlsplit(address).path)}[{extra}]'"
    return f"pip install '{DISTRIBUTION}[{extra}] @ {f'git+{address}@{commit}' if commit else address}'"


def missing_package(error: ModuleNotFoundError, purpose: str) -> str:
    """Return the error message for a package that `purpose` needs and that is missing.

    Raises:
        ModuleNotFoundError: the error itself, if no extra brings that package.
    """
    package = (error.name or "").partition(".")[0]
    extra = extra_of(package)
    if extra is None:
        raise error
    return f"{purpose} needs {package}, which the extra {extra!r} brings: {install_command(extra)}"


def extra_of(package: str) -> str | None:
    """The first extra that brings a package, named as it is imported; None if none does."""
    try:
        requirements = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return None
    found = (match for requirement in requirements if (match := REQUIREMENT.match(requirement)))
    return next((match[2] for match in found if _normal(match[1]) == _normal(package)), None)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
