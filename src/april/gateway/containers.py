"""Container engines of this machine: which one is usable, and the command line that runs a program in a container.

Invariants:
- an engine is usable only if its client reports so; an executable alone is not enough;
- no folder that holds an image's own system is mounted over it;
- a removal that has begun is neither cancelled nor waited for without a limit, and a run that starts removes what an
  earlier process of the same run has left.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

ENGINES = ("docker", "podman", "apptainer", "singularity")
"""In the order in which they are preferred."""
BY_NAME = ("docker", "podman")
"""Engines whose service runs containers that have names; with the others the client is the parent of the program."""
PROBES = {"docker": ("version", "--format", "{{.Server.Version}}"), "podman": ("info",)}
"""Commands that fail where the engine cannot start a container; the others have only a client, and no service."""
PROBE_SECONDS = 30.0
REMOVE_SECONDS = 60.0
"""Time limit of an engine's client that removes containers, or lists them."""
SYSTEM = ("/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/proc", "/run", "/sbin", "/sys", "/usr/bin", "/usr/lib")
"""Folders of an image's system: neither they nor folders in them are mounted."""
WHOLE = ("/", "/home", "/opt", "/tmp", "/usr", "/usr/local", "/var", "/var/tmp")
"""Folders that are not mounted as a whole."""

logger = logging.getLogger(__name__)


def usable_engine(wanted: str = "", purpose: str = "environment.image") -> str:
    """Return the container engine to use.

    Args:
        wanted: name of the engine; "": the first usable one.
        purpose: setting that needs it, for the message.

    Raises:
        ValueError: this machine has none; the message contains the reason for each.
    """
    names = (wanted,) if wanted else ENGINES
    known = {}
    for name in names:
        if (fault := engine_fault(name)) is None:
            return name
        if fault != ABSENT:
            known[name] = fault
    reasons = "; ".join(f"{name}: {fault}" for name, fault in known.items()) or f"no {' or '.join(names)} in PATH"
    raise ValueError(f"{purpose} needs a container engine, and this machine has no usable one ({reasons})")


ABSENT = "not in PATH"


@cache
def engine_fault(name: str) -> str | None:
    """Return the reason in one line why an engine cannot be used, or None."""
    if shutil.which(name) is None:
        return ABSENT
    if name not in PROBES:
        return None
    try:
        done = subprocess.run([name, *PROBES[name]], capture_output=True, text=True, timeout=PROBE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    if done.returncode == 0:
        return None
    lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {done.returncode}"


class Container(NamedTuple):
    """A container for one program.

    Attributes:
        engine: a name of `ENGINES`.
        image: the image.
        name: name of the container; Docker and Podman remove a container by it.
        run: name of the run, by which a later process finds the container; "": none does.
    """

    engine: str
    image: str
    name: str
    run: str = ""

    def command(
        self, command: Sequence[str], folder: str, variables: Iterable[str], mounts: Iterable[str] = ()
    ) -> list[str]:
        """Return the command line that runs `command` in the container.

        The container has the host's network, so that it reaches the gateway on the loopback interface. Values of
        variables are not part of the command line: the engine's client reads them from its own environment.

        Args:
            folder: working directory, which is mounted.
            variables: names of environment variables to pass on.
            mounts: further files and folders, mounted read-only at the same place.
        """
        if self.engine in BY_NAME:
            options = [f"--env={name}" for name in variables]
            options += [f"--volume={path}:{path}:ro" for path in mounts]
            user = [f"--user={os.getuid()}:{os.getgid()}"] if self.engine == "docker" else []
            label = [f"--label={_label(self.run)}"] if self.run else []
            return [
                *(self.engine, "run", "--rm", "--interactive", "--init", f"--name={self.name}", "--network=host"),
                *(*user, *label),
                *(f"--volume={folder}:{folder}", f"--workdir={folder}", *options, self.image, *command),
            ]
        # Apptainer passes its own environment on; --cleanenv with the prefix APPTAINERENV_ selects variables.
        bound = [f"--bind={path}:{path}:ro" for path in mounts]
        contained = ("--containall", "--cleanenv", f"--bind={folder}:{folder}", f"--pwd={folder}")
        return [self.engine, "exec", *contained, *bound, self.image, *command]

    def environment(self, variables: dict[str, str]) -> dict[str, str]:
        """Return the environment of the engine's client, such that the program gets `variables`."""
        if self.engine in BY_NAME:
            return variables
        prefix = f"{self.engine.upper()}ENV_"
        return {prefix + name: value for name, value in variables.items()}

    async def remove(self) -> None:
        """End the container after its client was ended; without effect if that has ended it already."""
        if self.engine not in BY_NAME:
            return
        await _client(self.engine, "rm", "--force", self.name)


class Containers:
    """The containers of a run's programs.

    Args:
        engine: a name of `ENGINES`.
        image: their image.
    """

    def __init__(self, engine: str, image: str) -> None:
        self._engine = engine
        self._image = image
        self._run = ""
        self._removing: set[asyncio.Task[None]] = set()

    async def begin(self, run: str) -> None:
        """Remove the containers that an earlier process of the run has left."""
        self._run = run
        if self._engine in BY_NAME:
            listed = await _client(self._engine, "ps", "--all", "--quiet", f"--filter=label={_label(run)}")
            if names := listed.split():
                await _client(self._engine, "rm", "--force", *names)

    def new(self, name: str) -> Container:
        return Container(self._engine, self._image, name, self._run)

    async def remove(self, container: Container) -> None:
        """Remove a container; a caller that is cancelled leaves the removal to `close`."""
        removing = asyncio.create_task(container.remove())
        self._removing.add(removing)
        removing.add_done_callback(self._removing.discard)
        await asyncio.shield(removing)

    async def close(self) -> None:
        """Wait for the removals."""
        while self._removing:
            await asyncio.wait({*self._removing})


def mounted_folder(path: str) -> str:
    """Return the folder to mount for a file, with the files beside it, or for a folder.

    Raises:
        ValueError: the folder would hide the image's own.
    """
    whole = os.path.abspath(path)
    folder = whole if os.path.isdir(whole) else os.path.dirname(whole)
    if folder in WHOLE or any(folder == system or folder.startswith(f"{system}/") for system in SYSTEM):
        raise ValueError(
            f"environment.command: {path!r} would mount {folder} over the image's own; move it to a folder of its own"
        )
    return folder


def _label(run: str) -> str:
    return f"april.run={run}"


async def _client(engine: str, *words: str) -> str:
    """Return what an engine's client writes; failures and the time limit are logged."""
    try:
        process = await asyncio.create_subprocess_exec(
            *(engine, *words),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError as error:
        logger.warning("%s %s cannot be started: %s; containers may be left", engine, words[0], error.strerror)
        return ""
    try:
        written, _ = await asyncio.wait_for(process.communicate(), REMOVE_SECONDS)
        return written.decode(errors="replace")
    except TimeoutError:
        logger.warning("%s did not end within %s s: containers may be left", " ".join((engine, *words)), REMOVE_SECONDS)
        return ""
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
