"""Tasks: problems, and the scoring of responses to them.

Invariants:
- a problem is data that survives JSON; it travels in `Prompt.metadata`, and scoring needs nothing else, so a response
  that was buffered before a restart is scored like any other;
- the same settings make the same problems, in every process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.reward import Reward

Split = Literal["train", "eval"]
Messages = list[dict[str, Any]]
"""A conversation: `{"role": ..., "content": ...}` in order. Content is text, or with images a list of parts; see
`april.tasks.images`."""
ChatTemplate = Literal["auto", "always", "never"]
"""Which prompts go through the tokenizer's chat template. `auto`: conversations do, plain text is tokenized as it is.
`always`: plain text too, as a user message. `never`: none, and a conversation is an error."""
BadRecords = Literal["raise", "skip"]
"""Treatment of records that cannot be used: they stop the run, or are left out and counted."""
RENDERING = frozenset(
    {
        "conversation",
        "messages",
        "tools",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)
"""Arguments of a tokenizer's `apply_chat_template` that are no variables of the template, or that april sets."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A prompt, and the data that its reward needs. `prompt`, `answer` and `metadata` are JSON types.

    The answer keeps the type that it has in the data; `april.tasks.answers` turns it into text.
    """

    id: str
    prompt: str | Messages
    answer: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, prompt: Prompt) -> Problem:
        """The problem that an `Encoder` made `prompt` from."""
        return cls(prompt.id, **prompt.metadata)

    @property
    def question(self) -> str:
        """The prompt as text: for a conversation, the text of its last message."""
        return self.prompt if isinstance(self.prompt, str) else text_of_content(self.prompt[-1]["content"])


class Scorer(Protocol):
    """Scores responses to one problem. It pickles, so that a worker process has its own."""

    scope: Literal["sample", "group"]
    """"group" if all responses to a problem must be scored at once."""

    correct_at: float | None
    """A response with this reward or more is correct; None where the task does not define correctness."""

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
    skipped: int = 0
    """Records that were left out because they make no problem."""
    stored: bool = False
    """Whether problems are at hand; else each is generated when it is asked for."""

    def __len__(self) -> int: ...

    def problem(self, index: int, split: Split = "train") -> Problem: ...

    def place(self, problem: Problem, split: Split = "train") -> str:
        """Where the problem comes from, for messages."""
        return f"problem {problem.id!r}"

    @property
    def correct(self) -> Callable[[float], bool] | None:
        """Whether a response with this reward is correct; None where the task does not define correctness."""
        bar = self.scorer.correct_at
        return None if bar is None else lambda reward: reward >= bar

    def score(self, problem: Problem, response: str) -> float:
        """The reward of one response, in this process; `RewardWorkers(task.scorer)` scores in others."""
        return self.scorer(problem, [response])[0].value


OWN = frozenset({"task", "math-verify"})
"""Rewards that need no function: the dataset's own scorer, and math-verify."""


MOST_HELD_OUT = 1_000_000
"""Held-out problems are encoded before training, all of them."""


