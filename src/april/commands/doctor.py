"""`april doctor`: whether this machine and its environments are ready for a run, in a form to paste into a report.

Invariant: nothing that takes long is imported, and no GPU gets a context.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from april import __version__
from april.commands.help import parse
from april.engines import gpus
from april.engines.gpus import Gpu
from april.engines.servers.installed import SAME_NCCL, installed, installed_in, nccl_versions
from april.extras import DISTRIBUTION, install_command
from april.rollout.engine import EngineError

DESCRIPTION = """List Python, torch, GPUs and their memory, NCCL, flash-attn and the inference servers on this machine,
with a remedy for each fault. Exit status 1 if there is a fault.

The output is meant to be pasted into a bug report; it names no path but those given."""
TESTED = {"vllm": ">=0.32,<0.33", "sglang": "==0.5.23"}
"""Server versions that april is tested with."""
SERVERS = {"vllm": "vLLM", "sglang": "SGLang"}
BUSY = 0.1
"""Share of a GPU's memory that other processes may hold without a remark."""
COLOURS = {"ok": "green", "note": "yellow", "fault": "bold red"}


@dataclass(kw_only=True)
class DoctorOptions:
    """Environments to inspect.

    Args:
        server_python: Interpreter of the environment that the servers are installed in (engine.server_python); unset:
            the one that april is in.
    """

    server_python: Path | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table: a component, its state, and the remedy."""

    name: str
    text: str
    remedy: str = ""
    state: Literal["ok", "note", "fault"] = "ok"


def run(args: list[str]) -> int:
    """`april doctor [--server-python PYTHON]`."""
    options: DoctorOptions = parse(DoctorOptions, "april doctor", DESCRIPTION, args)
    found = list(findings(options.server_python))
    show(found)
    return int(any(finding.state == "fault" for finding in found))


def show(found: list[Finding], console: Console | None = None) -> None:
    """Print the findings as a table."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for column in ("", "found", "state", "remedy"):
        table.add_column(column, overflow="fold")
    for finding in found:
        state = Text(finding.state, style=COLOURS[finding.state])
        table.add_row(finding.name, finding.text, state, finding.remedy)
    (console or Console(highlight=False)).print(table)


def findings(server_python: Path | None = None) -> Iterator[Finding]:
    """Yield the findings in the order of the table."""
    own = installed()
    yield Finding("april", f"{__version__}, {platform.system()} {platform.machine()}")
    yield _python(own)
    try:
        found, problem = gpus.visible(), None
    except EngineError as error:
        found, problem = [], Finding("GPUs", "not counted", str(error), "fault")
    yield from _torch(own, found)
    yield from [problem] if problem else _gpus(found, own)
    yield _nccl(own, found)
    yield _flash_attn(own, found)
    theirs, where = own, ""
    if server_python is not None:
        where = " of the servers"
        try:
            theirs = installed_in(str(server_python))
        except OSError as error:
            yield Finding("servers", str(error), "name the interpreter of their environment", "fault")
            return
        yield Finding(f"torch{where}", _torch_text(theirs) if "torch" in theirs else "not installed")
    yield from _servers(theirs, server_python is not None)
    if server_python is not None:
        yield from _same_nccl(own, theirs)


def _python(own: dict[str, str]) -> Finding:
    if Version(own["python"]) < Version("3.11"):
        return Finding("Python", own["python"], "install Python 3.11 or newer", "fault")
    return Finding("Python", own["python"])


def _torch(own: dict[str, str], found: list[Gpu]) -> Iterator[Finding]:
    if "torch" not in own:
        yield Finding("torch", "not installed", f"to train: {install_command('train')}", "fault")
    elif found and not (own.keys() & {"cuda", "rocm"}):
        remedy = "install the build of torch for these GPUs (pytorch.org, Get started)"
        yield Finding("torch", _torch_text(own), remedy, "fault")
    else:
        yield _in_range("torch", _torch_text(own), own["torch"])
    if "transformers" in own:
        yield _in_range("transformers", own["transformers"], own["transformers"])


