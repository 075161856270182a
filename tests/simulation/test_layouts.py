"""Which layout of a machine's GPUs is recommended, and at which price."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from april.commands.main import run as april
from april.config.recipe import Recipe
from april.simulation.cluster import Cluster, gpu_cluster
from april.simulation.hardware import GPUS, LORA_TRAINER_BYTES, MODELS, roofline
from april.simulation.layouts import Layout, compare, recommended, sentence, value
from april.simulation.turn_over import TurnOver
from april.simulation.workload import WORKLOADS

H100, SMALL, LARGE = GPUS["h100"], MODELS["qwen3-1.7b"], MODELS["qwen3-30b-a3b"]


def recipe(bound: int = 2) -> Recipe:
    made = Recipe()
    made.rollout.rollout_batch_size, made.rollout.n_samples_per_prompt = 8, 2
    made.rollout.max_response_length, made.rollout.max_staleness = 2048, bound
    return made


def cluster(training: int, turn_over: TurnOver = TurnOver()) -> Cluster:  # noqa: B008
    return gpu_cluster(H100, SMALL, 4, slots=64, training_gpus=training, turn_over=turn_over)


def found(turn_over: TurnOver = TurnOver(), bound: int = 2) -> list[Layout]:  # noqa: B008
    lengths = dataclasses.replace(WORKLOADS["lognormal"], prompt_tokens=20)
    return compare(recipe(bound), lengths, lambda count: cluster(count, turn_over), 4, (1, 2), 8, 3, ratios=(1.5, 2.0))


def test_a_turn_takes_the_time_of_its_copies() -> None:
    turn = TurnOver(sleep_seconds=1.0, wake_seconds=2.0, host_bandwidth=1e9)
    parameters = SMALL.parameters
    # 4 bytes of master weights, 8 of moments and 2 of the rounded copy, out and back, over 4 GPUs.
    assert turn.seconds(SMALL, 4) == pytest.approx(3 + 2 * 14 * parameters / 4 / 1e9)
    assert turn.seconds(SMALL, 64) == turn.seconds(SMALL, 8), "shards are not smaller than an eighth"
    assert turn.seconds(SMALL, 1, LORA_TRAINER_BYTES) == pytest.approx(3 + 2 * 2 * parameters / 1e9)
    assert turn.seconds(SMALL, 1, 0.0) == 3


def test_shared_gpus_have_all_memory_for_either_and_pay_for_the_turn() -> None:
    resident, in_turns = gpu_cluster(H100, SMALL, 4, slots=64), cluster(0)
    assert in_turns.cost.kv_tokens > resident.cost.kv_tokens
    assert in_turns.cost.kv_tokens == roofline(H100, SMALL).kv_tokens
    more = in_turns.cost.update_seconds - resident.cost.update_seconds
    assert more == pytest.approx(TurnOver().seconds(SMALL, 4))
    assert "The change of places takes" in in_turns.training
    assert cluster(2).cost.update_seconds == resident.cost.update_seconds


@pytest.mark.parametrize(
    ("gpus", "engine_gpus", "trainer_bytes", "phase"),
    [(1, 1, 16.0, "training"), (1, 1, LORA_TRAINER_BYTES, "a weight update"), (8, 1, 16.0, "a weight update")],
)
def test_what_does_not_fit_in_turns_names_the_phase(
    gpus: int, engine_gpus: int, trainer_bytes: float, phase: str
) -> None:
    with pytest.raises(ValueError, match=f"qwen3-30b-a3b on {gpus} × h100, shared: {phase} holds .* GB of each GPU's"):
        gpu_cluster(
            H100, LARGE, gpus, slots=64, engine_gpus=engine_gpus, trainer_bytes=trainer_bytes, turn_over=TurnOver()
        )
    gpu_cluster(H100, LARGE, 8, slots=64, engine_gpus=2, turn_over=TurnOver())


def test_layouts_are_compared_over_the_whole_time_and_priced() -> None:
    layouts = found()
    assert [layout.name.partition(" ")[0] for layout in layouts] == ["synchronous", "shared", "split"]
    base, shared, split = layouts
    assert base.ratio == base.worth == 1
    for layout in (shared, split):
        assert layout.point is not None
        assert base.point is not None
        assert layout.ratio == layout.point.overall_tokens_per_second / base.point.overall_tokens_per_second
        assert layout.worth == pytest.approx(value(layout.point) / value(base.point))
        assert layout.point.mean_staleness > 0
        assert layout.worth < layout.ratio
    assert recommended(layouts).worth == max(layout.worth for layout in layouts)
    assert f"shared {shared.ratio:.2f}, {split.name} {split.ratio:.2f} times synchronous" in sentence(layouts, 4)


def test_slow_turns_make_shared_gpus_slower_and_leave_a_split_as_it_is() -> None:
    fast, slow = found(TurnOver(host_bandwidth=1e15)), found(TurnOver(sleep_seconds=300))
    quick, late = (layouts[1].point for layouts in (fast, slow))
    assert quick is not None
    assert late is not None
    assert late.overall_tokens_per_second < quick.overall_tokens_per_second / 2
    assert slow[2].point == fast[2].point
    assert recommended(slow).name.startswith("split")


def test_the_price_of_staleness_is_in_words() -> None:
    text = sentence(found(), 4)
    assert "updates old on average, which costs about" in text
    assert "more steps (docs/staleness.md)" in text


def test_what_does_not_fit_is_said() -> None:
    layouts = compare(
        recipe(),
        WORKLOADS["lognormal"],
        lambda count: gpu_cluster(H100, LARGE, 1, slots=64, training_gpus=count, turn_over=TurnOver()),
        1,
        (),
        8,
        3,
    )
    assert sentence(layouts, 1).startswith("1 GPU: no layout fits: qwen3-30b-a3b on 1 × h100, shared: training holds")


def test_the_command_prints_a_line_for_each_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe_file = tmp_path / "recipe.toml"
    recipe_file.write_text(
        '[model]\npath = "Qwen/Qwen3-1.7B"\n[task]\nkind = "reasoning_gym"\nname = "gcd"\n'
        "[rollout]\nrollout_batch_size = 4\nn_samples_per_prompt = 2\nmax_response_length = 512\nmax_staleness = 1\n"
    )
    options = ["--layouts", "--gpus", "2", "--steps", "4", "--warm-up", "1", "--sleep-seconds", "2"]
    assert april(["simulate", str(recipe_file), *options, "--output", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "2 GPUs: shared" in said
    written = json.loads((tmp_path / "out" / "layouts.json").read_text())
    assert [layout["name"] for layout in written["layouts"]] == ["synchronous", "shared", "split 1+1"]
    assert written["turn_over"]["sleep_seconds"] == 2
    assert april(["simulate", str(recipe_file), "--layouts", "--wake-seconds", "-1"]) == 2
    assert "--sleep-seconds and --wake-seconds: must not be negative" in capsys.readouterr().err
