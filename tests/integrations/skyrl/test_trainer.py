"""SkyRL's own experiment, trainer, FSDP2 worker, generator, environments, data and checkpoints, on a CPU.

What stands in: vLLM's servers (`model_server.py`), calls of CUDA in the worker, and NCCL between worker and servers
(`skyrl_trainer.py`). scripts/setup_skyrl.sh makes an environment for it; run this file with that environment's Python.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("skyrl", reason="SkyRL is not installed here: scripts/setup_skyrl.sh")
STAND_INS = Path(__file__).parent / "stand_ins"
sys.path.insert(0, str(STAND_INS))

import skyrl_gym  # noqa: E402
import torch  # noqa: E402
from skyrl.train.utils.callbacks import TrainingCallback  # noqa: E402

from april.integrations.settings import Settings  # noqa: E402
from april.integrations.skyrl.checkpoint import STATE  # noqa: E402
from april.integrations.skyrl.settings import check_settings  # noqa: E402
from april.integrations.skyrl.trainer import read  # noqa: E402
from april.rollout.sampling import FinishReason  # noqa: E402
from april.rollout.trajectory.sample import Sample  # noqa: E402
from tests import tiny  # noqa: E402
from tests.integrations.model_server import VLLMServer, adapted  # noqa: E402
from tests.integrations.restart import begun_in, goes_on, once_an_epoch, own_ray  # noqa: E402
from tests.integrations.skyrl.trainer import BATCH, GROUP, configuration, prepare, tokenizer, train  # noqa: E402

for name in ("Length", "Half", "Endless"):
    skyrl_gym.register(id=name.lower(), entry_point=f"tests.integrations.skyrl.trainer:{name}")


class Watch(TrainingCallback):  # type: ignore[misc]
    """Keeps what every step was trained on, and what waited around evaluations."""

    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.batches: list[Any] = []
        self.logs: list[dict[str, Any]] = []
        self.waiting: list[Any] = []
        self.servers: list[VLLMServer] = []
        self.beside: list[int] = []
        """Samples in flight when each asynchronous training step began."""

    def on_step_end(self, trainer: Any, callback_input: Any, control: Any) -> None:
        self.steps.append(trainer.generator.latest)
        self.batches.append(callback_input.batch)

    def on_log(self, trainer: Any, callback_input: Any, control: Any) -> None:
        self.logs.append(dict(callback_input.logs))

    def on_eval_start(self, trainer: Any, callback_input: Any, control: Any) -> None:
        self.waiting.append(json.dumps(trainer.generator.state_dict()))

    on_eval_end = on_eval_start

    def attach(self, trainer: Any) -> None:
        """Watch SkyRL's fully asynchronous trainer."""
        run_training, log = trainer._run_training, trainer.tracker.log

        async def watched(batch: Any) -> Any:
            rollouts = trainer.generator.adapter.scheduler
            self.beside.append(rollouts.in_flight)
            self.steps.append(trainer.generator.latest)
            self.batches.append(batch)
            return await run_training(batch)

        def logged(values: Any, step: int, **more: Any) -> None:
            self.logs.append(dict(values))
            log(values, step=step, **more)

        trainer._run_training, trainer.tracker.log = watched, logged

    @property
    def samples(self) -> list[Sample]:
        return [sample for step in self.steps for group in step.groups for sample in group.samples]

    @property
    def prompts(self) -> list[tuple[int, str]]:
        """The number of each group trained on, and its prompt."""
        groups = [group for step in self.steps for group in step.groups]
        return [(group.id, group.prompt.metadata["prompt"][0]["content"]) for group in groups]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with own_ray(STAND_INS):
        yield


@pytest.fixture
def run(cluster: None, tmp_path: Path) -> Iterator[Any]:
    """`run(changed settings)` trains in `tmp_path`, on two servers, and returns its records."""
    prepare(tmp_path)
    servers = [VLLMServer(tmp_path / "model") for _ in range(2)]

    def trained(watch: Watch | None = None, **changed: Any) -> Watch:
        watch = watch or Watch()
        watch.servers = servers
        cfg = configuration(tmp_path, [server.url for server in servers], **changed)
        train(cfg, None if cfg.trainer.fully_async.enabled else Settings(over_sampling_batch_size=7), watch)
        return watch

    yield trained
    for server in servers:
        server.close()
        assert not server.broken


