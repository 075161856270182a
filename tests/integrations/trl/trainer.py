"""What the tests of TRL's trainers train on: rows, a reward that remembers them, a trainer that can be looked into."""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset

from april.integrations.trl import GRPOTrainer

SMALL: dict[str, Any] = {
    "gradient_accumulation_steps": 2,
    "num_generations": 4,
    "max_completion_length": 60,
    "learning_rate": 1e-2,
    "use_cpu": True,
    "bf16": False,
    "activation_checkpointing": False,
    "max_steps": 4,
    "report_to": [],
    "disable_tqdm": True,
}
"""TRL's settings of a run of seconds on a CPU."""
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def rows(count: int = 24, first: int = 0) -> Dataset:
    numbers = range(first, first + count)
    return Dataset.from_dict({"prompt": [f"{n}?" for n in numbers], "answer": list(numbers)})


class Reward:
    """Scores texts and conversations by length, and keeps its inputs."""

    __name__ = "reward"

    def __init__(self) -> None:
        self.seen: list[tuple[Any, int]] = []

    def __call__(self, prompts: list[Any], completions: list[Any], answer: list[int], **_: Any) -> list[float]:
        self.seen += zip(prompts, answer, strict=True)
        texts = (c if isinstance(c, str) else c[0]["content"] for c in completions)
        return [float(len(text) % 3) for text in texts]


class Watched(GRPOTrainer):
    """Keeps the groups of every training batch, this process's rows of it, and what the loss is given for them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.batches: list[tuple[list[Any], dict[str, Any]]] = []
        self.rows: list[tuple[list[Any], dict[str, Any]]] = []

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        training = self.model.training
        output = super()._generate_and_score_completions(inputs)
        if training:
            self.batches.append((list(self.rollouts.groups), dict(output)))
            self.rows.append((list(self.rollouts.rows), dict(output)))
        return output


class Compared(Watched):
    """Compares the log-probabilities at sampling with the trainer's own forward pass under its weights at that time.

    `differences` holds the differences of each training batch: of tokens of the current policy version, and of older
    tokens.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.differences: list[tuple[torch.Tensor, torch.Tensor]] = []

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        training = self.model.training
        output = super()._generate_and_score_completions(inputs)
        if not training:
            return output
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
        mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
        with torch.no_grad():
            own = self._get_per_token_logps_and_entropies(self.model, ids, mask, output["completion_ids"].shape[1])[0]
        kept = output["completion_mask"].bool()
        version = len(self.differences)
        fresh = torch.cat([torch.tensor(sample.versions == version) for _, sample in self.rollouts.rows])
        drawn = output.get("sampling_per_token_logps", output["old_per_token_logps"])
        difference = (drawn - own)[kept].abs()
        self.differences.append((difference[fresh], difference[~fresh]))
        return output


def largest(differences: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[float, float]:
    """Largest difference of a run, of tokens of the current version and of older ones; every batch has some of the
    current version."""
    current, older = zip(*differences, strict=True)
    assert all(len(difference) for difference in current)
    return float(torch.cat(current).max()), float(torch.cat(older).max())
