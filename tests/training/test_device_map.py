"""A recipe's servers, engines and ranks get GPUs of their own on one machine, or the run is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from april.commands.start import check_ranks
from april.config.checking import check_recipe
from april.config.error import ConfigError
from april.config.recipe import Recipe, recipe_from_dict
from april.reporting.report import write_report
from april.rollout.engine import EngineError
from april.training.device_map import device_map, device_rows
from april.training.engine_builder import open_engine
from tests import gpus

STAND_IN = """
import http.server, json, os, sys
port = sys.argv[sys.argv.index("--port") + 1]
with open(os.path.join(os.path.dirname(__file__), port + ".json"), "w") as file:
    json.dump({"arguments": sys.argv[1:], "environment": dict(os.environ)}, file)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()
"""
"""A server that records its start-up arguments, and is ready."""
Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Gives this machine the given number of GPUs."""
    return lambda count, **settings: gpus.install(monkeypatch, count, **settings)


def recipe(**sections: dict[str, Any]) -> Recipe:
    return recipe_from_dict({"model": {"path": "policy"}, **sections})


async def started(tmp_path: Path, own: Recipe) -> list[dict[str, Any]]:
    """What the servers of a recipe are started with, in the order of their names."""
    python = tmp_path / "python"
    (tmp_path / "server.py").write_text(STAND_IN)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/server.py "$@"\n')
    python.chmod(0o700)
    own.engine.server_python = str(python)
    with pytest.raises(EngineError, match="april knows it"):
        async with open_engine(own, None, tmp_path / "run"):
            pass
    notes = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    return sorted(notes, key=lambda note: note["environment"]["CUDA_VISIBLE_DEVICES"])


@pytest.mark.parametrize(("kind", "option"), [("vllm", "--tensor-parallel-size"), ("sglang", "--tp-size")])
async def test_servers_see_only_their_gpus_and_no_launcher_variables(
    kind: str, option: str, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4,3")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_PORT", "1")
    own = recipe(engine={"engine": kind, "replicas": 2, "gpus_per_replica": 2})
    check_ranks(own)
    second, first = await started(tmp_path, own)
    assert [note["environment"]["CUDA_VISIBLE_DEVICES"] for note in (first, second)] == ["6,5", "4,3"]
    for note in (first, second):
        arguments, environment = note["arguments"], note["environment"]
        assert arguments[arguments.index(option) + 1] == "2"
        assert "256" in arguments
        assert "TORCHELASTIC_USE_AGENT_STORE" not in environment
        assert "MASTER_PORT" not in environment
    devices = device_map(own)
    assert devices is not None
    assert device_rows(own, devices)[0] == ("GPU 7 (NVIDIA H100)", "trains")


