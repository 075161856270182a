"""The text of a run: every prompt and completion it trained on or was evaluated on, in `completions/` as Parquet.

Invariants:
- a file is one step's (`step-000012.parquet`, `step-000012-held-out.parquet`), whole or not there; a resumed run
  replaces the files of repeated steps;
- text is decoded and written in a thread: a step waits for at most the one before it;
- the pieces of a completion, one for each policy version that sampled it, make up the completion; an episode's are
  cut where a turn ends and where the next one begins, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict

import numpy as np

from april.disk import sync_directory, sync_file
from april.rollout.trajectory.features import collapsed, moved
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.sample import Sample

DIRECTORY = "completions"
Decode = Callable[[Sequence[int]], str]
"""Token ids to text."""


class Piece(TypedDict):
    """Part of a completion from one policy version; `version` is ENVIRONMENT for observations."""

    version: int
    tokens: int
    text: str


class EpisodeTurn(TypedDict):
    """One turn of an episode: the policy's text and the environment's observation. The first turn is the reset and has
    no text of the policy."""

    policy_tokens: int
    """Number of tokens of the policy."""
    observation_tokens: int
    """Number of tokens of the observation, including the chat template's."""
    reward: float | None
    """None without an observation."""
    seconds: float
    """Time of the environment's step."""
    failed: bool
    info: str | None
    """Further information from the environment, as JSON."""


class Completion(TypedDict):
    """Row of the table."""

    step: int
    held_out: bool
    group: int
    sample: int
    episode: int
    """Index of the episode in the group; with a program, an episode may have several samples."""
    parent: int | None
    """Sample whose first `shared` tokens the prompt begins with; None: it begins with its own."""
    shared: int
    prompt_id: str
    prompt: str
    answer: str | None
    """The reference answer, as JSON unless it is text."""
    completion: str
    reward: float | None
    components: str | None
    """Further information from the reward function, as JSON."""
    length: int
    """Number of response tokens."""
    finish: str
    staleness: int
    """Weight updates between the group's first token and the step."""
    pieces: list[Piece]
    turns: list[EpisodeTurn]
    """Turns in order; their tokens are the tokens of the pieces. Empty without an environment."""


def rows_of(groups: Sequence[Group], step: int, version: int, decode: Decode, held_out: bool) -> list[Completion]:
    """The samples of complete groups as rows, for a step that starts from policy `version`."""
    rows = []
    for group in groups:
        prompt = decode(group.prompt.shown_ids)
        for sample in group.samples:
            own = prompt if sample.origin is None else decode(collapsed(sample.prompt_ids, sample.prompt_features))
            rows.append(_row(group, sample, own, step, version, decode, held_out))
    return rows


def _row(
    group: Group, sample: Sample, prompt: str, step: int, version: int, decode: Decode, held_out: bool
) -> Completion:
    pieces = _pieces(sample, decode)
    return {
        "step": step,
        "held_out": held_out,
        "group": group.id,
        "sample": sample.index,
        "episode": sample.episode,
        "parent": None if sample.origin is None else sample.origin.parent,
        "shared": 0 if sample.origin is None else sample.origin.shared,
        "prompt_id": group.prompt.id,
        "prompt": prompt,
        "answer": _answer(group),
        "completion": "".join(piece["text"] for piece in pieces),
        "reward": sample.reward,
        "components": json.dumps(dict(sample.reward_info)) if sample.reward_info else None,
        "length": sample.length,
        "finish": str(sample.finish or ""),
        "staleness": 0 if held_out else group.staleness(version),
        "pieces": pieces,
        "turns": _turns(sample),
    }


def _answer(group: Group) -> str | None:
    answer = group.prompt.metadata.get("answer")
    return answer if answer is None or isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)


def _turns(sample: Sample) -> list[EpisodeTurn]:
    turns: list[EpisodeTurn] = []
    at = 0
    for one in sample.transitions:
        turns.append(
            {
                "policy_tokens": one.start - at,
                "observation_tokens": one.tokens,
                "reward": one.reward,
                "seconds": one.seconds,
                "failed": one.failed,
                "info": json.dumps(dict(one.info)) if one.info else None,
            }
        )
        at = one.start + one.tokens
    if sample.transitions and at < sample.length:
        turns.append(
            {
                "policy_tokens": sample.length - at,
                "observation_tokens": 0,
                "reward": None,
                "seconds": 0.0,
                "failed": False,
                "info": None,
            }
        )
    return turns


