"""The install command for a missing extra, for every way in which april can have been installed."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from april.commands.main import COMMANDS, run
from april.extras import extra_of, install_command


@pytest.mark.parametrize(
    ("note", "command"),
    [
        ({"dir_info": {"editable": True}, "url": "file:///home/me/april"}, "pip install -e '/home/me/april[train]'"),
        ({"dir_info": {}, "url": "file:///a%20b/april"}, "pip install '/a b/april[train]'"),
        (
            {"archive_info": {}, "url": "file:///tmp/april_rl-0.1.0-py3-none-any.whl"},
            "pip install 'april-rl[train] @ file:///tmp/april_rl-0.1.0-py3-none-any.whl'",
        ),
        (
            {"vcs_info": {"vcs": "git", "commit_id": "abc"}, "url": "https://example.org/april.git"},
            "pip install 'april-rl[train] @ git+https://example.org/april.git@abc'",
        ),
        (None, "pip install 'april-rl[train]'"),
    ],
    ids=["editable", "directory", "wheel", "git", "index"],
)
def test_an_extra_is_installed_from_the_source_of_april(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, note: dict[str, Any] | None, command: str
) -> None:
    installed = tmp_path / "april_rl-0.1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.4\nName: april-rl\nVersion: 0.1.0\n")
    if note is not None:
        (installed / "direct_url.json").write_text(json.dumps(note))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert install_command("train") == command


def test_without_metadata_a_checkout_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    assert install_command("train") == "pip install '.[train]' in a checkout of april"
    assert extra_of("torch") is None


@pytest.mark.parametrize(
    ("package", "extra"),
    [("torch", "train"), ("reasoning_gym", "train"), ("aiohttp", "servers"), ("peft", "lora"), ("nothing", None)],
)
def test_which_extra_brings_a_package_is_read_from_the_metadata(
    monkeypatch: pytest.MonkeyPatch, package: str, extra: str | None
) -> None:
    requires = [
        "numpy>=1.26",
        'torch>=2.8; extra == "train"',
        'reasoning-gym>=0.1.20; extra == "train"',
        "aiohttp>=3.11; extra == 'servers'",
        'april-rl[train]; extra == "lora"',
        'peft>=0.18; extra == "lora"',
        'aiohttp; extra == "later"',
    ]
    monkeypatch.setattr(metadata, "requires", lambda name: requires)
    assert extra_of(package) == extra


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_without_its_extra_names_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    for name in [name for name in sys.modules if name.startswith("april.commands.")]:
        if name not in ("april.commands.main", "april.commands.failure"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tyro", None)
    monkeypatch.setattr(metadata, "requires", lambda name: ['tyro>=1; extra == "train"'])
    assert run([command]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"april: april {command} needs tyro, which the extra 'train' brings: pip install")
    assert said.count("\n") == 1
