"""Findings and remedies of `april doctor`."""

from __future__ import annotations

import io
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from rich.console import Console

from april.commands import doctor
from april.commands.doctor import Finding, findings, show
from april.commands.main import run
from tests import gpus

HEALTHY = {"python": "3.12.3", "torch": "2.13.0", "transformers": "5.23.0", "cuda": "13.0", "nccl": "2.29.7"}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A machine with two GPUs, a quarter of whose memory is used; its installed packages can be changed."""
    gpus.install(monkeypatch, 2)
    own = {**HEALTHY, "vllm": "0.32.1", "flash-attn": "2.8.3"}
    monkeypatch.setattr(doctor, "installed", lambda: own)
    return own


def by_name() -> dict[str, Finding]:
    return {finding.name: finding for finding in findings()}


def test_a_machine_that_is_ready(machine: dict[str, str]) -> None:
    found = by_name()
    assert not [finding for finding in found.values() if finding.state == "fault"]
    assert found["torch"].text == "2.13.0, for CUDA 13.0"
    assert found["GPU 1"] == Finding(
        "GPU 1",
        "NVIDIA H100, 60.0 of 80.0 GB free",
        "another process holds memory: nvidia-smi or amd-smi names it",
        "note",
    )
    assert found["driver"].text == "supports CUDA 13.0"
    assert found["vLLM"] == Finding("vLLM", "0.32.1")
    assert run(["doctor"]) == 0


@pytest.mark.parametrize(
    ("changed", "name", "remedy"),
    [
        ({"python": "3.10.2"}, "Python", "install Python 3.11 or newer"),
        ({"transformers": "4.57.0"}, "transformers", "install a version that april takes: transformers<6,>=5.10"),
        ({"cuda": None}, "torch", "install the build of torch for these GPUs"),
        ({"cuda": "14.1"}, "driver", "update the driver, or install torch for CUDA 13"),
        ({"torch": None}, "torch", "to train: pip install"),
        ({"vllm": "0.26.0"}, "vLLM", "april was tested with vllm>=0.32,<0.33: install that"),
        ({"sglang": "0.6.0"}, "SGLang", "april was tested with sglang==0.5.23: install that"),
    ],
)
def test_faults_are_one_line_each_with_the_remedy(
    changed: dict[str, str | None], name: str, remedy: str, machine: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    for package, version in changed.items():
        machine.pop(package, None)
        if version:
            machine[package] = version
    faults = [finding for finding in findings() if finding.state == "fault"]
    assert [finding.name for finding in faults] == [name]
    assert faults[0].remedy.startswith(remedy)
    assert run(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sum("fault" in line for line in lines) == 1


def test_incompatible_versions_of_nccl_are_a_fault(machine: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed_in", lambda python: {**HEALTHY, "sglang": "0.5.23", "nccl": "2.30.7"})
    (fault,) = [finding for finding in findings(Path("/servers/python")) if finding.state == "fault"]
    assert fault.text == "2.30.7 in the servers' environment, 2.29.7 in april's: they do not connect"


def test_a_server_environment_is_queried_and_a_missing_one_is_a_fault() -> None:
    found = {finding.name: finding for finding in findings(Path(sys.executable))}
    assert found["torch of the servers"].text.startswith("2.")
    (fault,) = [f for f in findings(Path("/nowhere/python")) if f.state == "fault"]
    assert fault.name == "servers"
    assert "/nowhere/python" in fault.text


def test_the_tested_range_of_vllm_is_that_of_its_extra() -> None:
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert f"vllm{doctor.TESTED['vllm']}" in extras["optional-dependencies"]["vllm"]


def test_no_slow_package_is_imported() -> None:
    script = (
        "import sys; from april.commands.main import run; run(['doctor'])\n"
        "print('slow:', [name for name in ('torch', 'transformers', 'vllm', 'numpy.random') if name in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines()[-1] == "slow: []"
    assert "Python" in printed


def test_a_narrow_terminal_shows_all_findings() -> None:
    out = io.StringIO()
    show([Finding("GPU 0", "q" * 70, "z" * 70, "note")], Console(file=out, width=60))
    assert out.getvalue().count("q") == out.getvalue().count("z") == 70
