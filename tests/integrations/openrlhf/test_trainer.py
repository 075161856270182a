"""OpenRLHF's own trainer loop, generator, executor, prompts and Ray actors, on a CPU.

What stands in: vLLM and flash-attn (`openrlhf_stand_ins`), and the groups of DeepSpeed actors, in whose place the tests
take an optimizer step of their own on what OpenRLHF's loop hands over. scripts/setup_openrlhf.sh makes an environment
for it; run this file with that environment's Python.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("openrlhf", reason="OpenRLHF is not installed here: scripts/setup_openrlhf.sh")
STAND_INS = Path(__file__).parent / "stand_ins"
sys.path.insert(0, str(STAND_INS))

import ray  # noqa: E402
import torch  # noqa: E402
from openrlhf.trainer.ray import vllm_engine  # noqa: E402
from openrlhf.utils.deepspeed import DeepspeedStrategy  # noqa: E402
from ray.exceptions import RayError  # noqa: E402

from april import Capacity, EngineError, Group, Prompt, Sample, SamplingParams  # noqa: E402
from april.engines.ray.actor_channel import ChannelActor  # noqa: E402
from april.engines.stream_engine import StreamEngine, Tokens  # noqa: E402
from april.integrations.openrlhf import PPOTrainer, Settings, install  # noqa: E402
from april.integrations.openrlhf.settings import check_settings  # noqa: E402
from tests import tiny  # noqa: E402
from tests.integrations.restart import begun_in, goes_on, once_an_epoch, own_ray  # noqa: E402

GROUP = 3
REWARD = """
def reward_func(queries, prompts, labels):
    import torch
    scores = [float(len(query) % 3) for query in queries]
    return {"rewards": scores[0], "scores": scores[0], "extra_logs": {"answer": float(labels[0])}}
"""


def namespace(**values: Any) -> Any:
    """`a__b=1` as `.a.b`."""
    made = SimpleNamespace()
    for name, value in values.items():
        section, _, key = name.rpartition("__")
        if section and not hasattr(made, section):
            setattr(made, section, SimpleNamespace())
        setattr(getattr(made, section) if section else made, key, value)
    return made


def arguments(folder: Path, **changed: Any) -> Any:
    """OpenRLHF's arguments, as its command line makes them, as far as they are read here."""
    values = {
        "data__prompt_dataset": str(folder / "prompts"),
        "data__prompt_probs": None,
        "data__prompt_split": "train",
        "data__max_samples": 1000,
        "data__input_template": None,
        "data__input_key": "question",
        "data__label_key": "answer",
        "data__apply_chat_template": False,
        "data__dataloader_num_workers": 0,
        "data__disable_fast_tokenizer": False,
        "eval__dataset": str(folder / "held-out"),
        "eval__split": "train",
        "eval__steps": -1,
        "eval__temperature": 0.5,
        "eval__n_samples_per_prompt": 2,
        "ckpt__save_steps": 1,
        "ckpt__path": str(folder / "checkpoints"),
        "ckpt__load_enable": True,
        "train__seed": 7,
        "train__batch_size": 12,
        "train__num_episodes": 1,
        "train__max_epochs": 1,
        "train__async_enable": False,
        "train__partial_rollout_enable": False,
        "train__agent_func_path": None,
        "train__dynamic_batch_enable": False,
        "rollout__batch_size": 4,
        "rollout__n_samples_per_prompt": GROUP,
        "rollout__vllm_generate_batch_size": 4,
        "algo__dynamic_filtering_enable": False,
        "algo__dynamic_filtering_range": (0.0, 2.0),
        "algo__advantage": SimpleNamespace(is_correction_level="token", estimator="group_norm"),
        "algo__kl": SimpleNamespace(target=None, init_coef=0.0),
        "reward__remote_url": str(folder / "reward.py"),
        "vllm__enable_sleep": False,
        "logger__wandb": SimpleNamespace(key=None),
        "logger__tensorboard_dir": None,
        "logger__logging_steps": 1,
        "ds__param_dtype": "fp32",
    }
    return namespace(**{**values, **changed})


