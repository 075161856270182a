"""Servers whose NCCL does not connect to the trainer's are refused before they start."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from april.config.error import ConfigError
from april.config.recipe import recipe_from_dict
from april.engines.servers import installed
from april.training.engine_builder import open_engine
from tests import gpus


async def test_both_versions_are_named_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpus.install(monkeypatch, 2)
    monkeypatch.setattr(installed, "installed", lambda: {"nccl": "2.29.7"})
    monkeypatch.setattr(installed, "installed_in", lambda python: {"nccl": "2.30.7"})
    engine = {"engine": "sglang", "weight_transfer": "broadcast", "server_python": sys.executable}
    with pytest.raises(ConfigError, match=r"has NCCL 2\.30\.7 and april 2\.29\.7, which do not connect: install"):
        async with open_engine(recipe_from_dict({"engine": engine}), None, tmp_path):
            pass
    assert not list(tmp_path.iterdir())
