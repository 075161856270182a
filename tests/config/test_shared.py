"""Settings that exclude that engine and trainer use the same devices in turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from april.config.error import ConfigError
from april.config.recipe import Recipe, recipe_from_dict
from april.engines.gpus import Gpu
from april.engines.servers import installed
from april.training import shared_layout
from april.training.device_map import device_map, device_rows, own_gpus
from april.training.offload import EVERY_PART
from april.training.shared_layout import check_server_version, freed_memory
from tests.config.problems import problems

SHARED = {"layout": "shared"}
CLUSTER: dict[str, Any] = {"address": "auto"}
VLLM = {"engine": "vllm"}


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"engine": {**VLLM, "on_update": "keep"}}, "releases its KV cache for each training step; use"),
        (
            {"engine": VLLM, "trainer": {**SHARED, "overlap": True}},
            "generation stops while the trainer has the devices",
        ),
        ({"engine": {**VLLM, "urls": ["http://a:1"]}}, "remove urls, and april starts engine.replicas servers"),
        ({"engine": {"own_process": True}}, "the engine's process cannot release its memory"),
        ({"engine": {**VLLM, "server_args": ["--speculative-config", "{}"]}}, "lose the draft model's weights"),
        (
            {"engine": {**VLLM, "weight_transfer": "broadcast"}, "model": {"path": "org/model", "device": "cuda"}},
            "NCCL does not connect two processes on one GPU",
        ),
    ],
)
def test_obstacles_to_shared_devices_are_named_in_one_line(recipe: dict[str, Any], message: str) -> None:
    (line,) = problems({"trainer": SHARED, **recipe})
    assert message in line
    assert 'trainer.layout = "shared"' in line


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"engine": {"engine": "embedded"}}, 'engine.engine = "embedded" cannot release its memory on a node; choose'),
        ({"cluster": {**CLUSTER, "placement": "exclude_trainer"}}, "engines are on the GPUs of ranks; remove it"),
        ({"cluster": {**CLUSTER, "replicas": 5}}, "5 engines with the GPUs of 1 rank each need 5; raise it, or lower"),
        ({"engine": {**VLLM, "gpus_per_replica": 8}}, "1 engine with the GPUs of 8 ranks each need 8; raise it"),
        ({"engine": {**VLLM, "weight_transfer": "ipc"}}, 'trainer or servers compute on the CPU; choose "disk"'),
    ],
)
def test_obstacles_to_engines_beside_ranks_on_a_cluster_are_named_in_one_line(
    recipe: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("checking", "engine_rules"):
        monkeypatch.setattr(f"april.config.{module}.find_spec", lambda name: object())
    sound = {
        "model": {"path": "org/model", "device": "cpu"},
        "engine": VLLM,
        "cluster": CLUSTER,
        "trainer": {**SHARED, "processes": 4},
    }
    assert not problems(sound)
    (line,) = problems({**sound, **recipe})
    assert message in line


def test_gpus_of_ranks_on_this_machine_are_those_that_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [Gpu(str(number), number) for number in range(2)]
    monkeypatch.setattr("april.training.device_map.visible_gpus", lambda: gpus)
    sections: dict[str, Any] = {"engine": VLLM, "trainer": {**SHARED, "processes": 4}}
    assert own_gpus(recipe_from_dict({**sections, "cluster": {**CLUSTER, "ranks": "nodes"}})) == gpus[:1]
    with pytest.raises(ConfigError, match="4 ranks train on this machine, and 2 GPUs are visible here: lower"):
        own_gpus(recipe_from_dict({**sections, "cluster": CLUSTER}))
    assert own_gpus(recipe_from_dict({**sections, "cluster": CLUSTER, "model": {"path": "m", "device": "cpu"}})) == []


def test_overlap_auto_is_off() -> None:
    recipe = recipe_from_dict({"engine": VLLM, "trainer": {**SHARED, "overlap": "auto"}})
    assert not recipe.overlaps


@pytest.mark.parametrize(("engines", "each"), [(8, 1), (2, 4), (1, 8)])
def test_servers_get_the_gpus_of_the_ranks(engines: int, each: int) -> None:
    engine = {**VLLM, "replicas": engines, "gpus_per_replica": each}
    recipe = recipe_from_dict({"engine": engine, "trainer": {**SHARED, "processes": 8}})
    gpus = [Gpu(str(number), number) for number in range(8)]
    devices = device_map(recipe, gpus)
    assert devices is not None
    assert list(devices.training) == gpus
    assert [gpu for own in devices.engines for gpu in own] == gpus
    assert not devices.unused
    rows = device_rows(recipe, devices)
    assert rows[7] == ("GPU 7", f"trains (rank 7) and generates (vllm-{engines - 1}) in turn")


def test_too_many_servers_for_the_machine() -> None:
    recipe = recipe_from_dict({"engine": {**VLLM, "replicas": 3}, "trainer": {**SHARED, "processes": 2}})
    with pytest.raises(ConfigError, match=r"3 servers take 1 each: lower engine\.replicas or engine.gpus_per_replica"):
        device_map(recipe, [Gpu("0", 0), Gpu("1", 1)])


@pytest.mark.parametrize(
    ("kind", "versions", "message"),
    [
        ("vllm", {"vllm": "0.31.0"}, r'vLLM 0.31.0, but trainer.layout = "shared" was tested with 0.32.:'),
        ("sglang", {"sglang": "0.6.0"}, r'SGLang 0.6.0, but trainer.layout = "shared" was tested with 0.5.23:'),
        ("vllm", {}, "has no vLLM: set engine.server_python"),
        ("vllm", {"vllm": "0.32.1"}, None),
        ("embedded", {}, None),
    ],
)
def test_versions_are_checked_before_anything_is_loaded(
    kind: str, versions: dict[str, str], message: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(installed, "installed_in", lambda python: versions)
    recipe = Recipe()
    recipe.engine.engine, recipe.engine.server_python = kind, str(tmp_path / "python")  # type: ignore[assignment]
    if message is None:
        check_server_version(recipe)
    else:
        with pytest.raises(ConfigError, match=message):
            check_server_version(recipe)


def test_memory_of_vllm_in_this_process_is_checked_where_gpus_cannot_be_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch knows its own GPU without the package that counts GPUs."""
    recipe = Recipe()
    recipe.engine.engine, recipe.model.device = "vllm-inproc", "cuda"
    monkeypatch.setattr(shared_layout, "device_of", lambda settings: torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30, 100))
    assert freed_memory(recipe, None, None, EVERY_PART)._used() == {"1": 70}
    recipe.engine.engine = "vllm"
    assert freed_memory(recipe, None, None, EVERY_PART)._used() == {}, "its servers are on the CPU"


@pytest.mark.parametrize(
    ("kind", "flag"),
    [("vllm", "--enable-sleep-mode"), ("sglang", "--enable-memory-saver"), ("vllm-inproc", "enable_sleep_mode")],
)
def test_the_option_that_an_engine_lacks_is_named(kind: Any, flag: str) -> None:
    recipe = Recipe()
    recipe.engine.engine = kind
    assert freed_memory(recipe, None, None, EVERY_PART)._flag == flag