class Actors:
    """In the place of OpenRLHF's group of DeepSpeed actors: weights to the engines, and the last checkpoint."""

    def __init__(self, folder: Path, engines: list[Any]) -> None:
        self.folder, self.engines = folder, engines
        self.policy = tiny.model()
        self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=0.3)
        self.states = folder / "states.pt"

    def async_run_method(self, method_name: str, **given: Any) -> list[Any]:
        if method_name == "broadcast_to_vllm":
            path = str(self.folder / "weights.pt")
            torch.save(self.policy.state_dict(), path)
            return [engine.update_weight.remote(path, None, None) for engine in self.engines]
        if method_name == "save_checkpoint":
            torch.save({"client": given["client_states"], "policy": self.policy.state_dict()}, self.states)
            (self.folder / "checkpoints" / "_actor").mkdir(parents=True, exist_ok=True)
            return []
        assert method_name == "get_checkpoint_states", method_name
        saved = torch.load(self.states, weights_only=False)
        self.policy.load_state_dict(saved["policy"])
        return [ray.put(saved["client"])]


AGENT = """
import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class AgentInstance(AgentInstanceBase):
    def __init__(self):
        self.turns = 0

    async def reset(self, states, **kwargs):
        self.wanted = 1 + int(states["label"]) % 3
        return {"observation": "Q" + states["observation"]}

    async def step(self, states, **kwargs):
        assert states["observation_text"].startswith("Q" + states["label"])
        assert "<eos>" not in states["action_text"]
        self.turns += 1
        FAILURE
        done = self.turns == self.wanted
        params = states["sampling_params"]
        reward = torch.tensor(float(len(states["action_text"]) % 3))
        return {"rewards": reward, "scores": reward, "environment_feedback": "!" if done else " more: ",
                "done": done, "sampling_params": params, "extra_logs": {"turns": self.turns}}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""


class Trainer(PPOTrainer):
    """Takes an optimizer step on each batch that OpenRLHF's loop hands over, and keeps it."""

    def __init__(self, stop_after: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.batches: list[list[Any]] = []
        self.samples: list[list[Any]] = []
        self.weights: list[dict[str, Any]] = []
        self.staleness: list[float] = []
        self.meanwhile: list[int] = []
        """Tokens drawn during each training step."""
        self.stop_after = stop_after

    def train_step(self, rollout_samples: list[Any], global_step: int) -> tuple[dict[str, Any], int]:
        if len(self.batches) == self.stop_after:
            raise KeyboardInterrupt
        actors = self.actor_model_group
        self.staleness.append(self.samples_generator.latest.metrics()["staleness_max"])
        self.batches.append(rollout_samples)
        self.samples.append([sample for group in self.samples_generator.latest.groups for sample in group.outcomes])
        self.weights.append({name: p.detach().clone() for name, p in actors.policy.named_parameters()})
        buffer = self.samples_generator.adapter.scheduler.buffer
        before = buffer.sampled_tokens
        actors.optimizer.zero_grad()
        for experience in rollout_samples:
            loss = -(forward(actors.policy, experience) * experience.action_mask[0]).sum() * (experience.rewards[0] - 1)
            (loss / 400).backward()
        actors.optimizer.step()
        self.meanwhile.append(buffer.sampled_tokens - before)
        self.broadcast_to_vllm()
        return {"timing/train": 0.0}, global_step + 1


def forward(policy: Any, experience: Any) -> torch.Tensor:
    """Log-probability of each token but the first, under `policy`."""
    logits = policy(experience.sequences).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, experience.sequences[0, 1:, None])[:, 0]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    os.environ["RAY_prestart_worker_first_driver"] = "0"  # noqa: SIM112
    with own_ray(STAND_INS, RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES="0"):
        yield


