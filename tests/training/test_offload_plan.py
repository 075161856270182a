"""What leaves devices that trainer and engine use in turn, and whether it fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from april.config.error import ConfigError
from april.config.recipe import Recipe
from april.training.memory_check import check_memory, phases, verdict
from april.training.memory_plan import MemoryPlan, plan_memory
from april.training.offload import Part
from april.training.offload_plan import (
    SLEEPING,
    TRAINER_CONTEXT,
    check_host_memory,
    host_parts,
    parts_away,
    resident_bytes,
    room_beside_engine,
    server_share,
    share_arguments,
)
from april.training.server_engines import server_options
from april.training.shared_layout import keeps_own_weights
from tests import tiny
from tests.training.steps import recipe

GB = 10**9
FULL = 10 * (SLEEPING + TRAINER_CONTEXT)
"""Memory that a server fills with its 90 %, the memory that it keeps asleep, and the trainer's context."""


@pytest.fixture
def chosen(tmp_path: Path) -> Recipe:
    made = recipe()
    made.model.path = str(tiny.save(tmp_path / "policy", sharpness=1.0))
    made.model.compute_dtype, made.trainer.layout, made.engine.engine = "bfloat16", "shared", "vllm"
    return made


def plan(engine: int = 0, rounded: int = 16) -> MemoryPlan:
    """An 8B policy in float32 with its moments, in GB."""
    rank = {"parameters": 32 * GB, "rounded copy": rounded * GB, "gradients": 32 * GB, "optimizer": 64 * GB}
    return MemoryPlan(rank, {"engine's weights": engine * GB, "KV": 10 * GB}, 8 * 10**9, 10**5, GB)


def test_servers_use_the_devices_exclusively_by_default(chosen: Recipe) -> None:
    assert parts_away(chosen, plan(16), 80 * GB) == {*Part}
    assert parts_away(chosen, plan(16)) == {*Part}, "on CPUs, everything moves"
    chosen.trainer.layout = "split"
    assert not parts_away(chosen, plan(16), 80 * GB)


@pytest.mark.parametrize(
    ("share", "away"),
    [
        (0.15, set[Part]()),
        (0.5, {Part.OPTIMIZER}),
        (0.8, {Part.OPTIMIZER, Part.PARAMETERS}),
        (0.9, {Part.OPTIMIZER, Part.PARAMETERS, Part.ROUNDED}),
    ],
)
@pytest.mark.parametrize(
    "option", ["--gpu-memory-utilization={}", "--gpu-memory-utilization {}", "--mem-fraction-static {}"]
)
def test_only_the_part_that_does_not_fit_with_the_servers_is_offloaded(
    share: float, away: set[Part], option: str, chosen: Recipe
) -> None:
    chosen.engine.server_args = tuple(option.format(share).split())
    found = parts_away(chosen, plan(16), 140 * GB)
    assert found == away | {Part.GRADIENTS}
    assert room_beside_engine(chosen, plan(16), 140 * GB) == pytest.approx(
        140 * GB * (1 - share) - SLEEPING - TRAINER_CONTEXT
    )
    assert resident_bytes(plan(16), found) <= max(room_beside_engine(chosen, plan(16), 140 * GB), 0)


@pytest.mark.parametrize("memory", [16, 24, 48, 80, 141])
def test_vllm_gets_a_share_that_leaves_room_for_a_sleeping_engine_and_the_trainers_context(
    memory: int, chosen: Recipe
) -> None:
    share = server_share(chosen, memory * GB)
    assert 0.75 < share <= 0.9
    assert memory * GB * (1 - share) >= SLEEPING + TRAINER_CONTEXT
    assert share_arguments(chosen, memory * GB) == ["--gpu-memory-utilization", f"{share:g}"]
    chosen.engine.server_args = ("--gpu-memory-utilization", "0.4")
    assert share_arguments(chosen, memory * GB) == [], "the recipe names it"
    chosen.engine.engine, chosen.engine.server_args = "sglang", ()
    assert share_arguments(chosen, memory * GB) == []
    assert parts_away(chosen, plan(16), memory * GB) == {*Part}, "SGLang leaves nothing"


def test_servers_on_shared_gpus_are_started_with_their_share(chosen: Recipe) -> None:
    options = server_options(chosen, vllm=True, gpus=1)
    assert options[options.index("--gpu-memory-utilization") + 1] == "0.9"
    assert "--gpu-memory-utilization" not in server_options(chosen, vllm=True, gpus=0), "on CPUs"
    chosen.trainer.layout = "split"
    assert "--gpu-memory-utilization" not in server_options(chosen, vllm=True, gpus=1)


