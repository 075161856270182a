"""The dispatcher, and the words that every command shares."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from april.commands.main import COMMANDS, main
from april.commands.resume import arguments
from april.config.error import ConfigError
from april.training.stop import SIGNALS
from tests.commands.conftest import status


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_fits_80_columns(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert status(command, "--help") == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: april {command}")
    assert max(map(len, said.splitlines())) <= 80
    assert "{None" not in said
    assert "(default: None)" not in said
    assert {len(line) for line in said.splitlines() if line.startswith("│")} <= {80}


def test_help_lists_the_commands_and_a_slip_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("--help") == status() == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    assert all(said.count(f"\n  {command}") == 2 for command in COMMANDS)
    assert status("trian") == 2
    assert "there is no command 'trian'; did you mean train?" in capsys.readouterr().err


def test_a_closed_reader_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    gone = subprocess.run([sys.executable, "-m", "april", "--help"], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (gone.returncode, gone.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize("encoding", [None, "ascii"])
def test_closed_or_limited_output_ends_no_command(encoding: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """`april … >&-`, and a terminal of another encoding than UTF-8."""
    raw = BytesIO()
    monkeypatch.setattr("sys.stdout", encoding and TextIOWrapper(raw, encoding=encoding))
    monkeypatch.setattr("sys.argv", ["april", "train"])

    def printing(name: str) -> Any:
        return SimpleNamespace(run=lambda args: print("1 … 日本"))

    monkeypatch.setattr("april.commands.main.import_module", printing)
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert raw.getvalue() == (b"1 \\u2026 \\u65e5\\u672c\n" if encoding else b"")


def test_a_working_directory_that_was_deleted_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert status("train", "recipe.toml") == 2
    assert capsys.readouterr().err == "april: the current directory no longer exists: change to one that does\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_every_command_without_a_traceback(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also while modules are imported."""
    before = {each: signal.getsignal(each) for each in SIGNALS}

    def interrupted(name: str) -> None:
        os.kill(os.getpid(), number)

    monkeypatch.setattr("april.commands.main.import_module", interrupted)
    monkeypatch.setattr("sys.argv", ["april", "profile", "recipe.toml"])
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert ended.value.code == 128 + number
    assert capsys.readouterr().err == "april: interrupted\n"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["--resume", "run"], ["run"]),
        (["--resume=run", "--steps", "4"], ["run", "--steps", "4"]),
        (["--steps", "4", "--resume", "run", "--rewind"], ["run", "--steps", "4", "--rewind"]),
    ],
)
def test_resume_is_accepted_at_any_position_among_the_flags(given: list[str], meant: list[str]) -> None:
    assert arguments(given) == meant


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--resume"], "needs the directory of a run"),
        (["--resume", "--steps", "4"], "needs the directory of a run"),
        (["recipe.toml", "--resume", "run"], "leave out recipe.toml"),
    ],
)
def test_a_run_is_resumed_by_its_directory_alone(given: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        arguments(given)


@pytest.mark.parametrize("command", ["compare", "simulate", "calibrate"])
def test_the_recipe_is_the_first_argument(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(command, "--steps", "8") == 2
    assert f"name the recipe first: april {command} RECIPE" in capsys.readouterr().err


def test_flags_of_train_are_taken_among_the_options_of_compare(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--steps", "1", "--seeds", "5", "--eval-interval", "0", "--output", str(tmp_path / "compared"))
    assert status("compare", str(recipe), *flags) == 0
    document = json.loads((tmp_path / "compared" / "compare.json").read_text())
    assert [run["arm"] for run in document["runs"]] == ["synchronous", "partial", "synchronous, unlimited slots"]
    assert [run["slots"] for run in document["runs"]] == [12, 12, 18]
    summary = json.loads((tmp_path / "compared" / "partial-5" / "summary.json").read_text())
    assert summary["steps"] == 1
    assert status("compare", str(recipe), "--stesp", "1") == 2
    assert "--steps" in capsys.readouterr().err
