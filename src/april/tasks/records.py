"""Problems from records of prompts and answers.

Invariants:
- all records are read and checked before anything is trained on them; an error names file and line;
- a problem holds JSON types alone: what else a record holds is converted, or makes it a bad record;
- which records are held out depends on the seed and the number of records alone, and a prompt that is held out is not
  trained on, however often the file repeats it.
"""

from __future__ import annotations

import datetime
import decimal
import json
import logging
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from april.rollout.json_types import DEEPEST, json_types
from april.tasks.answers import is_missing
from april.tasks.bad_records import settle
from april.tasks.hub import path_problem
from april.tasks.images import RecordPlace, column_sources, located, unplaced, with_images
from april.tasks.record_files import read_rows, stored_in
from april.tasks.task import Messages, Problem, Scorer, Split, Task, TaskSpec, has_system_turn, text_of_content

logger = logging.getLogger(__name__)

WRITTEN_AS_TEXT = (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID)
"""Kinds of values in tables that JSON has no type for."""
LEVELS = DEEPEST - 2
"""Levels of lists and objects in a column, which is two levels deep in the metadata of its prompt."""


class RecordsTask(Task):
    """The records of `spec.path`; columns that are neither prompt, answer nor id become the problem's metadata."""

    def __init__(self, spec: TaskSpec, scorer: Scorer) -> None:
        if spec.needs_answer and spec.answer_column is None:
            named = ", ".join(map(repr, spec.weights))
            raise ValueError(f"answer_column = None: reward = {named} compares with an answer; name its column")
        path = spec.path or ""
        self.name = Path(path).stem
        self.stored = True
        self.scorer = scorer
        source, setting = (spec.eval_path, "eval_path") if spec.eval_path else (path, "path")
        train = evaluated = read_records(path, spec, "path")
        problems = train.problems
        self.skipped = train.skipped
        if spec.eval_path or spec.eval_split:
            evaluated = read_records(source, spec, setting, spec.eval_split)
            held_out = evaluated.problems[: None if spec.eval_size is None else int(spec.eval_size)]
        else:
            problems, held_out = hold_out(problems, eval_count(spec.eval_size, len(problems)), spec.seed)
        self._read: dict[Split, Records] = {"train": train, "eval": evaluated}
        # `size` applies after holding out, so that the held-out records do not depend on it.
        self._problems: dict[Split, list[Problem]] = {"train": problems[: spec.size], "eval": held_out}
        self.eval_size = len(held_out)
        if not self._problems["train"]:
            raise ValueError(f"path = {spec.path!r}: no record is left to train on; lower eval_size")

    def __len__(self) -> int:
        return len(self._problems["train"])

    def problem(self, index: int, split: Split = "train") -> Problem:
        if not 0 <= index < len(self._problems[split]):
            raise IndexError(f"{self.name} has no {split} problem {index}")
        return self._problems[split][index]

    def problems(self) -> Iterator[Problem]:
        """Every problem, those that are held out included."""
        return chain.from_iterable(self._problems.values())

    def place(self, problem: Problem, split: Split = "train") -> str:
        return self._read[split].place(problem.id)


