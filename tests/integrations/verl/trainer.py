"""verl's V1 trainer on a machine without a GPU: everything of it runs but the training of the policy and the engine.

Real are its loop, dataset, dataloader, TransferQueue, replay buffer, agent-loop workers, reward workers, LLM client,
load balancer, checkpoint engine manager and checkpoints. The replica is an actor that samples from a tiny policy token
by token behind the same gate as verl's vLLM server; version v of the policy is `tiny.model(seed=v)`, so what would be a
training step only counts.
"""

from __future__ import annotations

import asyncio
import functools
import math
import os
import re
import signal
from pathlib import Path
from typing import Any

import datasets
import pandas
import ray
import torch
import transfer_queue as tq
import transformers
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from transfer_queue import KVBatchMeta
from verl.checkpoint_engine import CheckpointEngineManager
from verl.experimental.reward_loop import RewardLoopManager
from verl.trainer.ppo.v1 import AgentLoopManagerTQ
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.import_utils import load_class_from_fqn
from verl.utils.tokenizer import hf_processor
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.rollout.replica import RolloutReplica, TokenOutput
from verl.workers.rollout.utils import get_vision_placeholder_token_ids, qwen2_5_vl_dedup_image_tokens

from april.integrations.verl import AprilRolloutManager, AprilTrainer
from april.integrations.verl.manager import row_of
from tests import tiny, vision

BEGUN = re.compile(r"prompt (\d+) of many: ")
"""The prompts of the tests' data, as long as nothing was sampled for them."""

BEGUN_WITH_IMAGES = re.compile(r"<\|im_start\|>user\nprompt (\d+) of many: (<\|\w+\|>)*\n<\|im_start\|>assistant\n")
"""The same of data with images."""

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"

TOOLS_TEMPLATE = (
    "{% for t in tools or [] %}[{{ t['function']['name'] }}]{% endfor %}{% for m in messages %}"
    "{% if m['role'] == 'tool' %}<result>{{ m['content'] }}</result>"
    "{% else %}{{ m['content'] }}{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endif %}{% endfor %}"
)
CALLING = re.compile(r"\[add\]prompt (\d+) of many: (.*)", re.DOTALL)
"""A conversation with a tool."""
ONCE_ANSWERED = re.compile(r"\[add\]prompt (\d+) of many: ((?!<result>).)*<result>\d+</result>", re.DOTALL)
"""Its second turn, as long as nothing was sampled for it."""


def call_of(number: int, answered: int) -> str:
    """The text of a policy that calls the tool."""
    arguments = f'{{"a":{number},"b":{answered + 1}}}'
    return f'<tool_call>{{"name":"add","arguments":{arguments}}}</tool_call><eos>'


def policy_of(version: int, weights: dict[str, torch.Tensor] | None = None) -> Any:
    """The policy with weights that were trained, or that which stands for a version where none are."""
    if weights is None:
        return tiny.model(seed=version)
    policy = tiny.model()
    missing, unknown = policy.load_state_dict(weights, strict=False)
    assert not unknown
    assert set(missing) <= {"lm_head.weight"}  # it is tied
    return policy


def seeing(version: int, weights: dict[str, torch.Tensor] | None = None, architecture: str = "Qwen2_5_VL") -> Any:
    """The policy that reads images, as `policy_of`."""
    policy = vision.model(architecture, seed=version)
    if weights is not None:
        missing, unknown = policy.load_state_dict(weights, strict=False)
        assert not unknown
        assert set(missing) <= {"lm_head.weight"}  # it is tied
    return policy


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any, **_: Any) -> dict[str, Any]:
    """A custom reward function of verl's; it fails where a row is not the response's own."""
    assert data_source == "tests"
    assert int(ground_truth) == extra_info["index"]
    return {"score": float(len(solution_str) % 2), "truth": int(ground_truth)}


