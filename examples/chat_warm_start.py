"""Warm start of the example policies with environments: a tokenizer with a chat template, and supervised training on
episodes that a scripted player plays in the real environment.

Invariants:
- a demonstration consists of the same tokens as in a run: `ChatBridge` concatenates the turns;
- only the player's tokens are learnt, including the token that ends its turn;
- everything random is seeded: weights, problems, demonstrations and evaluation all follow from seeds.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from april import FinishReason, Prompt, SamplingParams, Turn
from april.engines.embedded import EmbeddedEngine
from april.environments.bridge import ChatBridge
from april.rollout.episodes.environment_episodes import EnvironmentEpisodes
from april.rollout.evaluation import evaluate
from april.rollout.generation.in_flight import SharedEngine
from april.rollout.params import FaultSettings
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.sample import Sample
from april.rollout.trajectory.transition import Transition

PAD, UNK, END = "<pad>", "<unk>", "<|im_end|>"
SPECIAL = (PAD, UNK, END, "<|im_start|>")

Player = Callable[[Sequence[str]], str]
"""The answer of a scripted player to the messages so far."""


TOOL_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- for tool in tools %}{{- tool.function.name }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments|tojson + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""Chat template of the examples with tools: calls in the format of Qwen."""


class Episode(NamedTuple):
    """Tokens, and a mask of the player's tokens."""

    token_ids: list[int]
    said: list[bool]
    reward: float


def make_tokenizer(pieces: Sequence[str], pattern: str, chat_template: str) -> PreTrainedTokenizerFast:
    """A word-level tokenizer of the known `pieces`, which the regular expression `pattern` cuts a text into."""
    vocabulary = {piece: id for id, piece in enumerate(dict.fromkeys([*SPECIAL, *pieces]))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNK,
        chat_template=chat_template,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, hidden_size: int, layers: int, context: int) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(END),
        pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
    )
    return Qwen3ForCausalLM(config)


class Stage:
    """Where scripted players play: an environment, the tokens of its episodes, and how many turns they have."""

    def __init__(self, environment: Any, tokenizer: PreTrainedTokenizerFast, turns: int, tools: Sequence[Any] = ()):
        self.environment, self.tokenizer, self.turns = environment, tokenizer, turns
        self.bridge = ChatBridge(tokenizer, [tokenizer.convert_tokens_to_ids(END)], tools)

    def prompt(self, text: str, **metadata: Any) -> Prompt:
        messages = [{"role": "user", "content": text}]
        rendered = self.tokenizer.apply_chat_template(messages, tokenize=False, **self.bridge.prompt_arguments)
        return Prompt(tuple(self._ids(rendered)), text, {"prompt": messages, **metadata})

    def play(self, prompt: Prompt, player: Player, seed: int) -> Episode:
        """An episode, as a run would hold its tokens."""
        sample = Group.start(0, prompt, 1, SamplingParams(max_tokens=1 << 20, max_turns=self.turns), seed=0).samples[0]
        heard, reward = [prompt.id], 0.0
        begun = self.environment.reset({"id": prompt.id, **prompt.metadata}, seed)
        _observe(sample, self.bridge.begin(prompt, begun))
        for index in range(self.turns):
            ids = self._ids(player(heard) + END)
            sample.extend(ids, [0.0] * len(ids), version=0, finish=FinishReason.STOP)
            said = self.bridge.read(ids)
            step = self.environment.step(Turn(sample.id, index, said.text, tuple(ids), said.message))
            reward += step.reward
            if step.done or index == self.turns - 1:
                break
            heard.append(step.observation if isinstance(step.observation, str) else step.observation[-1]["content"])
            _observe(sample, self.bridge.extend(sample, step.observation))
        said_by_player = [False] * len(prompt.token_ids) + sample.loss_mask.tolist()
        return Episode([*prompt.token_ids, *sample.response_ids], said_by_player, reward)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        assert self.tokenizer.unk_token_id not in ids, f"the vocabulary lacks a piece of {text!r}"
        return ids


def _observe(sample: Sample, token_ids: Sequence[int] | None) -> None:
    assert token_ids is not None, "the observation cannot be put behind the turn"
    sample.observe(token_ids, Transition(sample.length, len(token_ids)))


def negative_log_likelihood(model: Qwen3ForCausalLM, batch: Sequence[Episode]) -> torch.Tensor:
    """Loss summed over the player's tokens in `batch`, in nats."""
    length = max(len(episode.token_ids) for episode in batch)
    ids = torch.zeros(len(batch), length, dtype=torch.long)
    labels = torch.full((len(batch), length), -100)
    for row, episode in enumerate(batch):
        tokens = torch.tensor(episode.token_ids)
        ids[row, : len(tokens)] = tokens
        labels[row, : len(tokens)] = torch.where(torch.tensor(episode.said), tokens, -100)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


def warm_start(
    model: Qwen3ForCausalLM, episodes: Iterator[Episode], steps: int, batch_size: int, peak_lr: float, micro: int
) -> None:
    """Supervised training on `episodes`; the learning rate rises over 50 steps and falls on a cosine to 2 %.

    Args:
        micro: episodes in one forward and backward pass; episodes of a batch are sorted by length first.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 50, 0.51 + 0.49 * math.cos(math.pi * step / steps))
    )
    started, seen, loss_sum = time.monotonic(), 0, 0.0
    for step in range(1, steps + 1):
        batch = sorted(itertools.islice(episodes, batch_size), key=lambda episode: len(episode.token_ids))
        tokens = sum(sum(episode.said) for episode in batch)
        for at in range(0, batch_size, micro):
            nll = negative_log_likelihood(model, batch[at : at + micro])
            (nll / tokens).backward()
            loss_sum += nll.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        seen += tokens
        if step % 50 == 0 or step == steps:
            seconds = time.monotonic() - started
            print(f"step {step}/{steps}  loss {loss_sum / seen:.3f} nats/token  {seconds:.0f} s", flush=True)
            seen, loss_sum = 0, 0.0


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """The policy as it ships: weights in bf16."""
    end = tokenizer.convert_tokens_to_ids(END)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, eos_token_id=end, pad_token_id=tokenizer.convert_tokens_to_ids(PAD)
    )
    model.bfloat16().save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def episodes_of(
    model: torch.nn.Module,
    stage: Stage,
    prompts: Sequence[Prompt],
    n: int,
    seed: int,
    max_tokens: int,
    slots: int = 256,
) -> list[Group]:
    """`n` episodes of each prompt at temperature 1, as an evaluation of a run plays them."""
    stops = (stage.tokenizer.convert_tokens_to_ids(END),)
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=stops, max_turns=stage.turns)

    async def play() -> list[Group]:
        engine = EmbeddedEngine(model, max_num_seqs=256)
        context = engine.capacity.context_length
        world = EnvironmentEpisodes(lambda: copy.deepcopy(stage.environment), stage.bridge, context)
        faults = FaultSettings(max_retries=0)
        groups = await evaluate(SharedEngine(engine), prompts, n, sampling, seed, 0, faults, world)
        await engine.close()
        return groups

    return asyncio.run(play())


def rewards(groups: Sequence[Group]) -> list[float]:
    """What the environment gave, over the episodes."""
    return [sum(turn.reward for turn in sample.transitions) for group in groups for sample in group.samples]
