"""What a policy is trained on: problems, and how responses to them are scored.

Invariants:
- a problem is data that survives JSON; it travels in `Prompt.metadata`, and scoring needs nothing else, so a response
  that was buffered before a restart is scored like any other;
- the same settings make the same problems, in every process;
- the prompt that the policy sees never ends with an end-of-sequence token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from april.rollout.trajectory import Prompt, Reward

Split = Literal["train", "eval"]
Messages = list[dict[str, str]]
"""A conversation: `{"role": ..., "content": ...}` in order."""
ChatTemplate = Literal["auto", "always", "never"]
"""Which prompts go through the tokenizer's chat template. `auto`: conversations do, plain text is tokenized as it is.
`always`: plain text too, as a user message. `never`: none, and a conversation is an error."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A prompt and what its reward needs. `prompt`, `answer` and `metadata` are JSON types."""

    id: str
    prompt: str | Messages
    answer: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, prompt: Prompt) -> Problem:
        """The problem that `encode` made `prompt` from."""
        return cls(prompt.id, **prompt.metadata)

    @property
    def question(self) -> str:
        """The prompt as text: for a conversation, its last message."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt[-1]["content"]


class Scorer(Protocol):
    """Scores responses to one problem. It pickles, so that a worker process has its own."""

    scope: Literal["sample", "group"]
    """"group" if all responses to a problem must be scored at once."""

    correct_at: float | None
    """A response with this reward or more is correct; None where the task does not say what correct means."""

    def __call__(
        self, problem: Problem, responses: Sequence[str], lengths: Sequence[int] | None = None
    ) -> list[Reward]:
        """One finite reward per response; `lengths` are the responses' in tokens, where they are known."""
        ...


class Task(Protocol):
    """Training problems 0 to `len(task) - 1`, `eval_size` problems that are kept out of training, and their scorer."""

    name: str
    eval_size: int
    scorer: Scorer

    def __len__(self) -> int: ...

    def problem(self, index: int, split: Split = "train") -> Problem: ...

    @property
    def correct(self) -> Callable[[float], bool] | None:
        """Whether a response with this reward is correct; None where the task does not say what correct means."""
        bar = self.scorer.correct_at
        return None if bar is None else lambda reward: reward >= bar

    def score(self, problem: Problem, response: str) -> float:
        """The reward of one response, in this process; `RewardWorkers(task.scorer)` scores in others."""
        return self.scorer(problem, [response])[0].value


OWN = frozenset({"task", "math-verify"})
"""Rewards that need no function: the dataset's own scorer, and math-verify."""


