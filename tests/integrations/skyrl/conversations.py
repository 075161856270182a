"""Conversations whose every token follows from the tokens before it, for SkyRL's generator and april's."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import skyrl_gym
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.generators.base import BatchMetadata, GeneratorInput, TrajectoryID
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from transformers import PreTrainedTokenizerFast

from april import Chunk, FinishReason, Sample
from april.integrations.settings import Settings
from april.integrations.skyrl.generator import Generator
from april.rollout.trajectory.routes import RouteRows
from tests import tiny
from tests.scripted_engine import ScriptedEngine

EOS = 1
TURN_TOKENS = 12
CONTEXT = 400

TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def drawn_after(context: Sequence[int]) -> tuple[int, float]:
    """Return the policy's token after `context`, and its log-probability."""
    rng = random.Random(f"{len(context)} {sum(context)} {context[-1]}")
    token = EOS if rng.random() < 0.12 else rng.randrange(37, 45)  # a letter from A to H
    return token, -rng.random()


LAYERS, ROUTED, TOP_K, EXPERTS = 3, (1, 2), 2, 8
"""Shape of `mixture("Glm4Moe")`, whose first layer is dense."""


def routes_of(context: Sequence[int], start: int, end: int) -> Any:
    """Return the routes of the tokens from `start` to before `end`, [tokens, layers, top k]."""
    tokens = np.array(context[start:end])[:, None, None] + np.arange(start, end)[:, None, None]
    rows = (tokens + np.arange(LAYERS)[:, None] + np.arange(TOP_K)) % EXPERTS
    rows[:, 0] = 0
    return rows.astype(np.uint8)


class Dialogue(BaseTextEnv):
    """Answers with two messages, one or none, and ends at a reply whose length is a multiple of 9. Each turn has a
    reward."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()
        assert extras is not None
        self.max_turns = extras["max_turns"]
        self.said: list[str] = []

    def init(self, prompt: Any) -> tuple[Any, dict[str, Any]]:
        return [{"role": "system", "content": "Talk."}, *prompt], {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.said.append(action)
        done = len(action) % 9 == 0 or len(self.said) >= self.max_turns
        messages = [{"role": "user", "content": f"{action[:2]}{i}?"} for i in range(len(action) % 3)]
        observations = [] if done and len(action) % 2 else messages
        return BaseTextEnvStepOutput(observations=observations, reward=len(action) / 8, done=done, metadata={})

    def get_metrics(self) -> dict[str, Any]:
        return {"turns": float(len(self.said))}


class Talkative(Dialogue):
    """Ignores the limit of turns."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__(env_config, extras)
        self.max_turns = 20


for name in ("Dialogue", "Talkative"):
    skyrl_gym.register(id=name.lower(), entry_point=f"tests.integrations.skyrl.conversations:{name}")


def tokenizer() -> PreTrainedTokenizerFast:
    made = tiny.tokenizer()
    made.chat_template = TEMPLATE
    return made


class ContextEngine(ScriptedEngine):
    """Draws the tokens of `drawn_after`.

    Attributes:
        resumed: requests that began in the middle of a turn, by whether it was a later turn of its episode.
    """

    def __init__(self, routed: bool = False, **own: Any) -> None:
        super().__init__(**own)
        self.routed: dict[str, int] | None = {} if routed else None
        """First token of each request whose routes were not handed out."""
        self.resumed: Counter[bool] = Counter()
        self.capacity = type(self.capacity)(self.capacity.slots, CONTEXT)

    def submit(self, sample: Sample) -> None:
        assert sample.id not in self.flight
        assert not sample.awaits_environment
        turn = len(sample.transitions) - 1
        start, end = sample.turn_span(turn)
        if end > start:
            self.resumed[turn > 0 or sample.index != sample.episode] += 1
        context = [*sample.prompt_ids, *sample.response_ids]
        if self.routed is not None:
            self.routed[sample.id] = 0 if sample.routes is None else sample.routes.length
        self.flight[sample.id] = (context, 0, sample.room(CONTEXT))

    def serve(self, id: str, count: int) -> Chunk:
        context, _, room = self.flight[id]
        drawn: list[tuple[int, float]] = []
        while len(drawn) < min(count, room) and not (drawn and drawn[-1][0] == EOS):
            drawn.append(drawn_after(context))
            context.append(drawn[-1][0])
        self.flight[id] = (context, 0, room - len(drawn))
        stopped = bool(drawn) and drawn[-1][0] == EOS
        finish = FinishReason.STOP if stopped else FinishReason.LENGTH if len(drawn) == room else None
        if finish is not None:
            del self.flight[id]
        routes = None
        if self.routed is not None and drawn:
            start, self.routed[id] = self.routed[id], len(context) - 1
            routes = RouteRows(start, routes_of(context, start, len(context) - 1)[:, ROUTED])
        return Chunk(id, [t for t, _ in drawn], [p for _, p in drawn], self.version, finish, routes=routes)