def _torch_text(versions: dict[str, str]) -> str:
    built = [f"{title} {versions[name]}" for name, title in (("cuda", "CUDA"), ("rocm", "ROCm")) if name in versions]
    return f"{versions['torch']}, for {' and '.join(built) or 'the CPU'}"


def _in_range(name: str, text: str, version: str) -> Finding:
    """Return whether april's requirements allow this version of a package."""
    wanted = requirements().get(name, SpecifierSet())
    if Version(version) in wanted:
        return Finding(name, text)
    return Finding(name, text, f"install a version that april takes: {name}{wanted}", "fault")


def requirements() -> dict[str, SpecifierSet]:
    """Return the version specifiers in april's metadata by package; the first if several extras name a package."""
    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:  # april on PYTHONPATH alone
        return {}
    found: dict[str, SpecifierSet] = {}
    for requirement in map(Requirement, lines):
        found.setdefault(requirement.name, requirement.specifier)
    return found


def _gpus(found: list[Gpu], own: dict[str, str]) -> Iterator[Finding]:
    if not found:
        yield Finding("GPUs", "none is visible: april works on the CPU")
    for gpu in found:
        free, total = gpu.free / 1e9, gpu.total / 1e9
        text = f"{gpu.name}, {free:.1f} of {total:.1f} GB free" if total else gpu.name or "memory unknown"
        if free < (1 - BUSY) * total:
            remedy = "another process holds memory: nvidia-smi or amd-smi names it"
            yield Finding(f"GPU {gpu.id}", text, remedy, "note")
        else:
            yield Finding(f"GPU {gpu.id}", text)
    driver = gpus.driver_cuda() if found and "cuda" in own else None
    # Within a major version of CUDA, older drivers run newer minor versions.
    if driver is not None and int(own["cuda"].partition(".")[0]) > driver[0]:
        text = f"supports CUDA {driver[0]}.{driver[1]}, and torch was built for {own['cuda']}"
        yield Finding("driver", text, f"update the driver, or install torch for CUDA {driver[0]}", "fault")
    elif driver is not None:
        yield Finding("driver", f"supports CUDA {driver[0]}.{driver[1]}")


def _nccl(own: dict[str, str], found: list[Gpu]) -> Finding:
    if "nccl" in own or not found:
        return Finding("NCCL", own.get("nccl", "none, and none is needed without GPUs"))
    if "rocm" in own:
        return Finding("NCCL", "RCCL, which torch brings")
    return Finding("NCCL", "no package of it", "ranks and weight_transfer = broadcast need that of torch", "note")


def _flash_attn(own: dict[str, str], found: list[Gpu]) -> Finding:
    if "flash-attn" in own or not found:
        return Finding("flash-attn", own.get("flash-attn", "none, and none is needed without GPUs"))
    return Finding("flash-attn", "not installed", "PyTorch's own kernels are used", "note")


def _servers(versions: dict[str, str], apart: bool) -> Iterator[Finding]:
    there = [name for name in SERVERS if name in versions]
    for name in there:
        if Version(versions[name]) in SpecifierSet(TESTED[name]):
            yield Finding(SERVERS[name], versions[name])
        else:
            remedy = f"april was tested with {name}{TESTED[name]}: install that"
            yield Finding(SERVERS[name], versions[name], remedy, "fault")
    if not there:
        text = "neither vLLM nor SGLang is installed there" if apart else "neither vLLM nor SGLang is installed here"
        remedy = "name their environment's Python with --server-python, or use the embedded engine"
        yield Finding("servers", text, remedy, "fault" if apart else "note")


def _same_nccl(own: dict[str, str], theirs: dict[str, str]) -> Iterator[Finding]:
    if versions := nccl_versions(own, theirs):
        ours, other = versions
        text = f"{other} in the servers' environment, {ours} in april's: they do not connect"
        yield Finding("NCCL of both", text, SAME_NCCL, "fault")