def test_an_engine_keeps_the_parameters_that_it_computes_with(chosen: Recipe) -> None:
    chosen.engine.engine = "embedded"
    assert parts_away(chosen, plan()) == {Part.GRADIENTS, Part.OPTIMIZER, Part.PARAMETERS}
    assert parts_away(chosen, plan(), 200 * GB) == {Part.GRADIENTS}
    assert parts_away(chosen, plan(), 80 * GB) == {Part.GRADIENTS, Part.OPTIMIZER}
    assert parts_away(chosen, plan(), 60 * GB) == {Part.GRADIENTS, Part.OPTIMIZER, Part.PARAMETERS}
    chosen.model.compute_dtype = "float32"
    assert parts_away(chosen, plan(rounded=0)) == {Part.GRADIENTS, Part.OPTIMIZER}
    chosen.trainer.processes = 2
    assert parts_away(chosen, plan(engine=16, rounded=0)) == {*Part}, "ranks have a copy"


@pytest.mark.parametrize("rank", [0, 8])
@pytest.mark.parametrize("engine", ["embedded", "vllm-inproc", "vllm"])
@pytest.mark.parametrize("processes", [1, 2])
def test_parameters_stay_only_with_an_engine_that_computes_with_them(
    engine: Any, processes: int, rank: int, chosen: Recipe
) -> None:
    """Whether or not memory can be planned, and with adapters as without: other engines have a copy of their own."""
    chosen.engine.engine, chosen.trainer.processes, chosen.lora.rank = engine, processes, rank
    found = parts_away(chosen, plan_memory(chosen))
    assert parts_away(chosen, None) == parts_away(chosen, None, 80 * GB) == found
    assert (found == {*Part} - {Part.ROUNDED}) == (engine == "embedded" and processes == 1)
    assert found >= {*Part} - {Part.ROUNDED}


def test_a_vllm_in_this_process_sleeps_without_its_weights(chosen: Recipe) -> None:
    chosen.engine.engine, chosen.lora.rank = "vllm-inproc", 8
    _, training, _ = phases(plan_memory(chosen), chosen, FULL)
    assert training.parts["sleeping engine"] == SLEEPING
    assert "engine's weights" not in training.parts


def test_each_phase_has_the_parts_that_are_there(chosen: Recipe) -> None:
    made = plan_memory(chosen)
    generation, training, update = phases(made, chosen, FULL)
    weights = made.first["engine's weights"]
    assert weights > 0
    assert "optimizer" not in generation.parts
    assert "parameters" not in generation.parts
    assert generation.parts["engine's weights"] == weights
    assert training.total == sum(made.rank.values()) + SLEEPING
    assert update.parts["parameters"] == made.rank["parameters"]
    assert update.parts["engine's weights"] == weights
    assert "optimizer" not in update.parts
    *_, line, other = verdict(made, chosen, FULL)
    assert line.startswith("in host memory while engines generate: parameters, rounded copy, optimizer: ")
    assert other.startswith('with trainer.layout = "split": ')
    assert host_parts(chosen, made, FULL) == {
        name: made.rank[name] for name in ("parameters", "rounded copy", "optimizer")
    }


def test_too_little_host_memory_is_one_line_before_loading(chosen: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = plan_memory(chosen)
    needed = sum(host_parts(chosen, made, FULL).values())
    monkeypatch.setattr("april.training.offload_plan.available_host_bytes", lambda: needed / 0.9 + 1)
    check_host_memory(chosen, made, FULL)
    check_memory(chosen, made, FULL)
    check_memory(chosen, made, None)
    monkeypatch.setattr("april.training.offload_plan.available_host_bytes", lambda: needed / 0.9 - 1)
    with pytest.raises(
        ConfigError, match=r'trainer.layout = "shared": .* GB of host memory while engines generate'
    ) as refused:
        check_memory(chosen, made, FULL)
    assert "\n" not in str(refused.value)
    with pytest.raises(ConfigError, match="GB of host memory"):
        check_memory(chosen, made, None)
    chosen.trainer.layout = "split"
    check_memory(chosen, made, FULL)


def test_engines_keep_tensors_that_the_trainer_does_not_have(
    chosen: Recipe, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as a vision tower or an MTP head: an update does not contain them, and a deep sleep would lose them."""
    made = plan_memory(chosen)
    weights = made.first["engine's weights"]
    needed = sum(host_parts(chosen, made, FULL).values()) + weights
    monkeypatch.setattr("april.training.offload_plan.available_host_bytes", lambda: needed / 0.9 + 1)
    assert not keeps_own_weights(chosen, (), made, FULL)
    assert keeps_own_weights(chosen, ("visual", "mtp"), made, FULL)
    assert "no parameters for the tensors visual, mtp of " in caplog.text
    monkeypatch.setattr("april.training.offload_plan.available_host_bytes", lambda: needed / 0.9 - 1)
    with pytest.raises(ConfigError, match=r"and weights of engines that sleep take .* GB of host memory"):
        keeps_own_weights(chosen, ("visual",), made, FULL)
    chosen.engine.engine = "sglang"
    assert "--enable-weights-cpu-backup" in server_options(chosen, vllm=False, gpus=1, keeps_weights=True)
    assert "--enable-weights-cpu-backup" not in server_options(chosen, vllm=False, gpus=1)
