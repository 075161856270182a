"""Arguments by dataclass, and a help that fits the terminal and says no more than a reader needs."""

from __future__ import annotations

import io
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout, suppress
from typing import Any

import tyro

from april.commands.tables import TABLES

HELP = {"-h", "--help"}
NOISE = re.compile(r"\{None\}\||\{None,|\|?\{None\}| ?\(default: (None|''|)\)")
"""What a setting shows that may be left unset: its docstring says what that means."""
SAID = {"{None,": "{"}


def parse(
    kind: type[Any], program: str, description: str, args: Sequence[str], default: Any = None, rest: bool = False
) -> Any:
    """What `tyro.cli` makes of the arguments; with --help among them, the help instead.

    Args:
        default: what the flags change; None for the defaults of `kind`.
        rest: whether arguments that are not of `kind` are returned beside it.
    """
    given: dict[str, Any] = {"registry": TABLES} | ({} if default is None else {"default": default})
    if help_asked_for(args):
        said = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # tyro draws boxes if the encoding has them
        with redirect_stdout(said), suppress(SystemExit):
            tyro.cli(kind, prog=program, args=["--help"], description=" ", **given)
        said.seek(0)
        print(f"usage: {program} [OPTIONS]\n\n{wrapped(description)}\n\n{''.join(_readable(said.read()))}", end="")
        raise SystemExit(0)
    given |= {"return_unknown_args": True} if rest else {}
    return tyro.cli(kind, prog=program, args=args, description=description, **given)


def help_asked_for(args: Sequence[str]) -> bool:
    return bool(HELP & set(args))


def wrapped(text: str) -> str:
    """Paragraphs, filled to the width of the terminal."""
    width = min(shutil.get_terminal_size().columns, 100)
    return "\n\n".join(textwrap.fill(" ".join(part.split()), width) for part in text.split("\n\n"))


def _readable(help: str) -> Iterator[str]:
    """The boxes of tyro's help, without its noise, and as wide as before."""
    boxes = help[help.find("╭") :]
    width = len(boxes.partition("\n")[0])
    for line in re.sub(r"\(default: *│\n│ *None\)", "(default: None)", boxes).splitlines():
        if not line.startswith("│"):
            yield f"{line}\n"
            continue
        aligned = re.sub(r"\{None\}\|(\S+)(  +)(?=\S)", r"\1\2       ", line[1:].rstrip("│").rstrip())
        if text := NOISE.sub(lambda match: SAID.get(match[0], ""), aligned):
            yield f"│{text:<{width - 2}}│\n"