@dataclass(frozen=True)
class TaskSpec:
    """Settings of a task: plain data, so that a worker process can build its own task.

    Args:
        kind: source of the problems: a reasoning-gym dataset, a file of records, the tasks of the verifiers
            environment that environment.path names, a file of NeMo Gym, or the environment alone, where every episode
            begins with `prompt` and the observation of the environment's reset.
        name: reasoning-gym dataset.
        params: parameters of the reasoning-gym dataset.
        prompt: first message of every episode (kind environment).
        path: records: a file, `.jsonl`, `.json` or `.parquet`; a data set on the Hugging Face hub, `owner/name`; or a
            directory in the hub's layout.
        subset: subset of a data set on the hub that has several (`main` of openai/gsm8k).
        split: split of a data set on the hub.
        eval_path: records to evaluate on; without it and `eval_split`, part of `path` is held out.
        eval_split: split to evaluate on, of `eval_path` if that is set, otherwise of `path`.
        unique_prompts: leave out records that repeat the prompt of an earlier record.
        prompt_column: column with the prompt: text, or a list of chat messages. Dots reach into nested columns
            (`reward_model.ground_truth`).
        answer_column: column with the reference answer; None if the reward function needs none.
        image_column: column with an image of the prompt, or a list of images: paths relative to the file of records, or
            images that the data set stores. They take the places of `<image>` in the prompt, or else precede it. Unset:
            images are those in the messages of the prompt.
        metadata_columns: columns that reward functions get in addition to the answer; unset: all.
        on_bad_record: action for records without a usable prompt or answer, and for prompts that do not fit the
            context: stop the run before it begins (raise), or leave them out and count them (skip). Unset: raise for
            records, skip for generated problems. Prompts longer than rollout.max_prompt_length, if that is set, are
            always left out.
        id_column: column with a unique name per record; by default file name and record number.
        reward: "task" (the dataset's own scorer, or math-verify for records), "math-verify", or a function,
            `FILE.py:NAME` or `package.module:NAME`.
        rewards: several rewards in place of `reward`, each with its weight: the reward is their weighted sum, and each
            is logged by its name. april.tasks.format and april.tasks.length contain ready-made ones.
        reward_scope: whether the reward function scores one response or all responses to a problem at once.
        correct_at: smallest reward of a correct response, for the accuracy; by default 1 for a dataset's own scorer and
            math-verify. With user functions no response is correct unless this is set.
        extract: part of a response that the dataset's scorer or math-verify sees: the text in `<answer_tag>` ("tag",
            the default for a dataset's own scorer; a response without the tag scores 0) or the whole text ("whole").
        answer_tag: name of the tag.
        seed: seed of generated problems, or of the choice of held-out problems.
        size: training problems; by default 10,000 are generated, or all records are used.
        eval_size: held-out problems, or, for a file, their share if below 1. By default 128, but at most a tenth of a
            file, and all of `eval_path`.
        chat_template: see `ChatTemplate`.
        system_prompt: system message before every prompt; conversations with a system message keep their own.
        continue_assistant: continue a conversation that ends with the assistant's turn within that turn; false: such a
            conversation is a bad record.
        template_arguments: further arguments of the chat template, such as `enable_thinking = false`.
        keep_special_tokens: keep the text of special tokens in responses for rewards; false: it is stripped.
    """

    kind: Literal["reasoning_gym", "records", "verifiers", "nemo_gym", "environment"]
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
    image_column: str | None = None
    metadata_columns: tuple[str, ...] | None = None
    id_column: str | None = None
    on_bad_record: BadRecords | None = None
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
    continue_assistant: bool = False
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    keep_special_tokens: bool = False

    def __post_init__(self) -> None:
        def require(condition: bool, name: str, rule: str) -> None:
            if not condition:
                raise ValueError(f"{name} = {getattr(self, name)!r}: {rule}")

        kinds = ("reasoning_gym", "records", "verifiers", "nemo_gym", "environment")
        require(self.kind in kinds, "kind", f"must be one of {', '.join(kinds)}")
        prompted = bool((self.prompt or "").strip())
        require(self.kind != "environment" or prompted, "prompt", "give what episodes begin with")
        require(self.kind == "environment" or self.prompt is None, "prompt", 'goes with kind = "environment"')
        require(self.kind != "reasoning_gym" or bool(self.name), "name", "give the name of a reasoning-gym dataset")
        require(self.kind != "records" or bool(self.path), "path", "give a file of records, or a data set of the hub")
        require(self.kind != "nemo_gym" or bool(self.path), "path", "give a file of NeMo Gym's data")
        weighed = not self.rewards or self.reward in {"task", *self.rewards}
        require(weighed, "reward", 'rewards are set too: give it a weight among them, or set reward = "task"')
        require(all(map(math.isfinite, self.rewards.values())), "rewards", "weights must be finite numbers")
        require(self.reward_scope in ("sample", "group"), "reward_scope", 'must be "sample" or "group"')
        require(self.extract in (None, "tag", "whole"), "extract", 'must be "tag" or "whole"')
        require(self.chat_template in ("auto", "always", "never"), "chat_template", "must be auto, always or never")
        require(self.on_bad_record in (None, "raise", "skip"), "on_bad_record", 'must be "raise" or "skip"')
        own = RENDERING.intersection(self.template_arguments)
        require(not own, "template_arguments", f"april sets {', '.join(sorted(own))} itself; remove it")
        require(self.seed >= 0, "seed", "must not be negative")
        require(self.size is None or self.size >= 1, "size", "a task needs at least one problem")
        require(self.kind == "records" or self.image_column is None, "image_column", 'goes with kind = "records"')
        few = self.eval_size is None or 0 <= self.eval_size <= MOST_HELD_OUT
        require(few, "eval_size", f"must be from 0 to {MOST_HELD_OUT:,}")
        whole = self.eval_size is None or self.eval_size == int(self.eval_size)
        share = (
            self.kind in ("records", "verifiers")
            and not (self.eval_path or self.eval_split)
            and (self.eval_size or 0) < 1
        )
        require(whole or share, "eval_size", "must be a whole number, or the share below 1 of a file to hold out")
        require(
            not (self.system_prompt and self.chat_template == "never"),
            "system_prompt",
            'needs the chat template, but chat_template = "never"; write it into the prompts instead',
        )

    @property
    def weights(self) -> Mapping[str, float]:
        """The rewards of a response, and their weights."""
        return self.rewards or {self.reward: 1.0}

    @property
    def needs_answer(self) -> bool:
        """Whether april compares with the answer itself."""
        return not OWN.isdisjoint(self.weights)

    @property
    def bad_records(self) -> BadRecords:
        """Treatment of records that cannot be used, with the default of the task's kind."""
        return self.on_bad_record or ("raise" if self.kind == "records" else "skip")

    def with_system_prompt(self, prompt: str | Messages) -> str | Messages:
        """Return the prompt with the system prompt before it, unless the prompt has its own."""
        if not self.system_prompt or has_system_turn(prompt):
            return prompt
        messages: Messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return [{"role": "system", "content": self.system_prompt}, *messages]


def text_of_content(content: str | list[dict[str, Any]]) -> str:
    """Return the text of a message, without its images."""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def has_system_turn(prompt: str | Messages) -> bool:
    """Whether a conversation begins with instructions of its own."""
    return not isinstance(prompt, str) and bool(prompt) and prompt[0]["role"] in ("system", "developer")
