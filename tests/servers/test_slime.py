"""april in slime, with slime's real router, on a real SGLang server.

In addition to slime's source (see tests/integrations/slime/source.py), the interpreter of these tests needs SGLang.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from argparse import Namespace
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from tests.integrations.slime.source import load_weights, need_slime, prompt_file, slime_arguments

SOURCE = need_slime()

import requests  # noqa: E402
import torch  # noqa: E402
from slime.backends.sglang_utils.server_control import num_requests_from_load  # noqa: E402
from slime.backends.sglang_utils.sglang_engine import SGLangEngine  # noqa: E402
from slime.ray.rollout import _start_router  # noqa: E402
from slime.utils.async_utils import run as run_on_slimes_loop  # noqa: E402
from slime.utils.http_utils import init_http_client  # noqa: E402
from slime.utils.types import Sample  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from april import EngineError  # noqa: E402
from april.engines.servers.launch import Server  # noqa: E402
from april.integrations import slime as plugin  # noqa: E402
from april.integrations.slime import servers  # noqa: E402
from april.integrations.slime.data_source import state_path  # noqa: E402
from april.rollout.stop_strings import up_to_stop  # noqa: E402
from tests import tiny  # noqa: E402
from tests.servers.slime_server import start_sglang, use_router  # noqa: E402

N, G, OVER = 3, 2, 6
TOP_P = 0.9
STOPS = ["q~", "Z", "</answer>"]
EXACT = 1e-4
"""Largest difference of log-probabilities between SGLang and Hugging Face, both in float32."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three policies of the same shapes; deep enough that sampling a token takes longer than sending it."""
    root = tmp_path_factory.mktemp("models")
    return [tiny.save(root / f"policy-{seed}", seed=seed, num_hidden_layers=10) for seed in range(3)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    async with start_sglang(models[0], tmp_path_factory.mktemp("logs"), context=512, tokens=16384) as server:
        yield server


def busy(url: str) -> int:
    return num_requests_from_load(requests.get(f"{url}/v1/loads?include=core").json())


@pytest.fixture
def args(models: list[Path], server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Namespace:
    monkeypatch.setenv("SLIME_HOST_IP", "127.0.0.1")
    load_weights(server.url, models[0], 1)
    data = prompt_file(tmp_path / "prompts.jsonl", 30)
    checkpoint = str(tmp_path / "checkpoint")
    return slime_arguments(
        *("--hf-checkpoint", str(models[0]), "--prompt-data", str(data), "--label-key", "label", "--num-rollout", "9"),
        *("--rollout-batch-size", str(N), "--n-samples-per-prompt", str(G), "--over-sampling-batch-size", str(OVER)),
        *("--partial-rollout", "--rollout-max-response-len", "100", "--global-batch-size", str(N * G)),
        *("--custom-rm-path", "tests.integrations.slime.source.length_parity", "--micro-batch-size", "1"),
        *("--rollout-external-engine-addrs", server.url, "--sglang-device", "cpu", "--rollout-seed", "5"),
        *("--rollout-function-path", "april.integrations.slime.rollout"),
        *("--data-source-path", "april.integrations.slime.DataSource"),
        *("--eval-prompt-data", "held-out", f"{data}@[0:4]", "--eval-max-response-len", "20"),
        save=checkpoint,
        load=checkpoint,
    )


@pytest.fixture
def routed(args: Namespace, server: Server) -> Namespace:
    use_router(args, server)
    return args


def logprobs(model: Path, sample: Sample) -> Any:
    """Of each response token, by a forward pass of Hugging Face, shape [response_length]."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokens = torch.tensor(sample.tokens)
    with torch.no_grad():
        rows = policy(tokens[None]).logits[0, -sample.response_length - 1 : -1].log_softmax(-1)
    return rows.gather(1, tokens[-sample.response_length :, None])[:, 0].numpy()


def nuclei(model: Path, sample: Sample) -> Any:
    """Return for each response token whether its record is this policy's: the tokens that TOP_P keeps, up to tokens at
    its very edge, and the log-probability among them; shape [response_length]."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokens, offsets = torch.tensor(sample.tokens), sample.rollout_top_p_token_offsets
    with torch.no_grad():
        rows = policy(tokens[None]).logits[0, -sample.response_length - 1 : -1].softmax(-1)
    agree = []
    for place, (row, drawn) in enumerate(zip(rows, tokens[-sample.response_length :].tolist(), strict=True)):
        kept = sample.rollout_top_p_token_ids[offsets[place] : offsets[place + 1]]
        likeliest = row.sort(descending=True)
        above = likeliest.values.cumsum(0) - likeliest.values
        inside = set(likeliest.indices[above < TOP_P - EXACT].tolist())
        possible = set(likeliest.indices[above < TOP_P + EXACT].tolist())
        logprob = float(row[drawn].log() - row[kept].sum().log())
        exact = abs(logprob - sample.rollout_log_probs[place]) < EXACT
        agree.append(inside <= set(kept) <= possible and drawn in kept and exact)
    return np.array(agree)


def response_ids(saved: dict[str, Any]) -> list[int]:
    """Of a sample in a saved state."""
    return [token for _, token_ids, _ in saved["segments"] for token in token_ids]


def prompts_under_way(source: plugin.DataSource) -> dict[str, list[dict[str, Any]]]:
    """slime's samples of the groups that wait, by the prompt's id."""
    state = run_on_slimes_loop(source.rollouts.state_dict(0))
    prompts = [group["prompt"] for group in state["scheduler"]["state"]["buffer"]["groups"]]
    return {prompt["id"]: prompt["metadata"]["slime"] for prompt in prompts}


def check(groups: list[list[Sample]], seen: set[int]) -> None:
    """N groups of G, each of one prompt, and no sample twice."""
    assert [len(group) for group in groups] == [G] * N
    for group in groups:
        assert len({(sample.prompt, sample.label, sample.group_index) for sample in group}) == 1
        for sample in group:
            assert sample.index not in seen
            assert sample.index // G == sample.group_index
            assert sample.reward is not None
            assert sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)
            seen.add(sample.index)


def test_rollouts_resume_across_weight_updates(routed: Namespace, server: Server, models: list[Path]) -> None:
    """Every token has the log-probability of the policy that the server held when it was drawn."""
    routed.mask_offpolicy_in_partial_rollout = True
    source = plugin.DataSource(routed)
    seen: set[int] = set()
    mixed = 0
    for step, model in enumerate(models):
        if step:
            load_weights(server.url, model, step + 1)
        output = plugin.rollout(routed, step, source)
        assert busy(server.url) == 0
        assert output.metrics["rollout/april/policy_version"] == step
        check(output.samples, seen)
        for sample in (sample for group in output.samples for sample in group):
            own = np.array(sample.loss_mask, dtype=bool)
            error = np.abs(logprobs(model, sample) - sample.rollout_log_probs)
            assert error[own].max(initial=0) < EXACT
            if not own.all():
                older = [np.abs(logprobs(m, sample) - sample.rollout_log_probs) for m in models[:step]]
                assert np.min(older, axis=0)[~own].max() < EXACT
                assert sample.weight_versions == sorted(set(sample.weight_versions))
                mixed += own.any()
    assert mixed, "no sample was interrupted and resumed: the test saw nothing"


def test_the_server_is_idle_when_slime_offloads_it(routed: Namespace, server: Server, models: list[Path]) -> None:
    """slime's own calls, in the order of its train.py. SGLang dies if a request is in flight when memory is released.
    Without a GPU it releases nothing, so the loss of the weights is played."""
    engine = SGLangEngine.__new__(SGLangEngine)
    engine.node_rank = 0
    engine.server_host, engine.server_port = server.url.removeprefix("http://").split(":")
    routed.mask_offpolicy_in_partial_rollout = True
    source = plugin.DataSource(routed)
    resumed = 0
    for step, model in enumerate(models):
        output = plugin.rollout(routed, step, source)
        requests.get(f"{server.url}/flush_cache").raise_for_status()  # slime would try again 60 times
        engine.release_memory_occupation()
        engine.check_weights("reset_tensors")
        for sample in (sample for group in output.samples for sample in group):
            own = np.array(sample.loss_mask, dtype=bool)
            error = np.abs(logprobs(model, sample) - sample.rollout_log_probs)
            assert error[own].max(initial=0) < EXACT
            resumed += own.any() and not own.all()
        engine.resume_memory_occupation(["weights"])
        load_weights(server.url, models[(step + 1) % len(models)], step + 2)
        engine.resume_memory_occupation(["kv_cache", "cuda_graph"])
    assert resumed, "no sample was interrupted and resumed: the test saw nothing"
    assert server.process.returncode is None


def test_top_p_records_the_kept_tokens(routed: Namespace, server: Server, models: list[Path]) -> None:
    """At every place they are the nucleus of the policy that drew the token, also after a restart."""
    routed.rollout_top_p = TOP_P
    source = plugin.DataSource(routed)
    seen: set[int] = set()
    mixed = 0
    for step, model in enumerate(models):
        if step:
            load_weights(server.url, model, step + 1)
            source.save(step - 1)
            source = plugin.DataSource(routed)
            source.load(step - 1)
        output = plugin.rollout(routed, step, source)
        check(output.samples, seen)
        for sample in (sample for group in output.samples for sample in group):
            sample._validate_response_metadata_lengths()
            agree = np.array([nuclei(model, sample) for model in models[: step + 1]])
            assert agree.any(0).all(), "the tokens that were kept are no policy's nucleus"
            mixed += not agree.all(1).any()
    assert mixed, "no sample was interrupted and resumed: the test saw nothing"


@pytest.mark.parametrize("top_p", [1.0, TOP_P])
def test_responses_end_at_stop_strings_across_updates(
    routed: Namespace, server: Server, models: list[Path], top_p: float
) -> None:
    """The stop string is the last that a response contains, and each token has a log-probability of its policy."""
    routed.rollout_stop, routed.rollout_top_p = STOPS, top_p
    source = plugin.DataSource(routed)
    tokenizer = tiny.tokenizer()
    seen: set[int] = set()
    stopped = mixed = 0
    for step, model in enumerate(models):
        if step:
            load_weights(server.url, model, step + 1)
        output = plugin.rollout(routed, step, source)
        assert busy(server.url) == 0
        check(output.samples, seen)
        for sample in (sample for group in output.samples for sample in group):
            sample._validate_response_metadata_lengths()
            text = tokenizer.decode(sample.tokens[-sample.response_length :])
            assert up_to_stop(text, STOPS) == text
            stopped += text.endswith(tuple(STOPS))
            if sample.status is Sample.Status.TRUNCATED:
                assert sample.response_length == routed.rollout_max_response_len
            else:
                assert text.endswith((*STOPS, tokenizer.eos_token))
            if top_p == 1:
                policies = [np.abs(logprobs(m, sample) - sample.rollout_log_probs) < EXACT for m in models[: step + 1]]
            else:
                policies = [nuclei(m, sample) for m in models[: step + 1]]
            assert np.any(policies, axis=0).all()
            mixed += not np.all(policies, axis=1).any()
    assert stopped, "no response ended at a stop string: the test saw nothing"
    assert mixed, "no sample was interrupted and resumed: the test saw nothing"


def test_with_top_k_alone_log_probabilities_are_of_the_whole_vocabulary(routed: Namespace, models: list[Path]) -> None:
    """As slime's trainer computes them."""
    routed.rollout_top_k = 4
    output = plugin.rollout(routed, 0, plugin.DataSource(routed))
    for sample in (sample for group in output.samples for sample in group):
        np.testing.assert_allclose(sample.rollout_log_probs, logprobs(models[0], sample), atol=EXACT)


def test_waiting_samples_are_part_of_slimes_checkpoint(routed: Namespace, server: Server, models: list[Path]) -> None:
    source = plugin.DataSource(routed)
    seen: set[int] = set()
    for saved in range(6):
        check(plugin.rollout(routed, saved, source).samples, seen)
        source.save(saved)
        state = json.loads(state_path(routed.save, saved).read_text())
        buffered = state["scheduler"]["state"]["buffer"]["groups"]
        waiting = {group["prompt"]["id"]: [response_ids(sample) for sample in group["samples"]] for group in buffered}
        begun = [s for group in buffered for s in group["samples"] if s["finish"] is None and s["segments"]]
        if begun:
            break
    assert begun, "no step left a sample in the middle: the test saw nothing"

    load_weights(server.url, models[1], 1)  # a process that starts again counts its updates from 1
    again = plugin.DataSource(routed)
    again.load(saved)
    went_on, step = 0, saved
    while waiting:
        step += 1
        output = plugin.rollout(routed, step, again)
        check(output.samples, seen)
        for group in output.samples:
            for sample, ids in zip(group, waiting.pop(str(group[0].group_index), [[], []]), strict=True):
                response = sample.tokens[-sample.response_length :]
                assert response[: len(ids)] == ids
                went_on += 0 < len(ids) < len(response)
        assert waiting.keys() <= prompts_under_way(again).keys(), "a saved group was lost"
    assert went_on == len(begun)
    assert output.metrics["rollout/april/policy_version"] == 1
    under_way = {sample["index"] for group in prompts_under_way(again).values() for sample in group}
    assert seen | under_way == set(range(len(seen) + len(under_way))), "a prompt was lost, or begun twice"


def test_an_early_batch_is_part_of_slimes_checkpoint(routed: Namespace, server: Server, models: list[Path]) -> None:
    """`train_async.py` saves after rollout k, and has asked for rollout k + 1 by then."""
    source = plugin.DataSource(routed)
    first = plugin.rollout(routed, 0, source)
    ahead = plugin.rollout(routed, 1, source)
    source.save(0)

    load_weights(server.url, models[1], 1)
    again = plugin.DataSource(routed)
    again.load(0)
    handed = plugin.rollout(routed, 1, again)
    assert [[s.to_dict() for s in group] for group in handed.samples] == [
        [s.to_dict() for s in group] for group in ahead.samples
    ]
    seen: set[int] = set()
    for output in (first, handed, plugin.rollout(routed, 2, again)):
        check(output.samples, seen)
    source.save(1)
    assert json.loads(state_path(routed.save, 1).read_text())["ahead"] is None, "it has been trained on"


def test_evaluation_uses_slimes_own_code(routed: Namespace, server: Server) -> None:
    source = plugin.DataSource(routed)
    plugin.rollout(routed, 0, source)
    before = run_on_slimes_loop(source.rollouts.state_dict(0))
    output = plugin.rollout(routed, 0, source, evaluation=True)
    result = output.data["held-out"]
    assert [sample.label for sample in result["samples"]] == ["0", "1", "2", "3"]
    assert len(result["rewards"]) == len(result["truncated"]) == 4
    after = run_on_slimes_loop(source.rollouts.state_dict(0))
    assert after["scheduler"] == before["scheduler"]


def test_filter_hook_and_group_rewards_are_slimes(routed: Namespace) -> None:
    routed.group_rm, routed.reward_key = True, "parity"
    routed.custom_rm_path = "tests.integrations.slime.source.group_lengths"
    routed.rollout_sample_hook_path = ["tests.integrations.slime.source.note_length"]
    routed.dynamic_sampling_filter_path = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    source = plugin.DataSource(routed)
    seen: set[int] = set()
    dropped = 0
    for step in range(3):
        output = plugin.rollout(routed, step, source)
        check(output.samples, seen)
        dropped += sum(n for name, n in output.metrics.items() if "dynamic_filter/drop_zero_std" in name)
        for group in output.samples:
            assert {sample.reward["parity"] for sample in group} == {0.0, 1.0}
            for sample in group:
                assert sample.reward["length"] == sample.metadata["hooked"] == sample.response_length
    assert dropped, "no group was turned away: the test saw nothing"


def test_without_partial_rollout_no_sample_waits(routed: Namespace, server: Server) -> None:
    routed.partial_rollout = False
    source = plugin.DataSource(routed)
    output = plugin.rollout(routed, 0, source)
    check(output.samples, set())
    assert output.metrics["rollout/april/groups_buffered"] == 0


def test_a_router_without_servers_is_one_clear_line(args: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "REGISTRATION", 0.0)
    args.sglang_router_ip, args.sglang_router_port = _start_router(args)
    init_http_client(args)
    with pytest.raises(EngineError, match=r"slime's router at .* lists no server"):
        plugin.rollout(args, 0, plugin.DataSource(args))


def test_the_rollout_function_passes_slimes_contract_tests(routed: Namespace, tmp_path: Path) -> None:
    """slime calls the function without arguments and with its own data source, so it gets a real run's arguments."""
    routed.rollout_batch_size, routed.over_sampling_batch_size = 2, 3
    routed.custom_rm_path, routed.rm_type = None, "random"
    saved = tmp_path / "arguments.pickle"
    saved.write_bytes(pickle.dumps(routed))
    contracts = SOURCE / "tests" / "plugin_contracts"
    files = [str(contracts / f"test_plugin_{name}_contracts.py") for name in ("rollout", "path_loading")]
    done = subprocess.run(
        [
            *(sys.executable, "-c"),
            # They put stubs for modules that are not imported yet; here they are, so they run on the real ones.
            f"import ray, sglang_router, transformers, pytest; raise SystemExit(pytest.main(['-q', *{files}]))",
        ],
        env={
            **os.environ,
            "APRIL_SLIME_CONTRACT": str(saved),
            "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]),
            "SLIME_CONTRACT_ROLLOUT_FUNCTION_PATH": "tests.integrations.slime.source.contract_rollout",
            "SLIME_CONTRACT_EVAL_FUNCTION_PATH": "tests.integrations.slime.source.contract_rollout",
            "SLIME_CONTRACT_DATA_SOURCE_PATH": "april.integrations.slime.DataSource",
        },
        cwd=SOURCE,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
