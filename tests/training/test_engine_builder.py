"""Engines are built from the settings of the recipe."""

from __future__ import annotations

import contextlib
import sys
import threading
from dataclasses import make_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from april.config.engine_rules import check_engine
from april.config.error import ConfigError
from april.config.recipe import recipe_from_dict
from april.config.settings.engine_settings import EngineSettings
from april.engines.embedded.process import EngineProcess
from april.engines.embedded.settings import EmbeddedSettings
from april.engines.ray.placement import Demand
from april.engines.vllm_inproc import VLLMInProcess
from april.training.engine_builder import open_engine
from tests import gpus


async def test_vllm_in_process_leaves_the_configured_memory_to_the_trainer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[dict[str, Any]] = []

    async def close() -> None: ...

    def load(model: str, **settings: Any) -> Any:
        made.append(settings)
        return SimpleNamespace(close=close)

    monkeypatch.setattr(VLLMInProcess, "load", load)
    for own in ({}, {"gpu_memory_utilization": 0.5, "enforce_eager": True, "max_num_seqs": 8}):
        engine = {"engine": "vllm-inproc", **own}
        async with open_engine(recipe_from_dict({"model": {"device": "cpu"}, "engine": engine}), None, tmp_path):
            pass
    names = ("gpu_memory_utilization", "enforce_eager", "max_num_seqs")
    assert [tuple(settings[name] for name in names) for settings in made] == [(0.3, False, 64), (0.5, True, 8)]


def test_settings_of_vllm_in_process_are_refused_for_other_engines() -> None:
    with pytest.raises(
        ConfigError, match=r'enforce_eager = True with engine = "vllm": it is for "vllm-inproc"; remove'
    ):
        check_engine(EngineSettings(engine="vllm", enforce_eager=True))
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization = 1\.2: must be a share above 0, at most 1"):
        check_engine(EngineSettings(gpu_memory_utilization=1.2))


async def test_the_engine_process_sees_a_gpu_that_the_trainer_does_not_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[tuple[str, dict[str, str]]] = []

    async def close() -> None: ...

    async def start(settings: EmbeddedSettings, environment: dict[str, str]) -> Any:
        made.append((settings.device, environment))
        return SimpleNamespace(close=close)

    monkeypatch.setattr(EngineProcess, "start", start)
    for count, device in ((2, "auto"), (2, "cpu"), (0, "auto")):
        gpus.install(monkeypatch, count)
        own = {"model": {"path": "policy", "device": device}, "engine": {"own_process": True}}
        async with open_engine(recipe_from_dict(own), None, tmp_path):
            pass
    hidden = {"CUDA_VISIBLE_DEVICES": "-1"}
    assert made == [("cuda", {"CUDA_VISIBLE_DEVICES": "1"}), ("cpu", hidden), ("cpu", {})]


async def test_the_shape_of_routes_is_read_once_for_all_servers_of_a_cluster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    read: list[threading.Thread] = []
    found: list[Any] = []
    server: Any = SimpleNamespace(url="http://node", gpus=())

    def of(model: str, latest: bool) -> Any:
        read.append(threading.current_thread())
        return model, latest

    async def connect(url: str, routes: Any, **settings: Any) -> None:
        found.append(routes)

    async def close() -> None: ...

    class Cluster:
        def __init__(self, spec: Any) -> None:
            self.spec = spec

        async def start(self, starting: Any) -> Any:
            for _ in range(3):  # two servers, of which one comes back
                await self.spec.connect(server)
            return SimpleNamespace(close=close)

        async def watch(self, pool: Any) -> None: ...

    fields = ("engine", "demand", "replicas", "placement", "connect", "outage_limit", "training")
    spec = make_dataclass("EngineSpec", [*fields, ("gate", Any, None)])
    driver = SimpleNamespace(
        connected=lambda address: contextlib.nullcontext(), demand_of=lambda cpus, gpus: Demand(cpus, 0)
    )
    # Ray is not installed here.
    modules = {
        "cluster": SimpleNamespace(Cluster=Cluster, EngineSpec=spec),
        "driver": driver,
        "server_actor": SimpleNamespace(ServerSettings=dict),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"april.engines.ray.{name}", module)
    monkeypatch.setattr("april.engines.servers.server_routes.ServerRoutes.of", of)
    monkeypatch.setattr("april.engines.servers.vllm.connect_vllm", connect)
    own = {
        "model": {"path": "policy"},
        "engine": {"engine": "vllm"},
        "training": {"router_replay": "recorded"},
        "cluster": {"address": "auto"},
    }
    async with open_engine(recipe_from_dict(own), None, tmp_path):
        pass
    assert found == [("policy", False)] * 3
    assert len(read) == 1
    assert read[0] is not threading.main_thread(), "building a large model blocks the event loop"