@pytest.fixture
def run(cluster: None, tmp_path: Path) -> Iterator[Any]:
    """`run(steps, settings)` trains in `tmp_path` and returns the trainer."""
    tiny.save(tmp_path / "model")
    for name, numbers in (("prompts", range(16)), ("held-out", range(100, 106))):
        (tmp_path / name).mkdir()
        rows = [json.dumps({"question": f"{n}?", "answer": str(n)}) for n in numbers]
        (tmp_path / name / "train.jsonl").write_text("\n".join(rows))
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "agent.py").write_text(AGENT.replace("FAILURE", "pass"))
    (tmp_path / "broken.py").write_text(AGENT.replace("FAILURE", "raise LookupError('no such tool')"))
    install(Settings())
    engines = vllm_engine.create_vllm_engines(
        2, 1, str(tmp_path / "model"), 1, False, False, True, 64, None, 0.5, remote_rm_url=str(tmp_path / "reward.py")
    )

    def train(steps: int = 100, settings: dict[str, Any] | None = None, **changed: Any) -> Trainer:
        args = arguments(tmp_path, **changed)
        strategy = DeepspeedStrategy(seed=args.train.seed, args=args)
        trainer = Trainer(
            steps,
            Settings(over_sampling_batch_size=7, **(settings or {})),
            str(tmp_path / "model"),
            strategy,
            Actors(tmp_path, engines),
            None,
            None,
            None,
            engines,
            do_sample=True,
            max_len=64,
            max_new_tokens=40,
            temperature=1.0,
            top_p=1.0,
        )
        with contextlib.suppress(KeyboardInterrupt):
            trainer.fit()
        return trainer

    yield train
    for engine in engines:
        ray.kill(engine)


def test_openrlhfs_loop_trains_on_whole_groups_of_partial_rollouts(run: Any) -> None:
    trainer = run(train__num_episodes=2)
    assert len(trainer.batches) == 8, "four steps of four prompts an episode"
    policies = policies_of(trainer)
    older = 0
    for version, batch in enumerate(trainer.batches):
        # By group, not by prompt: the last prompt of an episode may be the first of the next one.
        assert [len(list(group)) for _, group in groupby(trainer.samples[version], key=lambda s: s.group_id)] == [
            GROUP
        ] * 4
        for experience, sample in zip(batch, trainer.samples[version], strict=True):
            assert experience.prompts[0] == f"{experience.labels[0]}?"
            text = trainer.tokenizer.decode(experience.sequences[0], skip_special_tokens=False)
            assert text.startswith(experience.prompts[0])
            assert experience.rewards.item() == experience.scores.item() == len(text) % 3
            assert experience.info["answer"].item() == float(experience.labels[0])
            mask = experience.action_mask[0].bool()
            assert int(mask.sum()) == experience.response_length.item() == sample.length <= 40
            drawn = experience.rollout_log_probs[0][mask]
            own = torch.stack([forward(policy, experience).detach()[mask] for policy in policies[: version + 1]])
            own = own[sample.versions, range(sample.length)]
            assert drawn[0] >= own[0] - 1e-4  # OpenRLHF's first token is never the end: the others are more probable
            torch.testing.assert_close(drawn[1:], own[1:], rtol=1e-4, atol=1e-4)
            older += int((sample.versions < version).sum())
        assert trainer.staleness[version] == max(version - s.first_version for s in trainer.samples[version]) <= 5
    assert older > 0, "no sample was carried over an update: the test saw nothing"
    assert {e.prompts[0] for batch in trainer.batches[:4] for e in batch} <= {f"{n}?" for n in range(16)}


def test_a_restart_resumes_from_the_last_token(run: Any, tmp_path: Path) -> None:
    first = run(steps=2)
    saved = json.loads(torch.load(tmp_path / "states.pt", weights_only=False)["client"]["april"])
    begun = begun_in(saved["scheduler"]["state"]["buffer"]["groups"])
    second = run()
    assert (len(first.batches), len(second.batches)) == (2, 2), "the episode's four steps"
    goes_on(begun, *(itertools.chain(*trainer.samples) for trainer in (first, second)))
    trained = [trained_on(trainer) for trainer in (first, second)]
    for experience, sample in itertools.chain(*trained):
        mask = torch.cat([torch.zeros(1), experience.action_mask[0]]).bool()
        assert experience.sequences[0][mask].tolist() == sample.response_ids
    once_an_epoch(
        (sample.group_id, experience.prompts[0]) for pairs in trained for experience, sample in pairs[::GROUP]
    )


