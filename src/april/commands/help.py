"""Command-line arguments from dataclasses, and help texts that fit the terminal."""

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
"""Parts of tyro's help for optional settings, which their docstrings already explain."""
KEPT = {"{None,": "{"}


def parse(
    kind: type[Any], program: str, description: str, args: Sequence[str], default: Any = None, rest: bool = False
) -> Any:
    """Return the result of `tyro.cli`; with --help among the arguments, print the help and exit.

    Args:
        default: instance whose values the flags change; None for the defaults of `kind`.
        rest: also return the arguments that `kind` does not have.
    """
    given: dict[str, Any] = {"registry": TABLES} | ({} if default is None else {"default": default})
    if help_asked_for(args):
        printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # tyro draws boxes if the encoding has them
        with redirect_stdout(printed), suppress(SystemExit):
            tyro.cli(kind, prog=program, args=["--help"], description=" ", **given)
        printed.seek(0)
        print(f"usage: {program} [OPTIONS]\n\n{wrapped(description)}\n\n{''.join(_readable(printed.read()))}", end="")
        raise SystemExit(0)
    given |= {"return_unknown_args": True} if rest else {}
    return tyro.cli(kind, prog=program, args=args, description=description, **given)


def help_asked_for(args: Sequence[str]) -> bool:
    return bool(HELP & set(args))


def wrapped(text: str) -> str:
    """Return paragraphs filled to the width of the terminal."""
    width = min(shutil.get_terminal_size().columns, 100)
    return "\n\n".join(textwrap.fill(" ".join(part.split()), width) for part in text.split("\n\n"))


def _readable(help: str) -> Iterator[str]:
    """Yield the boxes of tyro's help without `NOISE`, with unchanged width."""
    boxes = help[help.find("╭") :]
    width = len(boxes.partition("\n")[0])
    # tyro may break a default at the border of its box.
    for line in re.sub(r"\(default: *│\n│ *None\)", "(default: None)", boxes).splitlines():
        if not line.startswith("│"):
            yield f"{line}\n"
            continue
        # `{None}|` has seven characters: the spaces keep the columns behind it in place.
        aligned = re.sub(r"\{None\}\|(\S+)(  +)(?=\S)", r"\1\2       ", line[1:].rstrip("│").rstrip())
        if text := NOISE.sub(lambda match: KEPT.get(match[0], ""), aligned):
            yield f"│{text:<{width - 2}}│\n"
