"""Saves the figures of a benchmark in the script's folder, with the machine and versions that they were measured on."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum and maximum of repeated measurements."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "runs": len(values)}


def machine() -> dict[str, Any]:
    """Processor, cores and versions."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    packages = ("april-rl", "torch", "transformers", "numpy")
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def version(package: str) -> str | None:
    """Version of a package; None if it is not installed, as april itself where it is only on PYTHONPATH."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def save(script: str, results: Mapping[str, Any], variant: str = "") -> Path:
    """Write the figures of the benchmark `script` (its `__file__`) to the JSON file of the same name, and `variant`."""
    path = Path(script).with_name(f"{Path(script).stem}{variant and '_'}{variant}.json")
    command = ["python", str(Path(script).resolve().relative_to(Path(__file__).resolve().parents[1])), *sys.argv[1:]]
    path.write_text(json.dumps({"command": " ".join(command), "machine": machine(), **results}, indent=2) + "\n")
    return path
