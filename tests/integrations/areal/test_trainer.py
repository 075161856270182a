"""AReaL's own trainer, FSDP2 engine, workflow, evaluation, recovery and logs, on a CPU, with its optimizer steps.

What stands in: SGLang's servers (`model_server.py`). scripts/setup_areal.sh makes an environment for it; run this file
with that environment's Python.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("areal", reason="AReaL is not installed here: scripts/setup_areal.sh")

import torch
from areal.workflow.multi_turn import MultiTurnWorkflow
from areal.workflow.rlvr import RLVRWorkflow

from april.integrations.areal.settings import check_settings
from april.integrations.settings import Settings
from april.rollout.stop_strings import up_to_stop
from april.rollout.trajectory.sample import Sample
from tests import tiny
from tests.integrations.areal.trainer import (
    BATCH,
    CHAT_TEMPLATE,
    GROUP,
    TEMPLATE,
    Chat,
    Images,
    Penalty,
    Trainer,
    TwoTurns,
    accept,
    configuration,
    failing,
    half,
    parity,
    prepare,
    rank,
    reward,
)
from tests.integrations.model_server import CompletionsServer, SGLangServer
from tests.integrations.restart import begun_in, goes_on, once_an_epoch

STOPS = ["q", "Z", "</answer>"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`run(changed settings)` trains in `tmp_path`, on two servers, and returns the trainer."""
    prepare(tmp_path)
    servers: list[SGLangServer] = []

    def trained(
        workflow: type = RLVRWorkflow, accept: Any = None, evaluate: bool = False, score: Any = reward, **changed: Any
    ) -> Trainer:
        kind = changed.pop("server", SGLangServer)
        more = {
            name: changed.pop(name) for name in ("max_turns", "turn_discount", "tokenizer", "style") if name in changed
        }
        while servers:  # a restart finds servers with the first weights
            servers.pop().close()
        servers.extend(kind(tmp_path / "model") for _ in range(2))
        for name, value in rank().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AREAL_LLM_SERVER_ADDRS", ",".join(server.address for server in servers))
        config = configuration(tmp_path, **changed)
        trainer = Trainer(config, servers)
        told = {"reward_fn": score, "gconfig": config.gconfig, "tokenizer": config.tokenizer_path}
        try:
            trainer.train(
                workflow=workflow,
                workflow_kwargs={**told, **more},
                dynamic_filter_fn=accept,
                eval_workflow=RLVRWorkflow if evaluate else None,
                eval_workflow_kwargs=told,
            )
        finally:
            trainer.close()
        return trainer

    yield trained
    for server in servers:
        server.close()


def samples(trainer: Trainer) -> list[Sample]:
    return [sample for step in trainer.steps for group in step.groups for sample in group.outcomes]


def prompts(trainer: Trainer) -> list[tuple[int, str]]:
    """The number of each group trained on, and the answer to its prompt."""
    groups = [group for step in trainer.steps for group in step.groups]
    return [(group.id, group.prompt.metadata["row"]["answer"]) for group in groups]


def sequence(trajectory: dict[str, torch.Tensor], i: int) -> torch.Tensor:
    return trajectory["input_ids"][i][trajectory["attention_mask"][i].bool()].long()


def whole(sample: Sample) -> tuple[int, ...]:
    """Prompt and response."""
    return (*sample.prompt_ids, *sample.response_ids)


