"""Prompts tried before training, so that a prompt that cannot be used does not end a run hours later.

Encoding is cheap compared with training: chat templates are applied one by one, texts are tokenized in batches.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from april.rollout.trajectory.prompt import Prompt
from april.tasks.bad_records import settle
from april.tasks.encoding import Encoder
from april.tasks.task import BadRecords, Split, Task

logger = logging.getLogger(__name__)

LOOK_AHEAD = 100_000
"""Stored problems that are tried before training; of larger files, each later problem is tried when it is needed."""
GENERATED = 16
"""Problems that are generated to be tried before training."""
BATCH = 1024


@dataclass(slots=True)
class Inspection:
    """Problems that were encoded, and which of them cannot be prompts.

    Args:
        limit: tokens of a prompt; None for no limit.
        count: problems that were encoded.
        prompts: usable prompts, by the problem's index, if they were to be kept.
        bad: why a problem makes no prompt, with its place, by its index.
        overlong: the same of prompts of more than `limit` tokens.
        unknown: places of prompts that contain the unknown token.
    """

    limit: int | None
    count: int = 0
    prompts: dict[int, Prompt] = field(default_factory=dict)
    bad: dict[int, str] = field(default_factory=dict)
    overlong: dict[int, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    @property
    def unusable(self) -> set[int]:
        return {*self.bad, *self.overlong}

    def settle(self, on_bad_record: BadRecords, on_overlong: BadRecords, kind: str = "prompts") -> None:
        """Stop for prompts that cannot be used, or log that they are left out; log how many hold unknown tokens.

        Raises:
            ValueError: a policy is "raise" and has a case, or nothing is left.
        """
        # Each cause alone may leave prompts over while both together leave none, which neither call below detects.
        if len(self.unusable) == self.count and self.bad:
            settle([*self.bad.values(), *self.overlong.values()], self.count, kind, "raise")
        settle(list(self.bad.values()), self.count, kind, on_bad_record)
        asked = f"max_prompt_length = {self.limit}"
        settle(list(self.overlong.values()), self.count, kind, on_overlong, asked)
        if self.unknown:
            logger.warning(
                "%d of %d %s contain text that the tokenizer does not know, and that the policy sees as its unknown "
                "token; first: %s",
                len(self.unknown),
                self.count,
                kind,
                self.unknown[0],
            )


def inspect(
    task: Task, split: Split, indices: Iterable[int], encoder: Encoder, limit: int | None, keep: bool = True
) -> Inspection:
    """Encode the problems with these indices; the prompts are kept unless `keep` is false."""
    found, unknown = Inspection(limit), encoder.unknown_token
    for batch in _batches(indices):
        found.count += len(batch)
        problems = [task.problem(index, split) for index in batch]
        for index, problem, encoded in zip(batch, problems, encoder.batch(problems), strict=True):
            if isinstance(encoded, ValueError):
                found.bad[index] = f"{task.place(problem, split)}: {encoded}"
                continue
            if limit is not None and len(encoded.token_ids) > limit:
                found.overlong[index] = (
                    f"{task.place(problem, split)}: its prompt has {len(encoded.token_ids)} tokens, more than the "
                    f"{limit} for which there is room (max_prompt_length)"
                )
                continue
            if keep:
                found.prompts[index] = encoded
            if unknown is not None and unknown in encoded.token_ids:
                found.unknown.append(task.place(problem, split))
    return found


def _batches(indices: Iterable[int]) -> Iterator[Sequence[int]]:
    remaining = iter(indices)
    while batch := list(islice(remaining, BATCH)):
        yield batch