@dataclass(frozen=True)
class TaskSpec:
    """The settings a task is made from: plain data, so that a worker process can make its own.

    Args:
        kind: where problems come from: a reasoning-gym dataset, a file of records, or the environment alone: every
            episode begins with `prompt`, and what the environment's reset says.
        name: the reasoning-gym dataset.
        params: that dataset's own parameters.
        prompt: what every episode begins with (kind environment).
        path: the records: a file, `.jsonl`, `.json` or `.parquet`; a data set on the Hugging Face hub, `owner/name`;
            or a directory in the hub's layout.
        subset: of a data set on the hub that has several (`main` of openai/gsm8k).
        split: of a data set on the hub.
        eval_path: other records to evaluate on; without it and `eval_split`, part of `path` is held out.
        eval_split: split to evaluate on, of `eval_path` if that is set, or of `path`.
        unique_prompts: leave out records that repeat an earlier one's prompt.
        prompt_column: text, or a list of chat messages. Dots reach into nested columns (`reward_model.ground_truth`).
        answer_column: the reference answer; None if the reward function needs none.
        metadata_columns: columns that reward functions are given beside the answer; unset: all.
        id_column: a unique name per record; by default file name and record number.
        reward: "task" (the dataset's own scorer, or math-verify for records), "math-verify", or a function,
            `FILE.py:NAME` or `package.module:NAME`.
        rewards: several of them instead, each with its weight: the reward is their weighted sum, and each is logged
            by its name. april.tasks.format and april.tasks.length have ready-made ones.
        reward_scope: whether that function scores one response or all responses to a problem at once.
        correct_at: the reward from which a response is correct, and counts in the accuracy; by default 1 for a
            dataset's own scorer and math-verify. For functions of one's own nothing is correct unless this is set.
        extract: what of a response the dataset's scorer or math-verify sees: what stands in `<answer_tag>` ("tag",
            the default for a dataset's own scorer; a response without it scores 0) or all of it ("whole").
        answer_tag: the tag's name.
        seed: of the problems that are generated, or of the choice of those held out.
        size: training problems; by default 10,000 are generated, or all records are used.
        eval_size: held-out problems, or with a file their share if below 1. By default 128, but at most a tenth of a
            file, and all of `eval_path`.
        chat_template: see `ChatTemplate`.
        system_prompt: goes before every prompt as a system message.
    """

    kind: Literal["reasoning_gym", "records", "environment"]
    name: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    prompt: str | None = None
    path: str | None = None
    subset: str | None = None
    split: str = "train"
    eval_path: str | None = None
    eval_split: str | None = None
    unique_prompts: bool = False
    prompt_column: str = "prompt"
    answer_column: str | None = "answer"
    metadata_columns: tuple[str, ...] | None = None
    id_column: str | None = None
    reward: str = "task"
    rewards: Mapping[str, float] = field(default_factory=dict)
    reward_scope: Literal["sample", "group"] = "sample"
    correct_at: float | None = None
    extract: Literal["tag", "whole"] | None = None
    answer_tag: str = "answer"
    seed: int = 0
    size: int | None = None
    eval_size: float | None = None
    chat_template: ChatTemplate = "auto"
    system_prompt: str | None = None

    def __post_init__(self) -> None:
        def require(condition: bool, name: str, rule: str) -> None:
            if not condition:
                raise ValueError(f"{name} = {getattr(self, name)!r}: {rule}")

        kinds = ("reasoning_gym", "records", "environment")
        require(self.kind in kinds, "kind", 'must be "reasoning_gym", "records" or "environment"')
        prompted = bool((self.prompt or "").strip())
        require(self.kind != "environment" or prompted, "prompt", "give what episodes begin with")
        require(self.kind == "environment" or self.prompt is None, "prompt", 'goes with kind = "environment"')
        require(self.kind != "reasoning_gym" or bool(self.name), "name", "give the name of a reasoning-gym dataset")
        require(self.kind != "records" or bool(self.path), "path", "give a file of records, or a data set of the hub")
        weighed = not self.rewards or self.reward in {"task", *self.rewards}
        require(weighed, "reward", 'rewards are set too: give it a weight among them, or set reward = "task"')
        require(all(map(math.isfinite, self.rewards.values())), "rewards", "weights must be finite numbers")
        require(self.reward_scope in ("sample", "group"), "reward_scope", 'must be "sample" or "group"')
        require(self.extract in (None, "tag", "whole"), "extract", 'must be "tag" or "whole"')
        require(self.chat_template in ("auto", "always", "never"), "chat_template", "must be auto, always or never")
        require(self.seed >= 0, "seed", "must not be negative")
        require(self.size is None or self.size >= 1, "size", "a task needs at least one problem")
        finite = self.eval_size is None or 0 <= self.eval_size < math.inf
        require(finite, "eval_size", "must be a finite number, and not negative")
        whole = self.eval_size is None or self.eval_size == int(self.eval_size)
        share = self.kind == "records" and not (self.eval_path or self.eval_split) and (self.eval_size or 0) < 1
        require(whole or share, "eval_size", "must be a whole number, or the share below 1 of a file to hold out")
        require(
            not (self.system_prompt and self.chat_template == "never"),
            "system_prompt",
            'needs the chat template, but chat_template = "never"; write it into the prompts instead',
        )

    @property
    def weights(self) -> Mapping[str, float]:
        """What a response is scored by, and how much each counts."""
        return self.rewards or {self.reward: 1.0}

    @property
    def needs_answer(self) -> bool:
        """Whether april compares with the answer itself."""
        return not OWN.isdisjoint(self.weights)

    def asked(self, prompt: str | Messages) -> str | Messages:
        """`prompt` with the system prompt before it, where there is one."""
        if not self.system_prompt:
            return prompt
        messages: Messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return [{"role": "system", "content": self.system_prompt}, *messages]


def encode(
    problem: Problem,
    tokenizer: Any,
    chat_template: ChatTemplate = "auto",
    template_arguments: Mapping[str, Any] | None = None,
) -> Prompt:
    """The problem as the token ids a policy continues, with the problem itself in the metadata.

    Args:
        tokenizer: a Hugging Face tokenizer. Plain text gets the special tokens that the tokenizer puts before text.
        template_arguments: what the chat template is given beside the messages, such as tools.

    Raises:
        ValueError: the prompt is empty, or it needs a chat template that is not there.
    """
    prompt = problem.prompt
    if not prompt or not problem.question.strip():
        raise ValueError(f"problem {problem.id!r} has an empty prompt")
    if isinstance(prompt, str) and chat_template == "always":
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(prompt, str):
        token_ids = _without_eos(tokenizer(prompt).input_ids, tokenizer, prompt)
    else:
        token_ids = _apply_chat_template(problem.id, prompt, tokenizer, chat_template, template_arguments or {})
    if not token_ids:
        raise ValueError(f"problem {problem.id!r}: the tokenizer makes no token of its prompt {prompt!r}")
    metadata = {"prompt": problem.prompt, "answer": problem.answer, "metadata": dict(problem.metadata)}
    return Prompt(tuple(token_ids), problem.id, metadata)


def _without_eos(token_ids: Sequence[int], tokenizer: Any, text: str) -> Sequence[int]:
    """Some tokenizers end every text with an end-of-sequence token; after it a policy has nothing to say."""
    added = token_ids and token_ids[-1] == tokenizer.eos_token_id and not text.endswith(tokenizer.eos_token)
    return token_ids[:-1] if added else token_ids


def _apply_chat_template(
    id: str, messages: Messages, tokenizer: Any, chat_template: ChatTemplate, arguments: Mapping[str, Any]
) -> Sequence[int]:
    if chat_template == "never":
        raise ValueError(f'problem {id!r} is a conversation, but chat_template = "never"; set it to "auto"')
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"problem {id!r} is a conversation, but the tokenizer has no chat template: use a chat model's tokenizer, "
            "or plain-text prompts without a system prompt"
        )
    text = tokenizer.apply_chat_template(messages, tokenize=False, **{"add_generation_prompt": True, **arguments})
    # The template writes every special token itself.
    token_ids: Sequence[int] = tokenizer(text, add_special_tokens=False).input_ids
    return token_ids