def trained_on(trainer: Trainer) -> list[tuple[Any, Any]]:
    """Each experience, and the sample that it is of."""
    return list(zip(itertools.chain(*trainer.batches), itertools.chain(*trainer.samples), strict=True))


def test_evaluation_uses_exactly_its_prompts_and_changes_no_rollout(run: Any) -> None:
    trainer = run(steps=2)
    generator = trainer.samples_generator
    waiting = json.loads(generator.state_dict())["scheduler"]["state"]["buffer"]
    kwargs = {**trainer.generate_kwargs, "temperature": 0.5, "n_samples_per_prompt": 2}
    logs = trainer.evaluate(3, **kwargs)
    assert logs["eval_num_samples"] == 12
    assert logs["eval_default_pass2"] >= logs["eval_default_pass1"]
    assert json.loads(generator.state_dict())["scheduler"]["state"]["buffer"] == waiting


def test_the_filter_replaces_groups(run: Any) -> None:
    trainer = run(
        steps=2, algo__dynamic_filtering_enable=True, algo__dynamic_filtering_range=(0.4, 1.6), train__num_episodes=3
    )
    for batch in trainer.batches:
        assert len(batch) == 4 * GROUP
        for _, group in groupby(batch, key=lambda e: e.prompts[0]):
            assert 0.4 < sum(e.scores.item() for e in group) / GROUP < 1.6
    assert trainer.samples_generator.adapter.scheduler.buffer.rejected


def policies_of(trainer: Trainer) -> list[Any]:
    """The policy of each version."""
    policies = [tiny.model() for _ in trainer.weights]
    for policy, weights in zip(policies, trainer.weights, strict=True):
        policy.load_state_dict(weights, strict=False)
    return policies


def test_an_agent_executor_is_interrupted_and_resumed(run: Any, tmp_path: Path) -> None:
    trainer = run(train__agent_func_path=str(tmp_path / "agent.py"))
    assert len(trainer.batches) == 4
    policies = policies_of(trainer)
    older = within = several = 0
    for version, batch in enumerate(trainer.batches):
        assert trainer.staleness[version] <= 5
        for experience, sample in zip(batch, trainer.samples[version], strict=True):
            label = experience.labels[0]
            text = trainer.tokenizer.decode(experience.sequences[0], skip_special_tokens=False)
            mask = experience.action_mask[0].bool()
            turns = int(experience.info["turns"].item())
            assert text.startswith(f"Q{label}?")
            assert len(text) >= 64 or (text.endswith("!") and turns == 1 + int(label) % 3)
            assert text.count(" more: ") >= turns - 1
            several += turns > 1
            tokens = [*sample.prompt_ids, *sample.response_ids]
            assert experience.sequences[0][: len(tokens)].tolist() == tokens[:64]
            drawn = sample.loss_mask.nonzero()[0] + len(sample.prompt_ids) - 1
            assert mask.nonzero()[:, 0].tolist() == [at for at in drawn.tolist() if at < 63]
            versions = sample.versions[sample.loss_mask][: int(mask.sum())]
            own = torch.stack([forward(policy, experience).detach()[mask] for policy in policies[: version + 1]])
            own = own[versions, range(len(versions))]
            first = torch.diff(mask.int(), prepend=torch.zeros(1))[mask] == 1  # OpenRLHF's: never the end
            torch.testing.assert_close(experience.rollout_log_probs[0][mask][~first], own[~first], rtol=1e-4, atol=1e-4)
            older += int((versions < version).sum())
            within += len(set(versions.tolist())) > 1
    assert older, "no sample was carried over an update"
    assert within, "no episode was interrupted"
    assert several, "no episode had several turns"


def test_a_restart_replays_an_agent_executors_responses(run: Any, tmp_path: Path) -> None:
    agent = {"train__agent_func_path": str(tmp_path / "agent.py")}
    first = run(steps=2, **agent)
    saved = json.loads(torch.load(tmp_path / "states.pt", weights_only=False)["client"]["april"])
    begun = begun_in(saved["scheduler"]["state"]["buffer"]["groups"])
    second = run(**agent)
    goes_on(begun, *(itertools.chain(*trainer.samples) for trainer in (first, second)))
    assert second.samples_generator.adapter.scheduler.state.buffer.restarted.groups == 0