def policy(weights: Path | dict[str, torch.Tensor]) -> Any:
    made = tiny.model()
    made.load_state_dict(torch.load(weights) if isinstance(weights, Path) else weights, strict=False)
    return made


def test_skyrls_trainer_trains_on_whole_groups_of_partial_rollouts(run: Any, tmp_path: Path) -> None:
    seen = run(trainer__epochs=2)
    assert len(seen.steps) == 8, "four steps of four prompts an epoch"
    policies = [policy(path) for path in sorted((tmp_path / "weights").iterdir())]
    assert len(policies) == 9
    words = tokenizer()
    older = 0
    for version, (step, batch) in enumerate(zip(seen.steps, seen.batches, strict=True)):
        assert [len(group.samples) for group in step.groups] == [GROUP] * BATCH
        samples = [sample for group in step.groups for sample in group.samples]
        rows = [group.prompt.metadata for group in step.groups for _ in group.samples]
        assert len(batch) == len(samples)
        for i, (sample, row) in enumerate(zip(samples, rows, strict=True)):
            ids = batch["sequences"][i][batch["attention_mask"][i].bool()].tolist()
            prompt = words.apply_chat_template(row["prompt"], return_dict=False)
            assert ids == [*prompt, *sample.response_ids]
            assert row["prompt"][0]["content"] == f"{row['env_extras']['answer']}?"
            mask = batch["loss_mask"][i].bool()
            assert int(mask.sum()) == sample.length <= 40
            assert sample.reward == len(words.decode(sample.response_ids)) % 3
            with torch.no_grad():
                drawn = batch["rollout_logprobs"][i][mask]
                every = torch.stack([logprobs(model, ids)[-sample.length :] for model in policies[: version + 1]])
            torch.testing.assert_close(drawn, every[sample.versions, range(sample.length)], rtol=1e-4, atol=1e-4)
            older += int((sample.versions < version).sum())
        staleness = step.metrics()["staleness_max"]
        assert staleness == max(version - sample.first_version for sample in samples) <= 5
        assert seen.logs[version]["april/staleness_max"] == staleness
        assert seen.logs[version]["policy/grad_norm"] > 0
    assert older > 0, "no sample was carried over an update: the test saw nothing"
    assert len(seen.prompts) == 32
    once_an_epoch(seen.prompts)


def logprobs(model: Any, ids: list[int]) -> torch.Tensor:
    """Of each token but the first."""
    logits = model(torch.tensor([ids])).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids)[1:, None])[:, 0]


def test_batched_generation_trains_on_single_turns_as_they_are(run: Any, tmp_path: Path) -> None:
    """SkyRL's batched generation has no agent loop: another turn that an environment requests is ignored, a reward is
    one number for a response, and the rewards of truncated responses stay."""
    use(tmp_path, "endless")
    seen = run(generator__batched=True, generator__zero_reward_on_non_stop=True)
    assert len(seen.steps) == 4
    older = 0
    for version, (step, batch, logs) in enumerate(zip(seen.steps, seen.batches, seen.logs, strict=True)):
        samples = [sample for group in step.groups for sample in group.samples]
        assert len(batch) == len(samples) == BATCH * GROUP
        for i, sample in enumerate(samples):
            ids = batch["sequences"][i][batch["attention_mask"][i].bool()].tolist()
            assert ids == [*sample.prompt_ids, *sample.response_ids]
            assert sample.reward == len(tokenizer().decode(sample.response_ids)) % 3
            drawn = batch["rollout_logprobs"][i][batch["loss_mask"][i].bool()]
            torch.testing.assert_close(drawn, torch.from_numpy(sample.logprobs))
            older += int((sample.versions < version).sum())
        rewards = [sample.reward for sample in samples]
        assert logs["reward/avg_raw_reward"] == pytest.approx(sum(rewards) / len(rewards))
        answers = [int(group.prompt.metadata["env_extras"]["answer"]) for group in step.groups]
        assert logs["environment/answer"] == pytest.approx(sum(answers) / len(answers))
    assert older > 0, "no sample was carried over an update: the test saw nothing"
    assert any(sample.finish is FinishReason.LENGTH and sample.reward for sample in seen.samples)