async def test_servers_on_a_machine_without_gpus_get_an_unchanged_environment(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (note,) = await started(tmp_path, recipe(engine={"engine": "vllm"}))
    assert note["environment"]["CUDA_VISIBLE_DEVICES"] == ""
    assert note["arguments"][note["arguments"].index("--max-num-seqs") + 1] == "64"
    assert "--tensor-parallel-size" not in note["arguments"]


@pytest.mark.parametrize(
    ("count", "sections", "rows"),
    [
        (1, {}, [("0", "trains and generates")]),
        (2, {"engine": {"engine": "vllm"}}, [("0", "trains"), ("1", "generates (vllm-0)")]),
        (2, {"engine": {"own_process": True}}, [("0", "trains"), ("1", "generates (embedded)")]),
        (1, {"engine": {"engine": "vllm", "gpus_per_replica": 0}}, [("0", "trains")]),
        (2, {"trainer": {"processes": 2}}, [(f"{i}", f"trains (rank {i}) and generates") for i in range(2)]),
        (
            2,
            {"model": {"device": "cuda:1"}, "engine": {"engine": "vllm"}},
            [("1", "trains"), ("0", "generates (vllm-0)")],
        ),
        (1, {"model": {"device": "cpu"}, "engine": {"engine": "vllm"}}, [("0", "generates (vllm-0)")]),
        (2, {"engine": {"engine": "vllm", "urls": ["http://a:1"]}}, [("0", "trains"), ("1", "unused")]),
        (
            4,
            {"trainer": {"processes": 2}, "engine": {"engine": "vllm", "server_args": ["--tp", "2"]}},
            [
                ("0", "trains (rank 0)"),
                ("1", "trains (rank 1)"),
                ("2", "generates (vllm-0)"),
                ("3", "generates (vllm-0)"),
            ],
        ),
    ],
)
def test_gpus_are_assigned_to_training_and_engines(
    count: int, sections: dict[str, Any], rows: list[tuple[str, str]], machine: Machine
) -> None:
    machine(count)
    own = recipe(**sections)
    check_ranks(own)
    devices = device_map(own)
    assert devices is not None
    assert [(gpu.split()[1], task) for gpu, task in device_rows(own, devices)] == rows


@pytest.mark.parametrize(
    ("count", "sections", "message"),
    [
        (
            1,
            {"engine": {"engine": "vllm"}},
            r"1 GPU is visible on this machine, but training takes GPU 0 and 1 server takes 1: choose engine\.engine = "
            r'"embedded" or "vllm-inproc", .* or name servers elsewhere in engine\.urls',
        ),
        (
            4,
            {"engine": {"engine": "sglang", "replicas": 2, "gpus_per_replica": 2}},
            r"4 GPUs are visible .* GPU 0 and 2 servers take 2 each: lower engine\.replicas, engine\.gpus",
        ),
        (1, {"engine": {"own_process": True}}, r"the engine's own process takes 1: leave engine\.own_process out"),
        (4, {"trainer": {"processes": 8}}, r"8 ranks take one each: lower trainer\.processes"),
        (2, {"model": {"device": "cuda:2"}}, r"training takes GPU 2: name another one in model\.device"),
        (0, {"engine": {"engine": "vllm", "gpus_per_replica": 2}}, r"gpus_per_replica = 2, but no GPU is visible"),
    ],
)
def test_too_few_gpus_are_refused_with_a_remedy(
    count: int, sections: dict[str, Any], message: str, machine: Machine
) -> None:
    machine(count)
    with pytest.raises(ConfigError, match=message):
        check_ranks(recipe(**sections))


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"gpus_per_replica": 2}, r'gpus_per_replica = 2 with engine = "embedded": it is for servers'),
        (
            {"engine": "vllm", "gpus_per_replica": 2, "server_args": ["--tensor-parallel-size", "2", "-pp=2"]},
            "but server_args divide a server among 4 GPUs: remove one of them",
        ),
    ],
)
def test_gpus_that_two_settings_name_differently_are_refused(engine: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_recipe(recipe(engine=engine))


def test_the_report_shows_the_map(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 0, "seconds": 1.0}) + "\n")
    summary = {"seconds": 1.0, "steps": 0, "devices": [["GPU 0 (<H100>)", "trains"]], "evaluations": []}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    page = write_report(tmp_path).read_text()
    assert '<h2>GPUs</h2><table><tr><td>GPU 0 (&lt;H100&gt;)</td><td class="text">trains</td></tr>' in page


def test_a_single_process_does_not_count_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr("april.engines.gpus.NVIDIA_DRIVER", Path("/"))
    check_ranks(recipe())
    assert recipe(model={"path": "policy", "device": "cpu"}).slots == 64
    for sections in ({"engine": {"engine": "vllm"}}, {"trainer": {"processes": 2}}):
        with pytest.raises(ConfigError, match="pip install nvidia-ml-py"):
            check_ranks(recipe(**sections))
    with pytest.raises(ConfigError, match="pip install nvidia-ml-py"):
        recipe(engine={"engine": "vllm"}).slots.bit_length()