def test_a_failing_agent_executor_stops_the_run(run: Any, tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="no such tool"):
        run(train__agent_func_path=str(tmp_path / "broken.py"))


def test_generation_continues_during_asynchronous_training(run: Any, tmp_path: Path) -> None:
    trainer = run(train__async_enable=True, train__partial_rollout_enable=True, train__num_episodes=2)
    assert len(trainer.batches) == 8
    assert max(trainer.staleness) <= 5
    policies = policies_of(trainer)
    meanwhile = 0
    for version, batch in enumerate(trainer.batches):
        for experience, sample in zip(batch, trainer.samples[version], strict=True):
            mask = experience.action_mask[0].bool()
            own = torch.stack([forward(policy, experience).detach()[mask] for policy in policies[: version + 1]])
            own = own[sample.versions, range(sample.length)]
            torch.testing.assert_close(experience.rollout_log_probs[0][mask][1:], own[1:], rtol=1e-4, atol=1e-4)
        meanwhile += trainer.meanwhile[version]
    assert meanwhile, "nothing was drawn during training"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"data__max_images_per_prompt": 1},
            "--data.max_images_per_prompt = 1: april's integration passes on no images",
        ),
        ({"rollout__vllm_generate_batch_size": 8}, "--rollout.vllm_generate_batch_size = 8: april has its own"),
        ({"algo__advantage": SimpleNamespace(is_correction_level="off")}, "is_correction_level = off"),
        (
            {"rollout__max_new_tokens": 100, "data__max_len": 64},
            "--rollout.max_new_tokens = 100: --data.max_len limits prompt and response together",
        ),
        ({"rollout__max_new_tokens": 64, "data__max_len": 64}, "--rollout.max_new_tokens = 64"),
        ({"rollout__batch_size": 9, "rollout__vllm_generate_batch_size": 9}, "--april.over_sampling_batch_size = 7"),
    ],
)
def test_unsupported_settings_are_refused_in_one_line(tmp_path: Path, changed: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        check_settings(arguments(tmp_path, **changed), Settings(over_sampling_batch_size=7))
    assert "\n" not in str(caught.value)


async def test_engines_of_openrlhfs_own_are_named() -> None:
    from april.integrations.openrlhf.vllm_actor import replicas

    with pytest.raises(ValueError, match=r"--vllm.num_engines = 0: april generates"):
        await replicas([])
    with pytest.raises(ValueError, match=r"start the run by `python -m april.integrations.openrlhf`"):
        await replicas([SimpleNamespace()])


class BusyActor(ChannelActor):
    """An actor in this process, which cannot be reached when it is first asked for chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.failures = 1
        self._engine = StreamEngine(self._stream, Capacity(1, 10))

    async def _stream(self, sample: Sample) -> AsyncIterator[Tokens]:
        yield [1], [-0.5]

    async def april_open(self) -> tuple[int, Capacity]:
        life = self._life + 1
        await self._serve(self._engine, life)
        return life, self._engine.capacity

    async def channel_receive(self, life: int) -> list[Any] | None:
        if self.failures:
            self.failures -= 1
            raise RayError("the node is busy")
        return await super().channel_receive(life)


async def test_an_unreachable_actor_is_reconnected() -> None:
    from april.integrations.openrlhf.vllm_actor import replicas

    class Remote:
        def __init__(self, actor: Any) -> None:
            self._actor = actor

        def __getattr__(self, name: str) -> Any:
            method = getattr(self._actor, name)
            return SimpleNamespace(remote=lambda *arguments: asyncio.ensure_future(method(*arguments)))

    (replica,) = await replicas([Remote(BusyActor())])
    (sample,) = Group.start(0, Prompt((4, 5)), 1, SamplingParams(3), 0).samples
    replica.submit(sample)
    with pytest.raises(EngineError, match="vLLM engine 0: the node is busy"):
        await replica.poll()
    assert await replica.abandon() == []
    await replica.refresh()
    replica.submit(sample)
    assert (await replica.poll())[0].token_ids.tolist() == [1]
    await replica.close()
