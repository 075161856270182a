"""Container engines of this machine: which one is usable, and the command line that runs a program in a container.

Invariant: an engine is usable only if its client reports so; an executable alone is not enough.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

ENGINES = ("docker", "podman", "apptainer", "singularity")
"""In the order in which they are preferred."""
PROBES = {"docker": ("version", "--format", "{{.Server.Version}}"), "podman": ("info",)}
"""Commands that fail where the engine cannot start a container; the others have only a client, and no service."""
PROBE_SECONDS = 30.0


def usable_engine(wanted: str = "", purpose: str = "environment.image") -> str:
    """Return the container engine to use.

    Args:
        wanted: name of the engine; "": the first usable one.
        purpose: setting that needs it, for the message.

    Raises:
        ValueError: this machine has none; the message contains the reason for each.
    """
    names = (wanted,) if wanted else ENGINES
    faults = {name: engine_fault(name) for name in names}
    for name, fault in faults.items():
        if fault is None:
            return name
    known = {name: fault for name, fault in faults.items() if fault != ABSENT}
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
    """

    engine: str
    image: str
    name: str

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
        if self.engine in ("docker", "podman"):
            options = [f"--env={name}" for name in variables]
            options += [f"--volume={path}:{path}:ro" for path in mounts]
            user = [f"--user={os.getuid()}:{os.getgid()}"] if self.engine == "docker" else []
            return [
                *(self.engine, "run", "--rm", "--interactive", "--init", f"--name={self.name}", "--network=host"),
                *user,
                *(f"--volume={folder}:{folder}", f"--workdir={folder}", *options, self.image, *command),
            ]
        # Apptainer passes its own environment on; --cleanenv with the prefix APPTAINERENV_ selects variables.
        bound = [f"--bind={path}:{path}:ro" for path in mounts]
        contained = ("--containall", "--cleanenv", f"--bind={folder}:{folder}", f"--pwd={folder}")
        return [self.engine, "exec", *contained, *bound, self.image, *command]

    def environment(self, variables: dict[str, str]) -> dict[str, str]:
        """Return the environment of the engine's client, such that the program gets `variables`."""
        if self.engine in ("docker", "podman"):
            return variables
        prefix = f"{self.engine.upper()}ENV_"
        return {prefix + name: value for name, value in variables.items()}

    async def remove(self) -> None:
        """End the container after its client was ended; without effect if that has ended it already."""
        if self.engine not in ("docker", "podman"):
            return  # the client is the parent of the program
        removing = await asyncio.create_subprocess_exec(
            *(self.engine, "rm", "--force", self.name),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        await removing.wait()