class ContextClient:
    """SkyRL's inference client, for the same policy."""

    weight_version = 0
    uses_lora_weight_sync = False

    def __init__(self, words: PreTrainedTokenizerFast, stops: Sequence[str] = (), routed: bool = False) -> None:
        self.words = words
        self.routed = routed
        self.stops = stops
        self.stopped = 0
        """Turns that ended at a stop string."""

    async def detokenize(self, token_ids: list[list[int]]) -> list[str]:
        decoded: list[str] = self.words.batch_decode(token_ids)
        return decoded

    async def generate(self, request: Mapping[str, Any], model: str | None = None) -> dict[str, Any]:
        prompts = request["prompt_token_ids"]
        starts = request.get("routed_experts_prompt_starts") or [0] * len(prompts)
        made = [await self._turn(prompt, start) for prompt, start in zip(prompts, starts, strict=True)]
        return {name: [turn[name] for turn in made] for name in made[0]}

    async def _turn(self, prompt: Sequence[int], start: int) -> dict[str, Any]:
        context, logprobs = list(prompt), []
        room = min(TURN_TOKENS, CONTEXT - len(prompt))
        stopped = False
        while len(logprobs) < room and not stopped:
            token, logprob = drawn_after(context)
            context.append(token)
            logprobs.append(logprob)
            text = self.words.decode(context[len(prompt) :])
            stopped = token == EOS or any(stop in text for stop in self.stops)
        ids = context[len(prompt) :]
        self.stopped += stopped and ids[-1] != EOS
        routes = {"rollout_expert_indices": routes_of(context, start, len(context) - 1)} if self.routed else {}
        return {
            "responses": (await self.detokenize([ids]))[0],
            "response_ids": ids,
            "stop_reasons": "stop" if stopped else "length",
            "response_logprobs": logprobs,
            **routes,
        }

    async def finish_session(self, session_id: str) -> None: ...


def row(number: int, env_class: str = "dialogue") -> dict[str, Any]:
    """Return a row of SkyRL's dataset."""
    prompt = [{"role": "user", "content": f"{number}?"}]
    return {"prompt": prompt, "env_class": env_class, "env_extras": {"answer": str(number)}, "uid": str(number)}


def requested(rows: Sequence[Mapping[str, Any]], samples: int) -> GeneratorInput:
    """Return SkyRL's request for the samples of these rows."""
    every = [(one, repetition) for one in rows for repetition in range(samples)]
    return GeneratorInput(
        prompts=[one["prompt"] for one, _ in every],
        env_classes=[one["env_class"] for one, _ in every],
        env_extras=[dict(one["env_extras"]) for one, _ in every],
        sampling_params=None,
        trajectory_ids=[TrajectoryID(one["uid"], repetition) for one, repetition in every],
        batch_metadata=BatchMetadata(global_step=1, training_phase="train"),
    )


def generator(cfg: SkyRLTrainConfig, first_extra: int, engine: ContextEngine, more: int = 4) -> Generator:
    """Return april's generator, whose extra prompts are the rows from `first_extra`."""
    words = tokenizer()
    made = Generator(
        cfg,
        Settings(over_sampling_batch_size=cfg.trainer.train_batch_size + more),
        generator_cfg=cfg.generator,
        skyrl_gym_cfg=cfg.environment.skyrl_gym,
        inference_engine_client=ContextClient(words),
        tokenizer=words,
    )
    rows = (row(number, cfg.environment.env_class) for number in range(first_extra, 10_000))
    made.dataloader = SimpleNamespace(rows=rows)

    async def connect() -> ContextEngine:
        return engine

    made._connect = connect
    made._stop_tokens = lambda: (EOS,)
    return made