class Sleeps(Watch):
    """Has SkyRL's trainer put its servers to sleep before it trains, as on shared GPUs, where it does not take servers
    that are running already."""

    def on_train_start(self, trainer: Any, callback_input: Any, control: Any) -> None:
        trainer.colocate_all = True

    def on_step_end(self, trainer: Any, callback_input: Any, control: Any) -> None:
        super().on_step_end(trainer, callback_input, control)
        assert all(server.asleep for server in self.servers), "SkyRL trained while a server was awake"


def test_servers_are_idle_when_skyrl_puts_them_to_sleep(run: Any, tmp_path: Path) -> None:
    """They die of a request that is in flight then. Their weights are lost, and SkyRL's update replaces them."""
    seen = run(Sleeps(), generator__inference_engine__offload_kv_for_weight_sync=True)
    assert len(seen.steps) == 4
    # Before the first weights, after each generation, and at the end.
    assert [server.sleeps for server in seen.servers] == [1 + len(seen.steps) + 1] * 2
    check_policies(seen, [policy(path) for path in sorted((tmp_path / "weights").iterdir())])


def check_policies(seen: Watch, policies: list[Any]) -> None:
    """Each token has the log-probability of the policy that its version names."""
    older = 0
    for version, step in enumerate(seen.steps):
        for sample in (sample for group in step.groups for sample in group.samples):
            ids = [*sample.prompt_ids, *sample.response_ids]
            with torch.no_grad():
                every = torch.stack([logprobs(model, ids)[-sample.length :] for model in policies[: version + 1]])
            drawn = torch.from_numpy(sample.logprobs)
            torch.testing.assert_close(drawn, every[sample.versions, range(sample.length)], rtol=1e-4, atol=1e-4)
            older += int((sample.versions < version).sum())
    assert older > 0, "no sample was carried over an update: the test saw nothing"


def test_adapters_are_sampled_from_under_their_own_versions(run: Any, tmp_path: Path) -> None:
    seen = run(trainer__policy__model__lora__rank=4)
    assert len(seen.steps) == 4
    weights = [adapted(tmp_path / "model", path) for path in sorted((tmp_path / "adapters").iterdir())]
    assert any(not torch.equal(weights[0][name], weights[-1][name]) for name in weights[0]), "no adapter was trained"
    check_policies(seen, [policy(loaded) for loaded in weights])


def test_a_restart_resumes_from_the_last_token(run: Any, tmp_path: Path) -> None:
    first = run(trainer__max_training_steps=2)
    saved = json.loads((tmp_path / "checkpoints" / "global_step_2" / STATE).read_text())
    begun = begun_in(saved["scheduler"]["state"]["buffer"]["groups"])
    second = run()
    assert (len(first.steps), len(second.steps)) == (2, 2), "the epoch's four steps"
    goes_on(begun, first.samples, second.samples)
    assert second.steps[0].version == 2
    once_an_epoch([*first.prompts, *second.prompts])


FULLY_ASYNC = {
    "trainer__fully_async__enabled": True,
    "trainer__fully_async__num_parallel_generation_workers": 7,
    "trainer__fully_async__max_staleness_steps": 2,
    "trainer__algorithm__policy_loss_type": "rollout_is",
}