def _pieces(sample: Sample, decode: Decode) -> list[Piece]:
    """The response in pieces; a character whose bytes two of them share is the later one's. An image has one
    placeholder.

    A piece is decoded together with the one before it, as what a token reads like may depend on its neighbour.
    """
    ids, segments = sample.response_ids, sample.segments
    first = len(sample.prompt_ids)
    images = moved(sample.features_between(first, first + len(ids)), -first)

    def shown(start: int, end: int) -> str:
        inside = [feature for feature in images if start <= feature.offset < end]
        return decode(collapsed(ids[start:end], moved(inside, -start)))

    ends = np.cumsum([len(segment) for segment in segments]).tolist()
    edges = {edge for one in sample.transitions for edge in (one.start, one.start + one.tokens)}
    pieces: list[Piece] = []
    start = known = 0
    for end in sorted({*ends, *edges} - {0}):
        before, through = shown(known, start), shown(known, end)
        whole, text = before.rstrip("�"), through if end == len(ids) else through.rstrip("�")
        version = segments[int(np.searchsorted(ends, end))].version
        pieces.append({"version": version, "tokens": end - start, "text": text[len(whole) :]})
        # A piece that ends within a character stays in the context, so that the next piece completes it.
        if before == whole:
            known = start
        start = end
    return pieces


class CompletionsWriter:
    """Writes the table, a step at a time, and hands each step's rows on.

    Args:
        directory: the run directory.
        decode: the tokenizer's; called in a thread.
        then: called in that thread with the rows of each step.
        resume_step: step to resume from, after which files are removed; None for a new run.
    """

    def __init__(
        self,
        directory: Path,
        decode: Decode,
        then: Callable[[list[Completion]], None],
        resume_step: int | None = None,
    ) -> None:
        self.directory = directory / DIRECTORY
        self._decode = decode
        self._then = then
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="completions")
        self._pending: Future[None] | None = None
        for path in files(directory):
            if _step_of(path) > (-1 if resume_step is None else resume_step):
                path.unlink()

    def write(self, groups: Sequence[Group], step: int, version: int, held_out: bool = False) -> None:
        """Write complete groups, which must not change any more. Returns at once unless the step before is not done.

        Raises:
            OSError: the step before could not be written.
        """
        self.sync()
        self._pending = self._thread.submit(self._write, list(groups), step, version, held_out)

    def _write(self, groups: Sequence[Group], step: int, version: int, held_out: bool) -> None:
        rows = rows_of(groups, step, version, self._decode, held_out)
        write_rows(self.directory / f"step-{step:06d}{'-held-out' * held_out}.parquet", rows)
        self._then(rows)

    def sync(self) -> None:
        """Wait until all rows passed to `write` are on disk."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        try:
            self.sync()
        finally:
            self._thread.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def write_rows(path: Path, rows: Sequence[Completion]) -> None:
    """Write rows as a Parquet file, whole or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(exist_ok=True)
    fresh = path.with_suffix(".new")
    pq.write_table(pa.Table.from_pylist([dict(row) for row in rows], schema=_schema()), fresh, compression="zstd")
    sync_file(fresh)
    fresh.replace(path)
    sync_directory(path.parent)


def _schema() -> Any:
    import pyarrow as pa

    piece = pa.struct([("version", pa.int64()), ("tokens", pa.int64()), ("text", pa.string())])
    turn = pa.struct(
        [
            ("policy_tokens", pa.int64()),
            ("observation_tokens", pa.int64()),
            ("reward", pa.float64()),
            ("seconds", pa.float64()),
            ("failed", pa.bool_()),
            ("info", pa.string()),
        ]
    )
    return pa.schema(
        [
            ("step", pa.int64()),
            ("held_out", pa.bool_()),
            ("group", pa.int64()),
            ("sample", pa.int64()),
            ("episode", pa.int64()),
            ("parent", pa.int64()),
            ("shared", pa.int64()),
            ("prompt_id", pa.string()),
            ("prompt", pa.string()),
            ("answer", pa.string()),
            ("completion", pa.string()),
            ("reward", pa.float64()),
            ("components", pa.string()),
            ("length", pa.int64()),
            ("finish", pa.string()),
            ("staleness", pa.int64()),
            ("pieces", pa.list_(piece)),
            ("turns", pa.list_(turn)),
        ]
    )


def files(run_directory: Path | str) -> list[Path]:
    """The run's files of completions, by step, those trained on before those held out."""
    return sorted((Path(run_directory) / DIRECTORY).glob("step-*.parquet"), key=lambda path: path.stem)


def read_completions(path: Path) -> list[Mapping[str, Any]]:
    """The rows of one step's file."""
    import pyarrow.parquet as pq

    rows: list[Mapping[str, Any]] = pq.read_table(path, schema=_schema()).to_pylist()
    return rows


def _step_of(path: Path) -> int:
    return int(path.stem.split("-")[1])


def most_informative(rows: Sequence[Mapping[str, Any]], count: int) -> Iterator[Mapping[str, Any]]:
    """Return at most `count` informative rows: best and worst reward, longest, stalest, then the first rows."""
    orders: Sequence[Callable[[Mapping[str, Any]], float]] = (
        lambda row: -(row["reward"] or 0.0),
        lambda row: row["reward"] or 0.0,
        lambda row: -row["length"],
        lambda row: -row["staleness"],
    )
    chosen = [min(rows, key=order) for order in orders if rows]
    unique = {(row["group"], row["sample"]): row for row in (*chosen, *rows)}
    yield from list(unique.values())[:count]
