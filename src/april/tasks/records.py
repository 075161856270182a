"""Problems from records of prompts and answers: JSON lines, Parquet, or a data set of the Hugging Face hub.

Invariants:
- records are read and checked as a whole before anything is trained on it; an error names file and line;
- which records are held out depends on the seed and the number of records alone, and a prompt that is held out is not
  trained on, however often the file repeats it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from april.tasks.hub import FILES, path_problem, read_dataset
from april.tasks.task import Messages, Problem, Scorer, Split, Task, TaskSpec

logger = logging.getLogger(__name__)


class RecordsTask(Task):
    """The records of `spec.path`; columns that are neither prompt, answer nor id become the problem's metadata."""

    def __init__(self, spec: TaskSpec, scorer: Scorer) -> None:
        if spec.needs_answer and spec.answer_column is None:
            named = ", ".join(map(repr, spec.weights))
            raise ValueError(f"answer_column = None: reward = {named} compares with an answer; name its column")
        path = spec.path or ""
        self.name = Path(path).stem
        self.scorer = scorer
        problems = read_problems(path, spec, "path")
        if spec.eval_path or spec.eval_split:
            source, setting = (spec.eval_path, "eval_path") if spec.eval_path else (path, "path")
            held_out = read_problems(source, spec, setting, spec.eval_split)
            held_out = held_out[: None if spec.eval_size is None else int(spec.eval_size)]
        else:
            problems, held_out = hold_out(problems, _eval_count(spec.eval_size, len(problems)), spec.seed)
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


def _eval_count(eval_size: float | None, records: int) -> int:
    if eval_size is None:
        return min(128, records // 10)
    count = int(eval_size) if eval_size >= 1 else round(eval_size * records)
    if count >= records:
        raise ValueError(f"eval_size = {eval_size}: of {records} records some must be left to train on")
    return count


def hold_out(problems: list[Problem], count: int, seed: int) -> tuple[list[Problem], list[Problem]]:
    """The problems to train on and `count` problems held out, both in their order."""
    chosen = set(np.random.default_rng(seed).permutation(len(problems))[:count].tolist())
    held_out = [problem for i, problem in enumerate(problems) if i in chosen]
    prompts = {json.dumps(problem.prompt) for problem in held_out}
    train = [problem for problem in problems if json.dumps(problem.prompt) not in prompts]
    repeats = len(problems) - len(train) - len(held_out)
    if repeats:
        logger.warning("left out of training: %d records that repeat a held-out prompt", repeats)
    return train, held_out


def read_problems(path: str, spec: TaskSpec, setting: str = "path", split: str | None = None) -> list[Problem]:
    """Every record of the file, or of the split (by default `spec.split`) of a data set, as a problem.

    Raises:
        ValueError: there is no such file or data set, or a record is broken; named by file and line.
    """
    if problem := path_problem(path):
        raise ValueError(f"{setting} = {path!r}: {problem}")
    seen: dict[str, int] = {}
    prompts: set[str] = set()
    problems = []
    for line, record in _read(path, spec, setting, split or spec.split):
        try:
            made = _to_problem(record, spec, f"{Path(path).stem}:{line}")
        except ValueError as error:
            raise ValueError(f"{path}:{line}: {error}") from None
        if spec.unique_prompts:
            prompt = json.dumps(made.prompt)
            if prompt in prompts:
                continue
            prompts.add(prompt)
        if made.id in seen:
            raise ValueError(f"{path}:{line}: the id {made.id!r} belongs to line {seen[made.id]} already")
        seen[made.id] = line
        problems.append(made)
    if not problems:
        raise ValueError(f"{setting} = {path!r}: there are no records in it")
    return problems


def _read(path: str, spec: TaskSpec, setting: str, split: str) -> Iterator[tuple[int, Any]]:
    if path.lower().endswith(".parquet"):
        return _plain(_read_parquet(Path(path)))
    if path.lower().endswith(FILES):
        return _read_jsonl(Path(path))
    return _plain(read_dataset(path, spec.subset, split, setting))


def _plain(records: Iterable[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    """Dates, decimals and the like become their text: metadata must survive JSON."""
    for row, record in records:
        yield row, json.loads(json.dumps(record, default=str))


def _read_jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as file:
        for line, text in enumerate(file, start=1):
            if not text.strip():
                continue
            try:
                record = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}:{line}: not valid JSON: {error}") from None
            if not isinstance(record, dict):
                raise ValueError(f"{path}:{line}: a record must be a JSON object, this is {text[:40]!r}")
            yield line, record


def _read_parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    from pyarrow import parquet

    row = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            for record in batch.to_pylist():
                row += 1
                yield row, record
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a Parquet file, or damaged after record {row}: {error}") from None


def _to_problem(record: Mapping[str, Any], spec: TaskSpec, default_id: str) -> Problem:
    prompt = _checked_prompt(_column(record, spec.prompt_column, "prompt_column"), spec.prompt_column)
    answer = None if spec.answer_column is None else _column(record, spec.answer_column, "answer_column")
    if answer is None and spec.needs_answer:
        raise ValueError(f"the answer in column {spec.answer_column!r} is empty")
    id = default_id if spec.id_column is None else str(_column(record, spec.id_column, "id_column"))
    used = (spec.prompt_column, spec.answer_column, spec.id_column)
    kept = record if spec.metadata_columns is None else spec.metadata_columns
    metadata = {name: record[name] for name in kept if name in record and name not in used}
    text = answer if answer is None or isinstance(answer, str) else json.dumps(answer)
    return Problem(id, spec.asked(prompt), text, metadata)


def _column(record: Mapping[str, Any], column: str, setting: str) -> Any:
    if column in record:
        return record[column]
    value: Any = record
    for name in column.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise ValueError(f"{setting} = {column!r}: no such column; there are {', '.join(map(repr, record))}")
        value = value[name]
    return value


def _checked_prompt(prompt: Any, column: str) -> str | Messages:
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise ValueError(f"the prompt in column {column!r} must be text, or messages with role and content")
    if not messages or not messages[-1]["content"].strip():
        raise ValueError(f"the prompt in column {column!r} is empty")
    checked: str | Messages = prompt
    return checked
