"""Cluster settings of a recipe are checked before Ray is imported or contacted."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from april.config.recipe import Recipe
from tests.config.problems import problems


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"cluster": {"replicas": 2}}, 'cluster.address is not set: name the cluster ("auto"'),
        ({"cluster": {"address": "ray://head:10001"}}, 'write "auto", or the head of the cluster as "HOST:PORT"'),
        ({"cluster": {"address": "head"}}, 'write "auto", or the head'),
        ({"cluster": {"address": "auto"}, "engine": {"engine": "vllm-inproc"}}, 'works in the trainer: choose "vllm"'),
        ({"cluster": {"address": "auto"}, "engine": {"engine": "vllm", "urls": ["http://a:1"]}}, "remove one of them"),
        ({"cluster": {"address": "auto"}, "engine": {"engine": "vllm", "replicas": 2}}, "cluster.replicas says"),
        ({"cluster": {"address": "auto", "rewards": "nodes"}, "rollout": {"reward_workers": 0}}, "remove one"),
        ({"cluster": {"address": "auto", "environments": "nodes"}}, "there is no environment: set environment.path"),
        (
            {"cluster": {"address": "auto", "environments": "nodes"}, "environment": {"path": "a:B", "workers": 0}},
            "environment.workers = 0 keeps them in the trainer",
        ),
        ({"cluster": {"address": "auto", "ranks": "nodes"}}, "trainer.processes = 1 trains in one process"),
        ({"cluster": {"address": "auto"}, "engine": {"server_host": "127.0.0.2"}}, "listen on their node's address"),
        ({"cluster": {"address": "auto"}, "engine": {"stream_readers": 2}}, "reads all streams: remove it"),
        ({"cluster": {"address": "auto"}, "engine": {"own_process": True}}, "apart from the trainer anyway: remove it"),
    ],
)
def test_contradictory_settings_are_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, recipe: dict[str, Any], message: str
) -> None:
    for module in ("checking", "engine_rules"):
        monkeypatch.setattr(f"april.config.{module}.find_spec", lambda name: object())
    (line,) = problems(recipe)
    assert message in line


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("april.config.checking.find_spec", lambda name: None)
    (line,) = problems({"cluster": {"address": "10.0.0.1:6379"}})
    assert "needs ray: pip install" in line
    assert "[cluster]" in line


def test_without_the_section_there_is_no_ray() -> None:
    assert not Recipe().cluster.enabled
    assert not Recipe().overlaps
    assert "ray" not in sys.modules
