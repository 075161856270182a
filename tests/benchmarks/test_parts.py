"""A check in parts: records of parts that finish, fail, hang or cannot run."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import record
from parts import Part, Results, needs, run_all

PROGRAM = """
import json, pathlib, sys, time
kind, folder, _, figures = sys.argv[1:]
with open(f"{folder}/runs", "a") as runs:
    print(kind, file=runs)
found = {"speed": 1} if kind != "wrong" else {"failures": ["2 and 2 are 5"]}
written = pathlib.Path(figures + ".new")  # in one step, as parts write: the file is read meanwhile
written.write_text(json.dumps(found))
written.replace(figures)
if kind == "fails":
    sys.exit("no memory")
if kind == "hangs":
    time.sleep(60)
"""
PARTS = {
    "fails": Part("", 20),
    "wrong": Part("", 20),
    "skipped": Part("", 20, needs("no_such_package")),
    "good": Part("", 20),
}


def ran(folder: Path, parts: dict[str, Part] = PARTS, **options: Any) -> tuple[int, dict[str, Any], list[str]]:
    """Exit status, records of the parts, and which have run so far."""

    def command(name: str) -> Sequence[str]:
        return [sys.executable, "-S", "-c", PROGRAM, name, str(folder)]

    path = folder / "results.json"
    given = {"seconds": 100.0, **options}
    status = run_all(parts, list(parts), command, Results(path, {"device": "stand-in"}), **given)
    runs = folder / "runs"
    recorded = json.loads(path.read_text())["parts"] if path.exists() else {}
    return status, recorded, runs.read_text().split() if runs.exists() else []


def test_every_failure_is_recorded_and_later_parts_still_run(tmp_path: Path) -> None:
    status, found, runs = ran(tmp_path)
    assert status == 1
    assert {name: part["state"] for name, part in found.items()} == {
        "fails": "failed",
        "wrong": "failed",
        "skipped": "skipped",
        "good": "done",
    }
    assert found["fails"]["reason"] == "exit status 1"
    assert found["fails"]["output"] == ["no memory"]
    assert found["fails"]["figures"] == {"speed": 1}, "what was measured before it failed"
    assert found["wrong"]["reason"] == ["2 and 2 are 5"]
    assert found["skipped"]["reason"] == "no_such_package is not installed"
    assert runs == ["fails", "wrong", "good"]


def test_the_next_call_runs_the_remaining_parts(tmp_path: Path) -> None:
    ran(tmp_path)
    assert ran(tmp_path)[2][3:] == ["fails", "wrong"]
    assert ran(tmp_path, again=True)[2][5:] == ["fails", "wrong", "good"]


def test_only_skipped_and_done_parts_are_a_success(tmp_path: Path) -> None:
    assert ran(tmp_path, {name: PARTS[name] for name in ("skipped", "good")})[0] == 0


def test_a_part_that_hangs_is_ended(tmp_path: Path) -> None:
    status, found, _ = ran(tmp_path, {"hangs": Part("", 0.5)})
    assert status == 1
    assert found["hangs"]["reason"] == "not done after 0.5 s"


def test_a_part_without_time_is_left_for_the_next_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found, runs = ran(tmp_path, {"good": Part("", 20)}, seconds=10.0)
    assert (status, found, runs) == (1, {}, [])
    assert "left for the next call, for lack of time: good" in capsys.readouterr().out
    assert ran(tmp_path, {"good": Part("", 20)})[0] == 0


def test_figures_of_a_different_device_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    Results(path, {"device": "H100"}).put("good", {"state": "done"})
    with pytest.raises(SystemExit, match="name another file with --output, or delete it"):
        Results(path, {"device": "A100"})


def test_a_package_that_is_only_on_the_path_has_no_version() -> None:
    assert record.version("no-such-package") is None
    assert record.version("numpy") is not None