def logprobs(weights: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """Of each token but the first."""
    layers = len([name for name in weights if name.endswith("input_layernorm.weight")])
    policy = tiny.model(num_hidden_layers=layers)
    policy.load_state_dict(weights, strict=False)  # the output layer is tied
    with torch.no_grad():
        scores = policy(ids[None]).logits[0, :-1].float().log_softmax(-1)
    return scores.gather(-1, ids[1:, None])[:, 0]


def check_training(trainer: Trainer) -> None:
    """Each step was trained on whole groups of partial rollouts, with the log-probabilities of their policies."""
    older = 0
    for version, (step, batch) in enumerate(zip(trainer.steps, trainer.batches, strict=True)):
        assert [len(group.outcomes) for group in step.groups] == [GROUP] * BATCH == [len(t["rewards"]) for t in batch]
        # AReaL deals them out to its ranks, by their length.
        dealt = {tuple(sequence(trajectory, 0).tolist()): trajectory for trajectory in batch}
        for group in step.groups:
            trajectory = dealt[whole(group.outcomes[0])]
            for i, sample in enumerate(group.samples):
                ids, mask = sequence(trajectory, i), trajectory["loss_mask"][i].bool()
                assert ids.tolist() == [*sample.prompt_ids, *sample.response_ids]
                assert tiny.tokenizer().decode(ids).startswith(f"{group.prompt.metadata['row']['answer']}?")
                assert trajectory["rewards"][i] == sample.length % 3 == sample.reward
                versions = trajectory["versions"][i][mask]
                assert versions.tolist() == sample.versions.tolist()
                drawn = trajectory["logprobs"][i][mask]
                every = [logprobs(weights, ids)[-sample.length :] for weights in trainer.weights[: version + 1]]
                named = torch.stack(every)[versions.long(), torch.arange(sample.length)]
                torch.testing.assert_close(drawn, named, rtol=1e-4, atol=1e-4)
                older += int((versions < version).sum())
        assert step.metrics()["staleness_max"] <= 5
    assert older > 0, "no sample was carried over an update: the test saw nothing"
    first, last = trainer.weights[0], trainer.weights[-1]
    assert any(not torch.equal(first[name], last[name]) for name in first), "the policy was not trained"


def test_areals_trainer_trains_on_whole_groups_of_partial_rollouts(run: Any) -> None:
    trainer = run(total_train_epochs=2)
    assert len(trainer.steps) == 8, "four steps of four prompts an epoch"
    check_training(trainer)
    assert len(prompts(trainer)) == 32
    once_an_epoch(prompts(trainer))


def test_responses_end_at_stop_strings(run: Any) -> None:
    trainer = run(gconfig__stop=STOPS, total_train_steps=3)
    check_training(trainer)
    stopped = 0
    for sample in samples(trainer):
        text = tiny.tokenizer().decode(sample.response_ids)
        assert up_to_stop(text, STOPS) == text
        stopped += text.endswith(tuple(STOPS))
        assert text.endswith((*STOPS, "<eos>", "<pad>")) or len(sample.response_ids) == 40
    assert stopped, "no response ended at a stop string: the test saw nothing"


def test_a_workflows_sampling_parameters_are_checked(run: Any) -> None:
    with pytest.raises(ValueError, match=r"^the workflow requests gconfig.frequency_penalty = 0.5: log-probabilities"):
        run(workflow=Penalty)


def test_vllm_as_areal_starts_it(run: Any) -> None:
    trainer = run(server=CompletionsServer, rollout__backend="vllm:d1", total_train_steps=3)
    assert len(trainer.steps) == 3
    check_training(trainer)


def test_a_restart_resumes_from_the_last_token(run: Any, tmp_path: Path) -> None:
    first = run(total_train_steps=2)
    (path,) = tmp_path.rglob("dataloader_info.pkl")
    (info,) = pickle.loads(path.read_bytes())
    begun = begun_in(info["april"]["scheduler"]["state"]["buffer"]["groups"])
    second = run()
    assert (len(first.steps), len(second.steps)) == (2, 2), "the epoch's four steps"
    goes_on(begun, samples(first), samples(second))
    assert second.steps[0].version == 2
    once_an_epoch([*prompts(first), *prompts(second)])


def test_evaluation_leaves_waiting_samples_unchanged(run: Any) -> None:
    trainer = run(evaluate=True, evaluator__freq_steps=1, total_train_steps=2)
    asked = sum(server.asked for server in trainer.servers)
    assert asked > sum(len(group.samples) for step in trainer.steps for group in step.groups) + 2 * 6 * GROUP
    assert len(trainer.waiting) == 4
    assert trainer.waiting[::2] == trainer.waiting[1::2]


def test_areals_filter_replaces_groups(run: Any) -> None:
    trainer = run(accept=accept, score=half, total_train_steps=3, total_train_epochs=3)
    assert len(trainer.steps) == 3
    for step in trainer.steps:
        assert all(len({sample.reward for sample in group.samples}) > 1 for group in step.groups)
    # Twelve odd prompts are more than an epoch has: its even ones, all but the last few, were turned away.
    assert trainer.rejected > 0


def test_a_dynamic_batch_leaves_rejected_groups_out(run: Any) -> None:
    trainer = run(accept=accept, score=half, dynamic_bs=True)
    assert len(trainer.steps) == 4, "an epoch: no prompt replaces another"
    assert trainer.rejected == 0
    for step, batch in zip(trainer.steps, trainer.batches, strict=True):
        accepted = [group for group in step.groups if len({sample.reward for sample in group.samples}) > 1]
        trained = {tuple(sequence(trajectory, 0).tolist()) for trajectory in batch}
        assert trained == {whole(group.outcomes[0]) for group in accepted}
        assert len(step.groups) == BATCH
    assert any(len(batch) < BATCH for batch in trainer.batches)
    once_an_epoch(prompts(trainer))


@pytest.mark.parametrize(("workflow", "template"), [(MultiTurnWorkflow, TEMPLATE), (Chat, CHAT_TEMPLATE)])
def test_a_workflow_of_several_turns_is_interrupted_and_resumed(
    run: Any, tmp_path: Path, workflow: type, template: str
) -> None:
    """AReaL's own, another attempt as long as the reward is zero; and one over AReaL's client of OpenAI's API."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    several = {"workflow": workflow, "score": parity, "max_turns": 3, "turn_discount": 0.5}
    # The message with which AReaL requests another attempt is long.
    several |= {"tokenizer": tokenizer, "server": functools.partial(SGLangServer, context_length=900)}
    first = run(**several, total_train_steps=2)
    (path,) = tmp_path.rglob("dataloader_info.pkl")
    (info,) = pickle.loads(path.read_bytes())
    begun = begun_in(info["april"]["scheduler"]["state"]["buffer"]["groups"])
    second = run(**several)
    goes_on(begun, samples(first), samples(second))
    check_turns([first, second])


def test_areals_client_returns_a_sequence_for_each_turn(run: Any) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    told = {"max_turns": 3, "turn_discount": 0.5, "tokenizer": tokenizer, "style": "individual"}
    server = functools.partial(SGLangServer, context_length=400)
    trainer = run(workflow=Chat, server=server, gconfig__stop=STOPS, total_train_steps=2, **told)
    stopped = turns = 0
    for step, batch in zip(trainer.steps, trainer.batches, strict=True):
        assert len(step.groups) == BATCH
        rows = [(trajectory, i) for trajectory in batch for i in range(len(trajectory["rewards"]))]
        # A turn whose prompt is not what the turn before ended with begins a sequence of its own.
        assert len(rows) == sum(sample.turns for group in step.groups for sample in group.samples)
        for trajectory, i in rows:
            ids, mask = sequence(trajectory, i), trajectory["loss_mask"][i].bool()
            drawn, last = trajectory["logprobs"][i][mask], int(mask.sum())
            every = [logprobs(weights, ids)[-last:] for weights in trainer.weights[: step.version + 1]]
            named = torch.stack(every)[trajectory["versions"][i][mask].long(), torch.arange(last)]
            torch.testing.assert_close(drawn, named, rtol=1e-4, atol=1e-4)
            text = tokenizer.decode(ids[-last:])
            assert up_to_stop(text, STOPS) == text
            stopped += text.endswith(tuple(STOPS))
        turns += any(sample.turns > 1 for group in step.groups for sample in group.outcomes)
    assert stopped, "no response ended at a stop string: the test saw nothing"
    assert turns, "no episode had several turns: the test saw nothing"


def check_turns(runs: list[Trainer]) -> None:
    """Trajectories of several turns have the log-probabilities of their policies.

    Args:
        runs: a run and its continuations.
    """
    weights = [*(of for trainer in runs[:-1] for of in trainer.weights[:-1]), *runs[-1].weights]
    steps = [step for trainer in runs for step in trainer.steps]
    batches = [batch for trainer in runs for batch in trainer.batches]
    turns = older = 0
    for version, (step, batch) in enumerate(zip(steps, batches, strict=True)):
        dealt = {tuple(sequence(trajectory, 0).tolist()): trajectory for trajectory in batch}
        for group in step.groups:
            trajectory = dealt[whole(group.outcomes[0])]
            for i, sample in enumerate(group.outcomes):
                ids, mask = sequence(trajectory, i), trajectory["loss_mask"][i].bool()
                assert tuple(ids.tolist()) == whole(sample)
                last = sample.versions[sample.loss_mask].tolist()
                versions = trajectory["versions"][i][mask].long()
                # A sequence of its own that continues changed tokens has drawn only the last turns.
                assert versions.tolist()[-len(last) :] == last
                every = torch.stack([logprobs(of, ids) for of in weights[: version + 1]])
                named = every[:, mask.nonzero()[:, 0] - 1][versions, torch.arange(len(versions))]
                torch.testing.assert_close(trajectory["logprobs"][i][mask], named, rtol=1e-4, atol=1e-4)
                turns += sample.turns > 1
                older += int((versions < version).sum())
    assert turns, "no episode had several turns"
    assert older, "no sample was carried over an update"


def test_a_workflow_that_discards_a_response_trains_on_the_other(run: Any) -> None:
    trainer = run(workflow=TwoTurns, total_train_steps=1)
    (step,) = trainer.steps
    assert [len(group.samples) for group in step.groups] == [2 * GROUP] * BATCH


def test_a_failing_workflow_stops_the_run(run: Any) -> None:
    with pytest.raises(LookupError, match="no such answer"):
        run(score=failing)


def test_a_workflow_with_images_is_named(run: Any) -> None:
    with pytest.raises(ValueError, match=r"request contains images: april's integration passes on no images$"):
        run(workflow=Images)


class Agent:
    """A workflow that talks to AReaL's proxy, which serves the API of OpenAI."""

    async def run(self, data: dict[str, Any], **told: Any) -> float:
        return 0.0


def test_an_agent_workflow_is_named(run: Any) -> None:
    with pytest.raises(ValueError, match=r"^workflow: agent workflows, which talk to AReaL's proxy, are not supported"):
        run(workflow=Agent)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"gconfig__stop": [""]}, r"^gconfig.stop = '': a stop string is a text of at least one character"),
        ({"gconfig__frequency_penalty": 0.5}, "gconfig.frequency_penalty = 0.5: log-probabilities"),
        ({"actor__backend": "fsdp:d2"}, "actor.backend = fsdp:d2: under AReaL's SPMD launcher"),
        (
            {"rollout__scheduling_strategy__type": "colocation", "rollout__scheduling_strategy__target": "actor"},
            "rollout.scheduling_strategy.type = colocation: april generates while AReaL trains",
        ),
        ({"actor__use_decoupled_loss": False, "actor__recompute_logprob": True}, "actor.recompute_logprob = True: it"),
        ({"train_dataset__batch_size": 9}, "over_sampling_batch_size = 7 is less than train_dataset.batch_size = 9"),
    ],
)
def test_unsupported_settings_are_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: Any, message: str
) -> None:
    monkeypatch.setenv("AREAL_SPMD_MODE", "1")
    with pytest.raises(ValueError, match=message) as caught:
        check_settings(configuration(tmp_path, **changed), Settings(over_sampling_batch_size=7))
    assert "\n" not in str(caught.value)
