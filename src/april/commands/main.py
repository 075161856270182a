"""The command line: `april COMMAND`, each command in the file of its name.

Invariant: a user's mistake ends in one clear line on stderr and exit code 2, without a traceback and before anything
expensive has started; a run that fails later says how to go on with it.
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
from april.engines.cluster.head import leave
from april.extras import missing_package
from april.training.stop import exit_status, status_of, unwind_on_signals

COMMANDS = {
    "train": ("RECIPE", "train a policy by reinforcement learning"),
    "resume": ("DIR", "go on with a run that was stopped, or died"),
    "check": ("RECIPE", "a dry run: devices, memory, engines, batches and data"),
    "memory": ("RECIPE", "what each process of a run will hold, by part"),
    "doctor": ("", "versions, GPUs and servers of this machine, and remedies"),
    "cluster": ("check RECIPE", "which engines and ranks fit onto which nodes of a cluster"),
    "compare": ("RECIPE", "the same recipe synchronous and partial, side by side"),
    "profile": ("RECIPE", "whether partial rollouts are worth it, by pure rollouts"),
    "calibrate": ("RECIPE", "measure the recipe's engine, for simulate"),
    "simulate": ("RECIPE", "what the recipe would do on a cluster, in virtual time"),
    "report": ("DIR", "write a run's HTML report anew"),
    "push": ("DIR", "upload a run's newest checkpoint to the Hugging Face hub"),
    "algorithms": ("", "what a recipe can name, with settings and sources"),
}
"""What each takes first, and what it does. `april.commands.NAME.run` runs it."""


def main() -> None:
    """Run a command of `sys.argv` and exit with its status; without a word if nobody reads what it prints, as behind
    `| head`. Signals end it without a traceback."""
    unwind_on_signals()
    _prepare_output()
    try:
        status = run(sys.argv[1:])
    except KeyboardInterrupt as interrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the next one ends the process at once, without a traceback
        fail("interrupted")
        status = status_of(interrupt)
    except BrokenPipeError:
        if not _unread():
            raise
        status = 0
    if _unread():
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush
        status = status or exit_status(signal.SIGPIPE)
    sys.stdout.flush()
    leave(status)
    raise SystemExit(status)


def _prepare_output() -> None:
    """Let whatever is printed be printed: nowhere if a file is closed, and escaped where its encoding lacks it."""
    for name in ("stdout", "stderr"):
        file = getattr(sys, name)
        if file is None:  # as after `>&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(file, TextIOWrapper):
            file.reconfigure(errors="backslashreplace")


def _unread() -> bool:
    """Whether standard output is a pipe that is no longer read, or a terminal that is gone."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):  # no file, as where tests capture it
        return False
    return bool(poll.poll(0))


def run(args: list[str]) -> int:
    """Run the command that `args` begin with, and return its exit status."""
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
    """The help of `april` itself."""
    lines = [f"  {f'{name} {argument}':<18} {purpose}" for name, (argument, purpose) in COMMANDS.items()]
    return "\n".join(
        (
            "april: active partial rollouts for reinforcement learning of language models\n",
            "usage: april COMMAND [OPTIONS]\n",
            "commands:",
            *lines,
            "\napril COMMAND --help says more about each; april --version prints the version.",
        )
    )