def eval_count(eval_size: float | None, records: int) -> int:
    """Return the number of records to hold out."""
    if eval_size is None:
        return min(128, records // 10)
    count = int(eval_size) if eval_size >= 1 else round(eval_size * records)
    if count >= records:
        raise ValueError(f"eval_size = {eval_size}: of {records} records some must be left to train on")
    return count


def hold_out(
    problems: list[Problem], count: int, seed: int, content: Callable[[Problem], Any] = lambda problem: problem.prompt
) -> tuple[list[Problem], list[Problem]]:
    """Return the problems to train on and `count` problems held out, both in their order.

    Args:
        content: problems with equal content (JSON types) are the same problem.
    """
    chosen = set(np.random.default_rng(seed).permutation(len(problems))[:count].tolist())
    held_out = [problem for i, problem in enumerate(problems) if i in chosen]
    known = {json.dumps(content(problem)) for problem in held_out}
    train = [problem for problem in problems if json.dumps(content(problem)) not in known]
    repeats = len(problems) - len(train) - len(held_out)
    if repeats:
        logger.warning("left out of training: %d records that repeat a held-out prompt", repeats)
    return train, held_out


@dataclass(frozen=True, slots=True)
class Records:
    """The problems of a file or data set, and the number of records left out.

    Args:
        path: the file or data set.
        problems: problems in the order of the records.
        lines: line number of each problem's record, by the problem's id.
        skipped: bad records that were left out.
    """

    path: str
    problems: list[Problem] = field(default_factory=list)
    lines: dict[str, int] = field(default_factory=dict)
    skipped: int = 0

    def place(self, id: str) -> str:
        """Return file and line of a problem, and its id if that is not made from the line."""
        line = self.lines[id]
        return f"{self.path}:{line}" + ("" if id == _default_id(self.path, line) else f" (id {id!r})")


def read_records(path: str, spec: TaskSpec, setting: str = "path", split: str | None = None) -> Records:
    """Read every record of a file, or of a split (by default `spec.split`) of a data set.

    Raises:
        ValueError: there is no such file or data set, or a setting does not suit it; or records are bad and
            `spec.bad_records` is "raise", or all of them are. The message names file and line.
    """
    if problem := path_problem(path):
        raise ValueError(f"{setting} = {path!r}: {problem}")
    problems: list[Problem] = []
    lines: dict[str, int] = {}
    bad: list[str] = []
    prompts: set[str] = set()
    columns: set[str] = set()
    folder, data = stored_in(path, spec.subset, split or spec.split)
    for line, record in read_rows(path, spec.subset, split or spec.split, setting):
        try:
            if isinstance(record, ValueError):
                raise record
            columns.update(record)
            made = _to_problem(record, spec, _default_id(path, line), RecordPlace(folder, data, line))
            if made.id in lines:
                raise ValueError(f"the id {made.id!r} belongs to line {lines[made.id]} already")
        except ValueError as error:
            bad.append(f"{path}:{line}: {error}")
            continue
        if spec.unique_prompts:
            # Conversations are lists, which cannot be hashed.
            prompt = json.dumps(made.prompt)
            if prompt in prompts:
                continue
            prompts.add(prompt)
        lines[made.id] = line
        problems.append(made)
    settle(bad, len(problems) + len(bad), "records", spec.bad_records)
    if not problems:
        raise ValueError(f"{setting} = {path!r}: there are no records in it")
    if absent := sorted(set(spec.metadata_columns or ()) - columns):
        raise ValueError(
            f"metadata_columns: no record of {path} has {', '.join(map(repr, absent))}; there are "
            f"{', '.join(map(repr, sorted(columns)))}"
        )
    _warn_of_own_system_turns(path, problems, spec)
    return Records(path, problems, lines, len(bad))


def _warn_of_own_system_turns(path: str, problems: list[Problem], spec: TaskSpec) -> None:
    if not spec.system_prompt:
        return
    first: Messages = [{"role": "system", "content": spec.system_prompt}]
    own = sum(has_system_turn(problem.prompt) and problem.prompt[:1] != first for problem in problems)
    if own:
        logger.warning(
            "system_prompt is not added to %d of %d conversations of %s, which have a system message of their own",
            own,
            len(problems),
            path,
        )


def _default_id(path: str, line: int) -> str:
    return f"{Path(path).stem}:{line}"


def _to_problem(record: Mapping[str, Any], spec: TaskSpec, default_id: str, place: RecordPlace) -> Problem:
    prompt = _prompt(record, spec, place)
    answer = None if spec.answer_column is None else _column(record, spec.answer_column, "answer_column")
    if is_missing(answer) and spec.needs_answer:
        raise ValueError(f"the answer in column {spec.answer_column!r} is empty")
    id = default_id if spec.id_column is None else _column(record, spec.id_column, "id_column")
    if id is None:
        raise ValueError(f"the id in column {spec.id_column!r} is missing")
    used = (spec.prompt_column, spec.answer_column, spec.id_column, spec.image_column)
    kept = record if spec.metadata_columns is None else spec.metadata_columns
    metadata = {name: _plain(record[name], name) for name in kept if name in record and name not in used}
    return Problem(str(id), spec.with_system_prompt(prompt), answer, metadata)


def _prompt(record: Mapping[str, Any], spec: TaskSpec, place: RecordPlace) -> str | Messages:
    """Return the prompt of a record, with its images in their places."""
    stored, path = _stored(record, spec.prompt_column, "prompt_column")
    prompt = _checked_prompt(_plain(located(stored, path, place), spec.prompt_column), spec.prompt_column)
    if spec.image_column is not None:
        images, path = _stored(record, spec.image_column, "image_column")
        return with_images(prompt, column_sources(images, path, place))
    if count := unplaced(prompt):
        raise ValueError(f"{count} parts of its prompt are images without a path: name their column in image_column")
    return prompt


def _column(record: Mapping[str, Any], column: str, setting: str) -> Any:
    return _plain(_stored(record, column, setting)[0], column)


def _stored(record: Mapping[str, Any], column: str, setting: str) -> tuple[Any, list[str]]:
    """Return a value as it is stored, and the names that lead to it."""
    if column in record:
        return record[column], [column]
    value: Any = record
    path = column.split(".")
    for name in path:
        if not isinstance(value, Mapping) or name not in value:
            raise ValueError(f"{setting} = {column!r}: no such column; there are {', '.join(map(repr, record))}")
        value = value[name]
    return value, path


def _plain(value: Any, column: str, levels: int = LEVELS) -> Any:
    """`value` in JSON types; dates and decimals become their text, NaN a missing value.

    Raises:
        ValueError: JSON cannot hold it, or it is nested too deeply.
    """
    if isinstance(value, str):
        return _text(value, column)
    if value is None or isinstance(value, int | float):
        return None if value != value else json_types(value, f"column {column!r}")
    if levels == 0:
        raise ValueError(f"column {column!r} is nested more than {LEVELS} levels deep: {NOT_NEEDED}")
    if isinstance(value, Mapping):
        return {_text(str(name), column): _plain(item, column, levels - 1) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, column, levels - 1) for item in value]
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise ValueError(f"column {column!r} holds bytes that are no text in UTF-8: {NOT_NEEDED}") from None
    if isinstance(value, WRITTEN_AS_TEXT):
        return str(value)
    raise ValueError(f"column {column!r} holds a {type(value).__name__}, which is no JSON value: {NOT_NEEDED}")


NOT_NEEDED = "if it is not needed, name the columns that are in metadata_columns"


def _text(value: str, column: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"column {column!r} holds half of a surrogate pair, {value[error.start]!r} at character {error.start}"
            ) from None
    return value


def _checked_prompt(prompt: Any, column: str) -> str | Messages:
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, str | list) or not isinstance(message.get("role"), str):
            raise ValueError(f"the prompt in column {column!r} must be text, or messages with role and content")
    last = messages[-1]["content"] if messages else ""
    if not text_of_content(last).strip() and isinstance(last, str):
        raise ValueError(f"the prompt in column {column!r} is empty")
    checked: str | Messages = prompt
    return checked
