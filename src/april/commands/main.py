"""The command line: `april COMMAND`, each command in the file of its name.

Invariant: a user's mistake ends in one clear line on stderr and exit code 2, without a traceback and before anything
expensive starts. The error message of a run that fails later contains the command that resumes it.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from io import TextIOWrapper

from april import __version__
from april.commands.failure import fail
from april.config.error import ConfigError
from april.engines.ray.head import exit_if_head_hangs
from april.extras import missing_package
from april.training.stop import exit_status, status_of, unwind_on_signals

COMMANDS = {
    "train": ("RECIPE", "train a policy by reinforcement learning"),
    "resume": ("DIR", "resume a run that was stopped or died"),
    "check": ("RECIPE", "a dry run: devices, memory, engines, batches and data"),
    "memory": ("RECIPE", "memory of each process of a run, by part"),
    "doctor": ("", "versions, GPUs and servers of this machine, and remedies"),
    "cluster": ("check RECIPE", "check the engines and ranks that fit onto a cluster"),
    "compare": ("RECIPE", "compare synchronous and partial rollouts of a recipe"),
    "profile": ("RECIPE", "measure whether partial rollouts pay, without training"),
    "calibrate": ("RECIPE", "measure the recipe's engine, for simulate"),
    "simulate": ("RECIPE", "predict throughput and staleness in virtual time"),
    "report": ("DIR", "rewrite a run's HTML report"),
    "push": ("DIR", "upload a run's newest checkpoint to the Hugging Face hub"),
    "algorithms": ("", "list algorithms, corrections and rewards, with sources"),
}
"""First argument and purpose of each command; `april.commands.NAME.run` runs it."""


def main() -> None:
    """Run the command in `sys.argv` and exit with its status.

    A closed pipe on standard output (as with `| head`) is not an error. Signals end the command without a traceback.
    """
    unwind_on_signals()
    _prepare_output()
    try:
        status = run(sys.argv[1:])
    except KeyboardInterrupt as interrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the next signal ends the process at once, without a traceback
        fail("interrupted")
        status = status_of(interrupt)
    except BrokenPipeError:
        # A pipe other than standard output has broken, for example to a server: that is an error.
        if not _unread():
            raise
        status = 0
    if _unread():
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush
        status = status or exit_status(signal.SIGPIPE)
    sys.stdout.flush()
    exit_if_head_hangs(status)
    raise SystemExit(status)


def _prepare_output() -> None:
    """Make printing safe: discard output to closed files, and escape characters that an encoding lacks."""
    for name in ("stdout", "stderr"):
        file = getattr(sys, name)
        if file is None:  # as after `>&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(file, TextIOWrapper):
            file.reconfigure(errors="backslashreplace")


def _unread() -> bool:
    """Return whether standard output is a pipe without a reader, or a terminal that is gone."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):  # not a file, for example captured by a test
        return False
    return bool(poll.poll(0))


def run(args: list[str]) -> int:
    """Run the command named by the first argument, and return its exit status."""
    command, *rest = args or ["--help"]
    if command in ("-h", "--help"):
        print(usage())
        return 0
    if command == "--version":
        print(f"april {__version__}")
        return 0
    if command not in COMMANDS:
        return fail(f"there is no command {command!r}; {_nearest(command)}")
    try:
        os.getcwd()
    except FileNotFoundError:
        return fail("the current directory no longer exists: change to one that does")
    try:
        run_command: Callable[[list[str]], int] = import_module(f"april.commands.{command}").run
    except ModuleNotFoundError as error:
        return fail(missing_package(error, f"april {command}"))
    try:
        return run_command(rest)
    except ConfigError as error:
        return fail(str(error))


def _nearest(command: str) -> str:
    near = get_close_matches(command, COMMANDS, n=1)
    return f"did you mean {near[0]}?" if near else "april --help lists the commands"


def usage() -> str:
    """Return the help of `april` itself."""
    lines = [f"  {f'{name} {argument}':<18} {purpose}" for name, (argument, purpose) in COMMANDS.items()]
    return "\n".join(
        (
            "april: active partial rollouts for reinforcement learning of language models\n",
            "usage: april COMMAND [OPTIONS]\n",
            "commands:",
            *lines,
            "\napril COMMAND --help describes a command; april --version prints the version.",
        )
    )
