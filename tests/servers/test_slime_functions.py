"""slime's generate functions, its examples' among them, on a real SGLang server behind its real router."""

from __future__ import annotations

import importlib
import json
import sys
from argparse import Namespace
from collections.abc import AsyncIterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from tests.integrations.slime.source import load_weights, need_slime, prompt_file, slime_arguments

SOURCE = need_slime()

import torch  # noqa: E402
from slime.rollout.sglang_rollout import GenerateState  # noqa: E402
from slime.utils.types import Sample  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from april.engines.servers.launch import Server  # noqa: E402
from april.integrations import slime as plugin  # noqa: E402
from april.integrations.slime.data_source import state_path  # noqa: E402
from tests import tiny  # noqa: E402
from tests.integrations.slime import functions  # noqa: E402
from tests.servers.slime_server import start_sglang, use_router  # noqa: E402

N, G, OVER = 3, 2, 6
EXACT = 1e-4
ENDS = (70, 71, 72)
"""End tokens: likely enough that a response of a random policy has one."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    shape = {"num_hidden_layers": 8, "max_position_embeddings": 4096}
    return [tiny.save(root / f"policy-{seed}", seed=seed, **shape) for seed in range(3)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    async with start_sglang(models[0], tmp_path_factory.mktemp("logs"), context=3000, tokens=32768) as server:
        yield server


@pytest.fixture
def routed(models: list[Path], server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Namespace:
    monkeypatch.setenv("SLIME_HOST_IP", "127.0.0.1")
    GenerateState.clear_instances()
    load_weights(server.url, models[0], 1)
    data = prompt_file(tmp_path / "prompts.jsonl", 30)
    checkpoint = str(tmp_path / "checkpoint")
    args = slime_arguments(
        *("--hf-checkpoint", str(models[0]), "--prompt-data", str(data), "--label-key", "label", "--num-rollout", "9"),
        *("--rollout-batch-size", str(N), "--n-samples-per-prompt", str(G), "--over-sampling-batch-size", str(OVER)),
        *("--partial-rollout", "--rollout-max-response-len", "60", "--global-batch-size", str(N * G)),
        *("--custom-generate-function-path", "tests.integrations.slime.functions.talk"),
        *("--custom-rm-path", "tests.integrations.slime.functions.parity", "--micro-batch-size", "1"),
        *("--rollout-external-engine-addrs", server.url, "--sglang-device", "cpu", "--rollout-seed", "5"),
        *("--rollout-stop-token-ids", *map(str, ENDS), "--rollout-max-context-len", "2500"),
        *("--rollout-function-path", "april.integrations.slime.rollout"),
        *("--data-source-path", "april.integrations.slime.DataSource"),
        *("--eval-prompt-data", "held-out", f"{data}@[0:4]", "--eval-max-response-len", "20"),
        save=checkpoint,
        load=checkpoint,
    )
    use_router(args, server)
    return args


def errors(models: list[Path], sample: Sample) -> Any:
    """Difference of each trained token's log-probability from each policy's, shape [policies, tokens]."""
    tokens = torch.tensor(sample.tokens)
    own = np.array(sample.loss_mask, dtype=bool)
    found = []
    for model in models:
        policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        with torch.no_grad():
            rows = policy(tokens[None]).logits[0, -sample.response_length - 1 : -1].log_softmax(-1)
        exact = rows.gather(1, tokens[-sample.response_length :, None])[:, 0].numpy()
        found.append(np.abs(exact - np.array(sample.rollout_log_probs))[own])
    return np.array(found)


def rollouts(args: Namespace, server: Server, models: list[Path], source: Any) -> list[list[list[Any]]]:
    """The groups of a rollout under each policy."""
    made = []
    for step, model in enumerate(models):
        if step:
            load_weights(server.url, model, step + 1)
        made.append(plugin.rollout(args, step, source).samples)
    return made


def check(models: list[Path], batches: list[list[list[Any]]]) -> int:
    """Each trained token has the log-probability of a policy so far. Returns the number of samples of several."""
    mixed = 0
    for step, groups in enumerate(batches):
        assert [len(group) for group in groups] == [G] * N
        for one in (one for group in groups for one in group):
            for sample in one if isinstance(one, list) else [one]:
                assert sample.reward is not None
                sample._validate_response_metadata_lengths()
                found = errors(models[: step + 1], sample) < EXACT
                assert found.any(0).all()
                mixed += not found.all(1).any()
    return mixed


def test_a_function_is_interrupted_and_resumed(routed: Namespace, server: Server, models: list[Path]) -> None:
    functions.calls.clear()
    batches = rollouts(routed, server, models, plugin.DataSource(routed))
    assert check(models, batches), "no sample was interrupted and resumed: the test saw nothing"
    assert len(set(functions.calls)) == len(functions.calls), "a function ran twice for a sample"
    for sample in (sample for groups in batches for group in groups for sample in group):
        assert sample.response.count(" turn 0: ") == sample.response.count(" turn 1: ") == 1
        assert sample.metadata["row"] == int(sample.label)
        assert sample.reward == sum(sample.loss_mask) % 2


def test_a_restart_replays_recorded_responses(routed: Namespace, server: Server, models: list[Path]) -> None:
    source = plugin.DataSource(routed)
    plugin.rollout(routed, 0, source)
    source.save(0)
    state = json.loads(state_path(routed.save, 0).read_text())
    waiting = {
        (group["prompt"]["id"], sample["index"]): [token for _, ids, _ in sample["segments"] for token in ids]
        for group in state["scheduler"]["state"]["buffer"]["groups"]
        for sample in group["samples"]
        if sample["finish"] is None and len(sample["transitions"]) > 1
    }
    assert waiting, "no sample was between two turns or in a later one: the test saw nothing"
    again = plugin.DataSource(routed)
    again.load(0)
    found = 0
    for step in (1, 2, 3):
        for group in plugin.rollout(routed, step, again).samples:
            for place, sample in enumerate(group):
                begun = waiting.get((str(sample.group_index), place))
                if begun is not None:
                    response = sample.tokens[-sample.response_length :]
                    assert response[: len(begun)] == begun
                    found += 1
    assert found == len(waiting)
    assert run_state(again)["state"]["buffer"]["restarted"][0] == 0


def run_state(source: Any) -> Any:
    from slime.utils.async_utils import run

    return run(source.rollouts.state_dict(9))["scheduler"]


def test_a_function_of_text_gets_log_probabilities(routed: Namespace, server: Server, models: list[Path]) -> None:
    routed.custom_generate_function_path = "tests.integrations.slime.functions.talk_in_text"
    routed.custom_rm_path = "tests.integrations.slime.functions.lengths"
    batches = rollouts(routed, server, models, plugin.DataSource(routed))
    assert check(models, batches), "no sample was interrupted and resumed: the test saw nothing"
    for sample in (sample for groups in batches for group in groups for sample in group):
        # What is behind each response, and a token that the function has put behind it itself.
        assert [len(list(run)) for counts, run in groupby(sample.loss_mask) if not counts] == [len("\n again: ")] * 2


def test_a_request_that_april_does_not_draw_stops_the_run(routed: Namespace) -> None:
    routed.custom_generate_function_path = "tests.integrations.slime.functions.failing"
    with pytest.raises(RuntimeError, match=r"requests temperature = 0.5: april draws all responses alike, with 1"):
        plugin.rollout(routed, 0, plugin.DataSource(routed))


def test_slimes_evaluation_runs_the_function_beside_paused_ones(routed: Namespace) -> None:
    source = plugin.DataSource(routed)
    plugin.rollout(routed, 0, source)
    result = plugin.rollout(routed, 0, source, evaluation=True).data["held-out"]
    assert [sample.label for sample in result["samples"]] == ["0", "1", "2", "3"]


EXAMPLES = {
    "search-r1": "generate_with_search.generate",
    "retool": "generate_with_retool.generate",
    "multi_agent": "examples.multi_agent.rollout_with_multi_agents.generate_with_multi_agents",
}


@pytest.mark.parametrize("example", EXAMPLES)
def test_slimes_examples(
    example: str, routed: Namespace, server: Server, models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SOURCE / "examples" / example))
    monkeypatch.syspath_prepend(str(SOURCE))
    path = routed.custom_generate_function_path = EXAMPLES[example]
    importlib.import_module(path.rpartition(".")[0])
    routed.custom_rm_path = "tests.integrations.slime.functions.lengths"
    check(models, rollouts(routed, server, models, plugin.DataSource(routed)))
    assert path.partition(".")[0] in sys.modules