def compute_sum(data_source: str, solution_str: str, ground_truth: str, extra_info: Any, **_: Any) -> float:
    """Another one, by which hardly two responses are equal: every group carries a signal."""
    return float(sum(map(ord, solution_str)) % 997)


@ray.remote(num_cpus=0, max_concurrency=100)
class TinyServer:
    """A replica: one token of every request in turn.

    Interruptions must not depend on the machine. So a request that begins a prompt, from number `still_from` on,
    samples a token and pauses until the next abort; and no other request ends before `standing` requests have begun
    like that. If the policy is to call a tool `calls` times, a request pauses in the turn after the first call. With
    `dies = (replica, version, tokens)` that replica kills its process when it has sampled this number of tokens of that
    version, with 0 when it is put to sleep; requests then pause under version 0 only.

    With `images`, the folder of a model, the policy reads images as in verl's vLLM replica.
    """

    def __init__(
        self,
        seed: int,
        response_length: int,
        still_from: int | None = None,
        standing: int = 0,
        calls: int = 0,
        dies: tuple[int, int, int] | None = None,
        images: str | None = None,
    ) -> None:
        torch.set_num_threads(1)
        self._response_length = response_length
        self._still_from = still_from
        self._standing = standing
        self._calls = calls
        self._dies = tuple(dies) if dies else None
        self._replica = seed
        self._sampled = 0
        self._begun = 0
        self._processor = hf_processor(images) if images else None
        self._architecture = type(self._processor).__name__.removesuffix("Processor")
        self._tokenizer = vision.tokenizer() if images else tiny.tokenizer()
        self._random = torch.Generator().manual_seed(seed)
        self._open = asyncio.Event()
        self._open.set()
        self._rejecting = False
        self._running = 0
        self._asleep = False
        self._ran_asleep: list[str] = []
        self.global_steps: int | None = None

    def set_weights(self, version: int, weights: dict[str, torch.Tensor] | None = None) -> None:
        """Wake up with new weights, as verl's workers do with a replica on their devices."""
        assert not self._running, "weights changed while requests were running"
        assert not self._ran_asleep, f"requests reached the policy while it slept: {self._ran_asleep}"
        self._asleep = False
        made = functools.partial(seeing, architecture=self._architecture) if self._processor else policy_of
        self._policy = made(version, weights)
        self.global_steps = version
        self._sampled = 0
        if self._dies and version:
            self._still_from, self._standing = None, 0

    async def generate(
        self,
        request_id: str,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        image_data: list[Any] | None = None,
        **_: Any,
    ) -> TokenOutput:
        while not self._open.is_set():
            if self._rejecting:
                return TokenOutput(
                    token_ids=[], stop_reason="aborted", extra_fields={"global_steps": self.global_steps}
                )
            await self._open.wait()
        # A late request may find the gate closed, and goes no further.
        if self._asleep:
            self._ran_asleep.append(request_id)
        self._running += 1
        end = self._policy.config.get_text_config().eos_token_id
        given = self._images(prompt_ids, image_data) if self._processor else {}
        # Validation leaves the budget to the replica.
        training, budget = "max_tokens" in sampling_params, sampling_params.get("max_tokens", self._response_length)
        told = self._tokenizer.decode(prompt_ids)
        begun = BEGUN_WITH_IMAGES if self._processor else BEGUN
        begins = (ONCE_ANSWERED if self._calls else begun).fullmatch(told)
        words = self._words(told)
        numbered = training and begins is not None and self._still_from is not None
        stands = numbered and int(begins[1]) >= self._still_from
        tokens: list[int] = []
        logprobs: list[float] = []
        over = False
        try:
            while not over and self._open.is_set():
                with torch.no_grad():
                    whole = torch.tensor([[*prompt_ids, *tokens]])
                    if given:
                        given["mm_token_type_ids"] = (whole == vision.PLACEHOLDER).int()
                    logits = self._policy(whole, **given).logits[0, -1]
                if self._processor:  # as verl has vLLM mask it
                    logits[list(get_vision_placeholder_token_ids(self._processor))] = -math.inf
                scores = logits.log_softmax(-1)
                token = int(torch.multinomial(scores.exp(), 1, generator=self._random))
                if words:
                    token = words[len(tokens)]
                tokens.append(token)
                logprobs.append(float(scores[token]))
                self._sampled += 1
                if (self._replica, self.global_steps, self._sampled) == self._dies:
                    os.kill(os.getpid(), signal.SIGKILL)
                over = token == end or len(tokens) == budget
                self._begun += stands and len(tokens) == 1
                await asyncio.sleep(0)
                waits = training and not words
                while self._open.is_set() and (stands if not over else waits and self._begun < self._standing):
                    await asyncio.sleep(0.01)
        finally:
            self._running -= 1
        reason = "completed" if over else "aborted"
        fields = {"global_steps": self.global_steps}
        return TokenOutput(token_ids=tokens, log_probs=logprobs, stop_reason=reason, extra_fields=fields)

    def _images(self, prompt_ids: list[int], image_data: list[Any] | None) -> dict[str, Any]:
        """The policy's inputs of the images of a request. As in vLLM, each placeholder becomes as many as its image has
        embeddings, after verl has reduced those of the request."""
        if not image_data:
            return {}
        made = self._processor.image_processor(images=image_data, return_tensors="pt")
        counts = [int(grid.prod()) // self._processor.image_processor.merge_size**2 for grid in made["image_grid_thw"]]
        expanded: list[int] = []
        for token in qwen2_5_vl_dedup_image_tokens(prompt_ids, self._processor):
            expanded += [token] * (counts.pop(0) if token == vision.PLACEHOLDER else 1)
        assert not counts
        assert expanded == list(prompt_ids), "placeholders and images do not fit"
        return dict(made)

    def _words(self, told: str) -> list[int]:
        """The prescribed text of the policy to the end of this turn; empty if the text is free."""
        match = CALLING.fullmatch(told)
        if match is None or told.count("<result>") >= self._calls:
            return []
        said = match[2].rpartition("</result>")[2]
        call = call_of(int(match[1]), told.count("<result>"))
        assert call.startswith(said)
        return list(self._tokenizer(call[len(said) :])["input_ids"])

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        self._open.clear()
        self._rejecting = reject_request
        while self._running:
            await asyncio.sleep(0)

    async def resume_generation(self) -> None:
        self._rejecting = False
        self._begun = 0
        self._open.set()

    def asleep(self) -> bool:
        return self._asleep

    def sleep(self) -> None:
        """Release the weights, as at level 2. A real server may die of it while requests run."""
        if (self._replica, self.global_steps, 0) == self._dies:
            os.kill(os.getpid(), signal.SIGKILL)
        assert not self._running, "the replica was put to sleep while requests were running"
        self._asleep = True
        self._policy = None

    def wake_up(self) -> None: ...


class TinyReplica(RolloutReplica):
    actor_name: str | None = None
    """Name of the replica's actor: none, because a further run of the process may begin before a name is free."""

    async def launch_servers(self) -> None:
        threads = {"env_vars": {"OMP_NUM_THREADS": "1"}}
        server = TinyServer.options(name=self.actor_name, runtime_env=threads)
        self._server_handle = server.remote(
            self.replica_rank, self.config.response_length, **(self.config.custom or {})
        )
        self._server_address = f"tiny-{self.replica_rank}"
        self.servers = [self._server_handle]


class TinyServers(LLMServerManager):
    rollout_replica_class = TinyReplica


class CountingWorkers:
    """Stands where the training workers are: it takes no step, it only hands over version after version."""

    def __init__(self, replicas: int) -> None:
        self.world_size = replicas
        self.workers = [None] * replicas
        self.servers: list[Any] = []

    def update_weights(self, global_steps: int, mode: str) -> list[Any]:
        assert mode == "naive"
        return [server.set_weights.remote(global_steps) for server in self.servers]

    def save_checkpoint(self, path: str, remote: str | None, step: int, max_ckpt_to_keep: int | None) -> None:
        Path(path).mkdir(parents=True)

    def load_checkpoint(self, local_path: str, del_local_after_load: bool) -> None:
        assert Path(local_path).is_dir()


class Untrained:
    """Makes a trainer of verl's one without training workers. `batches` keeps every step's rows as training would get
    them."""

    servers: type[LLMServerManager] = TinyServers

    def _setup(self) -> None:
        self.batches: list[list[dict[str, Any]]] = []
        self._init_tokenizer()
        self._init_dataloader()
        self._init_dump_executor()
        self.actor_rollout_wg = self.workers()
        self.reward_loop_manager = RewardLoopManager(config=self.config)
        self.llm_server_manager = self.servers.create(config=self.config, worker_group=self.actor_rollout_wg)
        self.actor_rollout_wg.servers = self.llm_server_manager.server_handles
        engine = omega_conf_to_dataclass(self.config.actor_rollout_ref.rollout.checkpoint_engine)
        engine.backend = "naive"
        self.checkpoint_manager = CheckpointEngineManager(
            config=engine, actor_wg=self.actor_rollout_wg, replicas=self.llm_server_manager.get_replicas()
        )
        self._load_checkpoint()

    def workers(self) -> Any:
        return CountingWorkers(self.config.trainer.n_gpus_per_node)

    def _step_once(self, metrics: dict[str, Any], timing: dict[str, Any], sample_batch_size: int) -> KVBatchMeta:
        """verl's, up to where the policy is trained."""
        self.on_sample_begin()
        batch, sampled = self.replay_buffer.sample(self.global_steps, "train", sample_batch_size)
        metrics.update(sampled)
        self.on_sample_end()
        living = [server for replica in self.checkpoint_manager.replicas for server in replica.servers]
        assert all(ray.get([server.asleep.remote() for server in living])), "verl trains while a replica is awake"
        data = tq.kv_batch_get(keys=batch.keys, partition_id="train")
        rows = [row_of(data, i) for i in range(len(batch.keys))]
        self.batches.append([{**row, "tag": tag} for row, tag in zip(rows, batch.tags, strict=True)])
        return batch

    def _compute_metrics(self, batch: KVBatchMeta, metrics: dict[str, Any], *_: Any, **__: Any) -> None:
        """They are of training."""


class TinyTrainer(Untrained, AprilTrainer):
    def _save_checkpoint(self) -> None:
        """With prompts that have not begun yet, as in a run that continues from one of verl's own modes."""
        self._add_prompts_to_generate(2)
        super()._save_checkpoint()


def train(config: DictConfig, kind: type[Any]) -> Any:
    """What verl's task runner does; the trainer, at its end."""
    OmegaConf.resolve(config)
    config.transfer_queue.enable = True
    tq.init(config.transfer_queue)
    try:
        trainer = kind(config)
        trainer.init()
        manager = config.actor_rollout_ref.rollout.agent.get("agent_loop_manager_class")
        manager = load_class_from_fqn(manager) if manager else AgentLoopManagerTQ
        manager = manager.create(
            config=config,
            llm_client=trainer.get_llm_client(),
            teacher_client=None,
            reward_loop_worker_handles=trainer.get_reward_handles(),
        )
        trainer.fit(manager)
        if isinstance(manager, AprilRolloutManager):
            manager.loop.close()
    finally:
        tq.close()
        # In production verl's actors end with its process; the next run's actors have the same names.
        for name in ray.util.list_named_actors():
            ray.kill(ray.get_actor(name))
    return trainer


def save_policy(path: Path, template: str = TEMPLATE, **config: Any) -> Path:
    """A policy and its tokenizer, with a chat template."""
    tiny.save(path, **config)
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    return path


def save_prompts(path: Path, count: int) -> Path:
    """A data set of verl's."""
    rows = [
        {
            "data_source": "tests",
            "prompt": [{"role": "user", "content": f"prompt {i} of many: "}],
            "reward_model": {"style": "rule", "ground_truth": str(i)},
            "extra_info": {"index": i},
        }
        for i in range(count)
    ]
    pandas.DataFrame(rows).to_parquet(path)
    return path


def save_seeing_policy(path: Path, architecture: str = "Qwen2_5_VL") -> Path:
    """A policy that reads images, with its processor."""
    return save_processor_of(vision.save(path, architecture), architecture)


def save_processor_of(path: Path, architecture: str) -> Path:
    """Save the processor of a policy that reads images, with its part for videos."""
    videos = {"Qwen2_5_VL": "Qwen2VLVideoProcessor", "Qwen3VL": "Qwen3VLVideoProcessor"}[architecture]
    parts = vision.image_processor(), vision.tokenizer(), getattr(transformers, videos)()
    getattr(transformers, f"{architecture}Processor")(*parts, chat_template=vision.TEMPLATE).save_pretrained(path)
    return path


def save_prompts_with_images(path: Path, count: int, column: str) -> Path:
    """A data set of verl's with none, one or two images in a prompt.

    Args:
        column: what the column of images has: the bytes of files, decoded images, or the paths of files.
    """
    rows = []
    for i in range(count):
        files = [vision.picture(path.parent / f"{i}-{n}.png", (24 + 8 * n, 16 + 8 * (i % 3)), mark=i) for n in range(2)]
        forms = {"paths": str, "bytes": lambda file: {"bytes": Path(file).read_bytes()}, "decoded": str}
        images = [forms[column](file) for file in files[: i % 3]]
        rows.append(
            {
                "data_source": "tests",
                "prompt": [{"role": "user", "content": f"prompt {i} of many: " + "<image>" * len(images)}],
                "images": images,
                "reward_model": {"style": "rule", "ground_truth": str(i)},
                "extra_info": {"index": i},
            }
        )
    made = datasets.Dataset.from_list(rows)
    if column == "decoded":
        made = made.cast_column("images", datasets.List(datasets.Image()))
    made.to_parquet(path)
    return path


def config_of(model: Path, data: Path, checkpoints: Path, *overrides: str) -> DictConfig:
    """verl's own configuration, composed by hydra."""
    import verl.trainer.config

    with initialize_config_dir(str(Path(verl.trainer.config.__file__).parent), version_base=None):
        return compose(
            "ppo_trainer",
            [
                *(
                    f"data.train_files={data}",
                    f"data.val_files={data}",
                    "data.train_batch_size=3",
                    "data.shuffle=false",
                ),
                *("data.val_batch_size=2", "data.val_max_samples=2", "data.dataloader_num_workers=0"),
                *("data.max_prompt_length=64", "data.max_response_length=24", "data.return_raw_chat=true"),
                *(f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.rollout.name=vllm"),
                *("actor_rollout_ref.rollout.n=2", "actor_rollout_ref.rollout.tensor_model_parallel_size=1"),
                *("actor_rollout_ref.rollout.agent.num_workers=1", "reward.num_workers=1"),
                "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
                f"reward.custom_reward_function.path={Path(__file__)}",
                "reward.custom_reward_function.name=compute_score",
                *("algorithm.adv_estimator=grpo", "trainer.device=cpu", "trainer.logger=[]", "trainer.nnodes=1"),
                *("trainer.n_gpus_per_node=1", "trainer.save_freq=2", "trainer.test_freq=-1"),
                *("trainer.total_training_steps=5", f"trainer.default_local_dir={checkpoints}"),
                *("trainer.v1.trainer_mode=april", "+trainer.v1.april.over_sampling_batch_size=6"),
                *overrides,
            ],
        )
