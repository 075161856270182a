"""Command-line arguments from dataclasses, and help texts that fit the terminal."""

from __future__ import annotations

import io
import itertools
import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from difflib import get_close_matches
from typing import Any

import tyro

from april.commands.tables import TABLES
from april.config.error import ConfigError

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

    Raises:
        ConfigError: a flag is unknown, has no value, or has a value that it cannot have.
    """
    given: dict[str, Any] = {"registry": TABLES} | ({} if default is None else {"default": default})
    if help_asked_for(args):
        help = "".join(_readable(_help(kind, program, given)))
        print(f"usage: {program} [OPTIONS]\n\n{wrapped(description)}\n\n{help}", end="")
        raise SystemExit(0)
    printed = _boxes()
    try:
        with redirect_stdout(printed), redirect_stderr(printed):
            parsed, unknown = tyro.cli(kind, prog=program, args=args, return_unknown_args=True, **given)
    except SystemExit:
        raise ConfigError(f"command line: {_problem(printed)}") from None
    if unknown and not rest:
        flag = unknown[0].partition("=")[0]
        known = re.findall(r"--[a-z][\w.-]*", _help(kind, program, given))
        # Most flags of `april train` are settings without the name of their section.
        short = f"--{flag.rpartition('.')[2]}"
        near = [short] if short in known else get_close_matches(flag, known, n=1, cutoff=0.7)
        remedy = f"did you mean {near[0]}?" if near else f"{program} --help lists the options"
        raise ConfigError(f"command line: there is no option {flag}; {remedy}")
    return (parsed, unknown) if rest else parsed


def _boxes() -> io.TextIOWrapper:
    """Return a file for what tyro prints: it draws boxes if the encoding has them."""
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8")


def _help(kind: type[Any], program: str, given: Mapping[str, Any]) -> str:
    printed = _boxes()
    with redirect_stdout(printed), suppress(SystemExit):
        tyro.cli(kind, prog=program, args=["--help"], description=" ", **given)
    printed.seek(0)
    return printed.read()


def _problem(printed: io.TextIOWrapper) -> str:
    """Return the problem that a box of tyro describes, in one line."""
    printed.seek(0)
    lines = [line.strip("│ ") for line in printed.read().splitlines()]
    text = " ".join(itertools.takewhile(lambda line: not line.startswith("──"), lines[1:]))
    return text.removeprefix("Error parsing ")


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