def test_skyrls_fully_asynchronous_trainer_keeps_the_bound(run: Any, tmp_path: Path) -> None:
    """Generation continues during training, across epochs and a restart."""
    first = run(**FULLY_ASYNC, trainer__epochs=2, trainer__max_training_steps=3)
    assert len(first.steps) == 3
    assert any(first.beside), "nothing was generated during a training step"
    saved = json.loads((tmp_path / "checkpoints" / "global_step_3" / STATE).read_text())
    begun = begun_in(saved["scheduler"]["state"]["buffer"]["groups"])
    second = run(**FULLY_ASYNC, trainer__epochs=2)
    # SkyRL's final checkpoint names the step after the last one, so that a run that was cut short has a step less.
    assert len(second.steps) == 4, "seven of the eight steps of two epochs"
    after = {(sample.group_id, sample.index): sample.response_ids for sample in second.samples}
    for name in begun.keys() & after.keys():
        assert after[name][: len(begun[name])] == begun[name]
    assert begun.keys() & after.keys()
    # The second run has transferred the weights of its beginning again.
    policies = [policy(path) for path in sorted((tmp_path / "weights").iterdir())]
    check_policies(first, policies[:4])
    once_an_epoch([*first.prompts, *second.prompts])
    for version, step in enumerate([*first.steps, *second.steps]):
        assert [len(group.samples) for group in step.groups] == [GROUP] * BATCH
        assert step.version == version
        assert step.metrics()["staleness_max"] <= 2
        samples = [sample for group in step.groups for sample in group.samples]
        assert max(version - sample.first_version for sample in samples) <= 2
    assert any("april/staleness_max" in logs for logs in second.logs)


def test_evaluation_leaves_waiting_samples_unchanged(run: Any) -> None:
    seen = run(trainer__eval_interval=1, trainer__max_training_steps=2)
    assert len(seen.waiting) == 4
    for before, after in zip(seen.waiting[::2], seen.waiting[1::2], strict=True):
        assert before == after != "null"
    assert all(any(name.startswith("eval/") for name in logs) for logs in seen.logs)


def test_skyrls_filter_replaces_groups_as_soon_as_they_are_complete(run: Any, tmp_path: Path) -> None:
    use(tmp_path, "half")
    seen = run(trainer__max_training_steps=3, trainer__epochs=3, trainer__algorithm__dynamic_sampling__type="filter")
    assert len(seen.steps) == 3
    for step in seen.steps:
        assert all(len({sample.reward for sample in group.samples}) > 1 for group in step.groups)
    # Twelve odd prompts are more than an epoch has: its even ones, all but the last few, were turned away.
    assert sum(len(step.rejections) for step in seen.steps) > 0


def use(folder: Path, env_class: str) -> None:
    """Have all prompts go to another environment."""
    path = folder / "prompts.jsonl"
    rows = [json.loads(row) | {"env_class": env_class} for row in path.read_text().splitlines()]
    path.write_text("\n".join(map(json.dumps, rows)))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"trainer__fully_async__sample_full_batch": True}, "sample_full_batch = True: april does not drop"),
        ({"generator__sampling_params__temperature": 0.7}, "logprobs_mode = None: with a temperature"),
        (
            {
                "generator__sampling_params__logprobs": None,
                "trainer__algorithm__off_policy_correction__tis_ratio_type": None,
                "trainer__algorithm__policy_loss_type": "rollout_is",
            },
            "tis_ratio_type = None: some tokens",
        ),
        ({"trainer__algorithm__off_policy_correction__tis_ratio_type": None}, "tis_ratio_type = None: some tokens"),
        ({"trainer__train_batch_size": 9, "trainer__policy_mini_batch_size": 9}, "april.over_sampling_batch_size = 7"),
    ],
)
def test_unsupported_settings_are_refused_in_one_line(tmp_path: Path, changed: Any, message: str) -> None:
    cfg = configuration(tmp_path, ["http://127.0.0.1:1"])
    for name, value in changed.items():
        *path, last = name.split("__")
        section: Any = cfg
        for part in path:
            section = getattr(section, part)
        setattr(section, last, value)
    with pytest.raises(ValueError, match=message) as caught:
        check_settings(cfg, Settings(over_sampling_batch_size=7))
    assert "\n" not in str(caught.value)


def test_settings_of_april_are_in_the_configuration_of_skyrl() -> None:
    cfg, settings = read(
        [
            "trainer.override_entrypoint=april.integrations.skyrl",
            "april.max_staleness=3",
            "april.over_sampling_batch_size=auto",
            "trainer.train_batch_size=8",
        ]
    )
    assert (cfg.trainer.train_batch_size, settings) == (8, Settings(max_staleness=3))
    with pytest.raises(ValueError, match=r"^april.staleness: april has no such setting, only april.over_sampling"):
        read(["april.staleness=3"])
    with pytest.raises(ValueError, match=r"^april.max_staleness = three: give a number, or auto$"):
        read(["april.max_staleness=three"])
