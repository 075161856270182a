"""The embedded engine's tests in float32 on the device: there a token is the same however it was batched."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from gpu_parts.bench import Bench
from parts import ROOT, Figures

FILES = ["tests/engines/test_embedded.py", "tests/engines/test_redraft.py"]
TINY = [f"{FILES[0]}::test_interrupted_after_every_token"]


def measure(bench: Bench) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}"]
            + (TINY if bench.tiny else FILES),
            cwd=ROOT,
            env=os.environ | {"APRIL_TEST_DEVICE": bench.device, "CI": "true"},
            capture_output=True,
            text=True,
        )
        if not report.exists():
            yield "failures", [f"pytest: exit status {done.returncode}", *(done.stdout + done.stderr).splitlines()[-8:]]
            return
        cases = list(ElementTree.parse(report).iter("testcase"))
    faults = {
        case.get("name"): fault
        for case in cases
        for kind in ("failure", "error")
        if (fault := case.find(kind)) is not None
    }
    yield "tests", len(cases)
    yield "slowest", max((float(case.get("time", 0)) for case in cases), default=0.0)
    yield "failures", [f"{name}: {fault.get('message', '').partition(chr(10))[0]}" for name, fault in faults.items()]
