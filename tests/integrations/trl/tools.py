"""A policy that calls tools now and then, a tool, an environment, and plain TRL given the same turns.

The policy is random over two dozen tokens, so that one of them may call: `!` begins a call of `look`, and the next `!`
or the end of the turn ends it.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from april.integrations.trl import PartialRollouts
from tests import tiny
from tests.integrations.trl.trainer import Watched

WORDS = ["<pad>", "<eos>", "<unk>", "<s>", *"0123456789", *"!?:,uat {}'"]
TEMPLATE = (
    "<s>{% if tools %}{{ tools|length }}{% endif %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "a:{{ m.content }}{% for c in m.tool_calls or [] %}!{{ c.function.name }}{{ c.function.arguments|tojson }}"
    "{% endfor %}<eos>{% else %}<s>{{ m.role[0] }}:{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "a:",
    "fields": {
        "tool_calls": {
            "open": "!",
            "close_pattern": "!|<eos>",
            "repeats": True,
            "content": "text",
            "transform": {"type": "function", "function": {"name": "look", "arguments": {"at": "{content}"}}},
        },
        "content": {"close_pattern": "<eos>", "content": "text"},
    },
}


def tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({word: id for id, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        bos_token="<s>",
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    made.response_template = RESPONSE
    return made


def rows(count: int = 24) -> Dataset:
    numbers = range(count)
    return Dataset.from_dict(
        {"prompt": [[{"role": "user", "content": f"{n}?"}] for n in numbers], "answer": list(numbers)}
    )


def look(at: str) -> str:
    """Look at something.

    Args:
        at: What.
    """
    if "0" in at:
        raise ValueError("0?")
    return f"{len(at)}"


async def look_later(at: str) -> str:
    """Look at something.

    Args:
        at: What.
    """
    return look(at)


look_later.__name__ = "look"


class Box:
    """Remembers requested items, and has its own reward."""

    def reset(self, answer: int, **row: Any) -> str | None:
        self.answer, self.looks = answer, 0
        return f",{answer % 7}" if answer % 2 else None

    def look(self, at: str) -> str:
        """Look at something.

        Args:
            at: What.
        """
        self.looks += 1
        return f"{self.answer},{self.looks}"

    def get_reward(self) -> float:
        return float(self.looks)


def called(completion: list[dict[str, Any]]) -> int:
    return sum(message["role"] == "tool" for message in completion)


def reward(prompts: Any, completions: Any, answer: list[int], environments: Any = None, **_: Any) -> list[float]:
    """Fails if an environment is used with a completion of a different one."""
    for i, box in enumerate(environments or ()):
        assert box.answer == answer[i]
        assert box.looks >= called(completions[i])
        assert prompts[i][-1]["content"] == f"{answer[i]}?" + (f",{answer[i] % 7}" if answer[i] % 2 else "")
    return [float(sum(len(message["content"]) for message in completion) % 3) for completion in completions]


def settings(folder: Path, **changed: Any) -> dict[str, Any]:
    """What either trainer is made with."""
    config = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 48,
        "learning_rate": 5e-3,
        "use_cpu": True,
        "bf16": False,
        "activation_checkpointing": False,
        "max_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    own = {name: changed.pop(name) for name in ("tools", "environment_factory", "train_dataset") if name in changed}
    return {
        "model": tiny.model(vocab_size=len(WORDS), sharpness=2.0),
        "reward_funcs": [reward],
        "args": trl.GRPOConfig(**{**config, **changed}),
        "train_dataset": rows(),
        "processing_class": tokenizer(),
        **own,
    }


def partial(groups: int = 8) -> PartialRollouts:
    return PartialRollouts(over_sampling_batch_size=groups, max_num_seqs=16, stream_interval=2)


class Recorded(Watched):
    """Keeps every turn, under the tokens that it follows."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.turns: dict[tuple[int, ...], list[tuple[list[int], list[float]]]] = defaultdict(list)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        for _, sample in self.rollouts.rows:
            for index, transition in enumerate(sample.transitions):
                at = transition.start + transition.tokens
                turn = list(sample.turn_ids(index))
                before = (*sample.prompt_ids, *sample.response_ids[:at])
                if turn or transition.tokens:
                    self.turns[before].append((turn, sample.logprobs.tolist()[at : at + len(turn)]))
        return output


class Plain(trl.GRPOTrainer):  # type: ignore[name-defined,misc]
    """TRL with its own tools and environments, whose policy repeats the turns of april's policy."""

    turns: dict[tuple[int, ...], list[tuple[list[int], list[float]]]]

    def _generate_single_turn(self, prompt_ids: list[list[int]], *_: Any, **__: Any) -> Any:
        said = [self.turns[tuple(ids)].pop(0) for ids in prompt_ids]
        return [ids for ids, _ in said], [logprobs for _, logprobs in said]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        output["old_per_token_logps"] = output["sampling_per_token_logps"]
        return output


def main() -> None:
    """What each process of a job does: `accelerate launch ... -m tests.integrations.trl.tools FOLDER`."""
    folder = Path(sys.argv[1])
    given = settings(folder, tools=[look], per_device_train_batch_size=4, max_steps=3)
    trained = Recorded(**given, partial_rollouts=partial())
    trained.train()
    trained.close()
    seen = [
        {
            "group": sample.group_id,
            "turns": sample.turns,
            "answered": sum(not own for own in sample.loss_mask[sample.transitions[0].tokens :].tolist()),
            "masked": int((output["completion_mask"][i] * (1 - output["tool_mask"][i])).sum()),
        }
        for batch, output in trained.rows
        for i, (_, sample) in enumerate(batch)
    ]
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(seen))


torch.set_num_threads(1)

if __name__ == "__main__":
    main()
