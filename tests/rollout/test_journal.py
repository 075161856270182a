"""The journal alone: its events after a crash at any record, and its errors for unusable files."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from april import (
    Chunk,
    FaultSettings,
    FinishReason,
    Prompt,
    Reward,
    RolloutBatch,
    RolloutParams,
    RolloutScheduler,
    Sample,
    SamplingParams,
    StalenessError,
)
from april.rollout.batch import Plan
from april.rollout.buffer import Rejection
from april.rollout.events import Admitted, Event, Rejected, Rewarded, Trained
from april.rollout.journal import journal as journal_module
from april.rollout.journal import journal_file
from april.rollout.journal.journal import Journal
from april.rollout.journal.journal_file import FORMAT, DamageError, JournalError, repair_journal, segments_of
from april.rollout.journal.records import Record, _content, decode
from tests.journals import content as contents
from tests.journals import copy, cut, damage, last_events, place_of
from tests.limits import HANG
from tests.scripted_engine import ScriptedEngine, response


class Numbered:
    """A stream of prompts that remembers its position."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Prompt]:
        for number in itertools.count(self.position):
            self.position = number + 1
            yield Prompt((1, 2, number), f"prompt {number}", {"number": number})

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


async def score(prompt: Prompt, sample: Sample) -> float:
    return float(sample.length % 2)


def build(
    journal: Journal, seed: int = 0, failure_rate: float = 0.0, filtered: bool = False, overlap: bool = False
) -> RolloutScheduler:
    return RolloutScheduler(
        ScriptedEngine(slots=5, seed=seed, failure_rate=failure_rate),
        Numbered(),
        score,
        RolloutParams(rollout_batch_size=2, over_sampling_batch_size=5, n_samples_per_prompt=2, max_staleness=2),
        sampling=SamplingParams(max_tokens=30),
        dynamic_filter=(lambda group: sum(s.length for s in group.samples) % 3 > 0) if filtered else None,
        faults=FaultSettings(max_retries=20, retry_delay=0.0),
        journal=journal,
        overlap=overlap,
    )


async def collect(rollouts: RolloutScheduler, steps: int) -> list[RolloutBatch]:
    collected = []
    async with rollouts:
        for _ in range(steps):
            collected.append(await rollouts.next_batch())
            await rollouts.update_weights()
    return collected


def content(step: RolloutBatch) -> dict[str, Any]:
    return {**step.to_dict(), "groups": [group.to_dict() for group in step.groups]}


@given(st.integers(0, 1000), st.sampled_from([0.0, 0.05]), st.booleans(), st.floats(0, 1))
@settings(max_examples=40, deadline=None)
def test_a_run_that_dies_anywhere_resumes_from_the_disk(
    seed: int, failure_rate: float, filtered: bool, where: float
) -> None:
    """Trained steps are restored unchanged, other samples resume from their last token, and no event is repeated."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "journal"
        with closing(Journal(path, flush_seconds=0)) as journal:
            before = asyncio.run(collect(build(journal, seed, failure_rate, filtered), 5))
        records = [0, *last_events(path)]
        cut(path, records[round(where * (len(records) - 1))])

        with closing(Journal(path, flush_seconds=0)) as journal:
            survived = build(journal, seed, failure_rate, filtered).state
            everything: dict[str, list[int]] = {}
            for event in journal.replay():
                survived.apply(event)
                if isinstance(event, Chunk):
                    everything.setdefault(event.sample_id, []).extend(event.token_ids)
            journal.position = 0
            rollouts = build(journal, seed + 1, failure_rate, filtered)
            engine = rollouts.engine
            engine.ledger = everything
            after = asyncio.run(collect(rollouts, 5))

    handed_over = survived.buffer.trained.groups // 2
    assert [content(step) for step in after[:handed_over]] == [content(step) for step in before[:handed_over]]
    buffer = rollouts.buffer
    trained = [group for step in after for group in step.groups]
    present = [group.id for group in trained] + [group.id for group in buffer]
    assert len(present) == len(set(present)) == buffer.admitted - buffer.rejected[Rejection.FILTER].groups
    for group in [*trained, *buffer]:
        assert group.prompt.metadata["number"] == group.id, "prompts are consumed once each, in order"
        for sample in group.samples:
            assert sample.response_ids == engine.ledger.get(sample.id, [])
            assert sample.response_ids == response(sample.seed, 30)[: sample.length]
    assert buffer.discarded_tokens == 0
    assert buffer.sampled_tokens == sum(map(len, engine.ledger.values()))


def test_a_finish_without_a_token_is_restored(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with closing(Journal(path, flush_seconds=0)) as journal:
        live = build(journal)
        live.engine.ends_apart = True  # type: ignore[attr-defined]
        asyncio.run(collect(live, 5))
    with closing(Journal(path)) as journal:
        replayed = build(journal).state
        silent = 0
        for event in journal.replay():
            replayed.apply(event)
            silent += isinstance(event, Chunk) and not event.token_ids and event.finish is FinishReason.STOP
    assert silent, "the engine said so in chunks of their own"
    assert replayed.state_dict() == live.state.state_dict()


async def test_a_saved_state_and_the_journal_after_it_are_one(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with closing(Journal(path)) as journal:
        rollouts = build(journal)
        async with rollouts:
            steps = []
            for number in range(4):
                if number == 2:
                    state = json.loads(json.dumps(rollouts.state_dict()))
                steps.append(await rollouts.next_batch())
                await rollouts.update_weights()
            journal.prune(state["journal"]["position"])
            end = rollouts.state_dict()
    with closing(Journal(path)) as journal:
        again = build(journal)
        again.load_state_dict(state)
        assert journal.check() == 2
        repeated = await collect(again, 2)
        assert [content(step) for step in repeated] == [content(step) for step in steps[2:]]
        assert again.state_dict()["prompts"] == end["prompts"] or not again.buffer.groups
    with closing(Journal(path)) as journal, pytest.raises(DamageError, match="record of event 1 is missing"):
        await build(journal).next_batch()


async def test_a_loop_with_weight_updates_at_other_moments_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with closing(Journal(path)) as journal:
        await collect(build(journal), 2)
    with closing(Journal(path)) as journal:
        rollouts = build(journal)
        await rollouts.next_batch()
        for _ in range(2):
            with pytest.raises(StalenessError, match="an update to policy version 1: update the weights as often"):
                await rollouts.next_batch()
        await rollouts.update_weights()
        with pytest.raises(StalenessError, match="a batch of policy version 1: take as many batches as before"):
            await rollouts.update_weights()
        assert (await rollouts.next_batch()).version == 1


def events(count: int = 40) -> list[Event]:
    """What happens to a few groups, one after the other."""
    made: list[Event] = []
    for id in range(count // 5):
        made += [
            Admitted(id, Prompt((1, 2), f"p{id}", {"answer": "ü"}), 1, SamplingParams(), 0, {"position": id + 1}),
            Chunk(f"{id}.0", [3, 4, 70000], [-0.25, -1.5, -1e-9], 0),
            Chunk(f"{id}.0", [5], [-0.5], 1, FinishReason.STOP),
            Rewarded(id, {0: Reward(0.5, {"format": 1})}),
            Rejected(id, Rejection.FILTER) if id % 2 else Trained([id], RolloutBatch(1, Plan(2), seconds=0.1)),
        ]
    return made


def write(path: Path, made: list[Event], each: int = 1) -> None:
    with closing(Journal(path, flush_seconds=3600)) as journal:
        for i, event in enumerate(made):
            journal.record(event)
            if i % each == each - 1:
                journal.flush()


def read(path: Path) -> list[Event]:
    with closing(Journal(path)) as journal:
        return list(journal.replay())


def test_every_event_is_restored_unchanged(tmp_path: Path) -> None:
    made = events()
    write(tmp_path / "j", made, each=7)
    assert read(tmp_path / "j") == made


def crashed(path: Path, made: list[Event], each: int = 1) -> Path:
    """Leave at `path` what a process that dies after writing leaves, and return its segment."""
    with closing(Journal(path.with_name("live"), flush_seconds=3600)) as journal:
        for i, event in enumerate(made):
            journal.record(event)
            if i % each == each - 1:
                journal.flush()
        journal.flush()
        copy(journal.path, path)
    (segment,) = segments_of(path)
    return segment


def test_flushed_events_survive_a_killed_process(tmp_path: Path) -> None:
    made = events()
    crashed(tmp_path / "j", made)
    assert read(tmp_path / "j") == made


def test_a_journal_truncated_at_any_byte_gives_a_prefix_of_its_events(tmp_path: Path) -> None:
    made = events(20)
    segment = crashed(tmp_path / "j", made)
    whole, lengths = segment.read_bytes(), set()
    for size in [*range(0, len(whole), 37), len(whole) - 1]:
        segment.write_bytes(whole[:size])
        found = read(tmp_path / "j")
        assert found == made[: len(found)]
        lengths.add(len(found))
    assert len(lengths) == len(made), "each record but the last is the last whole one at some length"


@pytest.mark.parametrize("remains", [b"", b"\0" * 300, b"\xa5rec" * 90])
def test_a_torn_tail_is_removed_before_the_next_write_and_not_before(tmp_path: Path, remains: bytes) -> None:
    made = events()
    segment = crashed(tmp_path / "j", made[:-1])
    whole = segment.read_bytes()
    _, at = place_of(tmp_path / "j", len(made) - 1)
    torn = whole[: at + 20] + remains
    segment.write_bytes(torn)
    with closing(Journal(tmp_path / "j")) as journal:
        assert list(journal.replay()) == made[:-2]
        assert segment.read_bytes() == torn
        journal.record(made[-2], made[-1])
    assert read(tmp_path / "j") == made


def test_a_live_journal_reads_nothing_behind_its_last_event(tmp_path: Path) -> None:
    """A torn tail, and a record in the writer's thread, are no damage for a reader of further events."""
    write(tmp_path / "journal", events())
    with segments_of(tmp_path / "journal")[-1].open("ab") as file:
        file.write(b"torn" * 30)
    with closing(Journal(tmp_path / "journal", flush_seconds=3600.0)) as journal:
        assert len(list(journal.replay())) == len(events())
        journal.record(events(41)[-1])
        assert list(journal.replay()) == []
        journal.flush()
        with segments_of(tmp_path / "journal")[-1].open("ab") as file:
            file.write(b"half a record")
        assert list(journal.replay()) == []


def test_a_journal_damaged_before_its_last_commit_is_an_error(tmp_path: Path) -> None:
    segment = crashed(tmp_path / "j", events(), each=2)
    whole = segment.read_bytes()
    _, last = place_of(tmp_path / "j", 39)
    for position in (10, 25, 40, 60, len(whole) // 2, last - 5):
        damage(segment, position, 255)
        damaged = segment.read_bytes()
        with pytest.raises(DamageError, match=r"j/.*events: damaged before its end"):
            read(tmp_path / "j")
        assert segment.read_bytes() == damaged, "it is left as it was found"
        segment.write_bytes(whole)
    assert read(tmp_path / "j") == events()


def test_pages_of_the_last_commit_that_reached_the_disk_alone_are_no_damage(tmp_path: Path) -> None:
    """Of a commit that was never complete, any part may be there."""
    segment = crashed(tmp_path / "j", events(), each=4)
    _, at = place_of(tmp_path / "j", 37)
    damage(segment, at + 30, 255)
    assert read(tmp_path / "j") == events()[:36]


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_damaged_files_give_a_beginning_or_a_clear_error(files: Path, data: st.DataObject) -> None:
    """Random bytes in any segment: never a crash, never an event that did not happen."""
    with tempfile.TemporaryDirectory() as directory:
        path = copy(files, Path(directory) / "journal")
        victim = data.draw(st.sampled_from(segments_of(path)))
        for _ in range(data.draw(st.integers(1, 4))):
            damage(victim, data.draw(st.integers(0, victim.stat().st_size - 1)), data.draw(st.integers(1, 255)))
        if data.draw(st.booleans()):
            size = data.draw(st.integers(0, victim.stat().st_size))
            victim.write_bytes(victim.read_bytes()[:size])
        found, error = read_or_error(path)
        if error is not None:
            assert str(path) in error, "the file is named"
            repair_journal(path, None)
            found = read(path)
        made = events()
        assert found == made[: len(found)]


def read_or_error(path: Path) -> tuple[list[Event], str | None]:
    try:
        return read(path), None
    except JournalError as error:
        return [], str(error)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three segments of events."""
    path = tmp_path_factory.mktemp("journal") / "j"
    with closing(Journal(path, flush_seconds=3600)) as journal:
        for number, event in enumerate(events(), 1):
            journal.record(event)
            journal.flush()
            if number in (11, 30):
                journal.mark()
    assert len(segments_of(path)) == 3
    return path


def test_pruning_removes_whole_segments_and_a_mark_begins_one(files: Path, tmp_path: Path) -> None:
    path = copy(files, tmp_path / "j")
    with closing(Journal(path)) as journal:
        journal.prune(29)
        assert len(segments_of(path)) == 2
        mark = {**journal.mark(), "position": 11}
        journal.seek(mark)
        assert journal.check() == sum(isinstance(event, Trained) for event in events()[11:])
        with pytest.raises(DamageError, match="holds events 12 to 40, but the saved state stands at 10"):
            journal.seek({**mark, "position": 10})
        journal.prune(40)
        assert len(segments_of(path)) == 1
        journal.seek({**mark, "position": 40})
        journal.record(events()[0])
        journal.flush()
        journal.prune(40)
        assert last_of(segments_of(path)) == 41


def last_of(segments: list[Path]) -> int:
    (segment,) = segments
    return int(segment.stem)


def test_segments_are_bounded_and_read_one_record_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_file, "SEGMENT_BYTES", 500)
    made = events()
    write(tmp_path / "j", made, each=3)
    sizes = [segment.stat().st_size for segment in segments_of(tmp_path / "j")]
    assert len(sizes) > 5
    assert max(sizes) < 2000
    with closing(Journal(tmp_path / "j")) as journal:
        for number in (0, 7, 20, 39):
            journal.position = number
            assert next(journal.replay()) == made[number]
            journal.unread()
            assert list(journal.replay()) == made[number:]


def test_a_segment_whose_header_a_crash_cut_off_is_left_out(files: Path, tmp_path: Path) -> None:
    path, made = copy(files, tmp_path / "j"), events()
    newest = segments_of(path)[-1]
    for size in (0, 10, 47):
        newest.write_bytes(newest.read_bytes()[:size])
        assert read(path) == made[:30]
    with closing(Journal(path)) as journal:
        list(journal.replay())
        journal.record(*made[30:])
    assert read(path) == made


@given(st.text(max_size=40), st.sampled_from(["chunks", "admitted", "rewarded", "rejected", "trained", "?"]))
@settings(max_examples=100, deadline=None)
def test_records_of_any_content_are_read_or_refused(text: str, kind: str) -> None:
    """Even one whose checksum is right."""
    for body in (text, json.dumps(text), json.dumps([text, [[text, 1]]]), json.dumps({"groups": text, "step": {}})):
        with suppress(ValueError):
            assert all(isinstance(event, tuple) for event in decode(Record(1, 1, _content(kind, json.loads(body)))))
        with suppress(ValueError):
            decode(Record(1, 1, body.encode()))


def test_a_damaged_record_is_named_and_repair_keeps_those_before_it(tmp_path: Path) -> None:
    path, made = tmp_path / "journal", events()
    write(path, made[:5])
    with closing(Journal(path)) as journal:
        list(journal.replay())
        mark = journal.mark()
        journal.record(*made[5:20])
        journal.flush()
        journal.mark()
        journal.record(*made[20:])
    segment, at = place_of(path, 12)
    damage(segment, at + 40, 255)
    with closing(Journal(path)) as journal:
        journal.seek(mark)
        with pytest.raises(DamageError, match=r"journal/.*events: damaged: the record of event 12 cannot be read"):
            journal.check()
    before = contents(segments_of(path))
    kept, taken = repair_journal(path, mark)
    assert contents(segments_of(kept)) == before, "nothing is overwritten"
    assert taken == 6
    with closing(Journal(path)) as journal:
        journal.seek(mark)
        assert list(journal.replay()) == made[5:11]
        journal.record(made[11])
    with closing(Journal(path)) as journal:
        journal.seek(mark)
        assert list(journal.replay()) == made[5:12]
    assert contents(segments_of(kept)) == before


def test_rewinding_drops_the_events_after_the_saved_state(files: Path, tmp_path: Path) -> None:
    path = copy(files, tmp_path / "j")
    with closing(Journal(path)) as journal:
        mark = {**journal.mark(), "position": 11}
    kept, taken = repair_journal(path, mark, events=False)
    assert taken == 0
    assert read(kept) == events()
    with closing(Journal(path)) as journal:
        journal.seek(mark)
        assert list(journal.replay()) == []
        journal.record(*events()[11:])
    assert read(path) == events()


def test_repair_starts_a_new_journal_if_the_run_has_none(files: Path, tmp_path: Path) -> None:
    mark = {"run": "0" * 32, "position": 7}
    for path in (copy(files, tmp_path / "other"), tmp_path / "missing"):
        assert repair_journal(path, mark)[1] == 0
        with closing(Journal(path)) as journal:
            journal.seek(mark)
            assert list(journal.replay()) == []
            journal.record(events()[0])


def test_another_runs_journal_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "one", events())
    with closing(Journal(tmp_path / "one")) as one, closing(Journal(tmp_path / "two")) as two:
        with pytest.raises(DamageError, match="not the journal that belongs"):
            two.seek({**one.mark(), "position": 3})
        with pytest.raises(DamageError, match="holds events 1 to 40, but the saved state stands at 41"):
            one.seek({**one.mark(), "position": 41})


def test_a_journal_is_open_once(tmp_path: Path) -> None:
    with closing(Journal(tmp_path / "j")), pytest.raises(JournalError, match="open in another process"):
        Journal(tmp_path / "j")
    Journal(tmp_path / "j").close()


@pytest.mark.parametrize(
    ("change", "message"),
    [(1, f"a newer april, in format {FORMAT + 1}"), (-1, f"an older april, in format {FORMAT - 1}")],
)
def test_journals_of_other_formats_are_refused_and_left_alone(
    tmp_path: Path, change: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "j"
    with monkeypatch.context() as other:
        other.setattr(journal_file, "FORMAT", FORMAT + change)
        write(path, events())
    before = contents(segments_of(path))
    with pytest.raises(JournalError, match=message):
        Journal(path)
    assert contents(segments_of(path)) == before


def test_other_files_are_no_journals(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("hello " * 1000)
    with pytest.raises(DamageError, match="no journal of april"):
        Journal(other)
    other.unlink()
    other.mkdir()
    assert read(other) == [], "a directory that a crash left empty is a new journal"


@contextmanager
def full_disk() -> Iterator[None]:
    """Writing fails after some bytes more."""
    left, write = 3000, os.write

    def limited(descriptor: int, data: Any) -> int:
        nonlocal left
        if left <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = write(descriptor, data[:left])
        left -= count
        return count

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal_file.os, "write", limited)
        yield


async def test_a_full_disk_stops_the_step_and_keeps_written_events(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with closing(Journal(path)) as journal:
        rollouts = build(journal)
        async with rollouts:
            steps = [await rollouts.next_batch()]
            await rollouts.update_weights()
            with full_disk():
                with pytest.raises(JournalError, match=r"journal: cannot be written: .*No space left"):
                    await until_error(rollouts)
                with pytest.raises(JournalError):
                    rollouts.state_dict()
    with closing(Journal(path)) as journal:
        again = build(journal)
        again.engine = ScriptedEngine(slots=5)
        assert content(await again.next_batch()) == content(steps[0])


async def until_error(rollouts: RolloutScheduler) -> None:
    for _ in range(50):
        await rollouts.next_batch()
        await rollouts.update_weights()


async def test_a_slow_disk_delays_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "BACKLOG", 100)
    release = threading.Event()
    commit = Journal.commit

    def slow(self: Journal, records: Any) -> None:
        release.wait()
        commit(self, records)

    monkeypatch.setattr(Journal, "commit", slow)
    with closing(Journal(tmp_path / "j", flush_seconds=3600)) as journal:
        await journal.drain()
        for _ in range(101):
            journal.record(Rewarded(0, {0: Reward(1.0)}))
        waiting = asyncio.ensure_future(journal.drain())
        for _ in range(100):
            await asyncio.sleep(0)
        assert not waiting.done()
        release.set()
        await waiting
        assert len(read_copy(journal, tmp_path)) == 101


def read_copy(journal: Journal, directory: Path) -> list[Event]:
    """What a crash now would leave."""
    return read(copy(journal.path, directory / "copy"))


async def test_without_delay_all_events_are_on_disk_before_generation_continues(tmp_path: Path) -> None:
    with closing(Journal(tmp_path / "j", flush_seconds=0)) as journal:
        for n, event in enumerate(events(), 1):
            journal.record(event)
            await journal.drain()
            assert len(read_copy(journal, tmp_path)) == n


async def test_a_drain_that_the_writer_is_ahead_of_does_not_wait_for_the_next_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(threading.Condition):
        """A drain gets the lock only once everything is written."""

        armed = False

        def __enter__(self) -> bool:
            while self.armed and threading.current_thread() is threading.main_thread() and journal.backlog:
                time.sleep(0.001)
            return super().__enter__()

    monkeypatch.setattr(journal_module, "BACKLOG", 0)
    with closing(Journal(tmp_path / "j", flush_seconds=0.01)) as journal:
        journal._changed = late = Late()
        journal.record(events()[0])
        late.armed = True
        await asyncio.wait_for(journal.drain(), HANG)


@pytest.mark.parametrize("say", [Journal.flush, lambda journal: asyncio.run(journal.drain())])
def test_an_unwritable_event_is_an_error_and_not_a_hang(tmp_path: Path, say: Callable[[Journal], None]) -> None:
    with closing(Journal(tmp_path / "j", flush_seconds=0)) as journal:
        journal.record(Admitted(0, Prompt((1,), metadata={"x": object()}), 1, SamplingParams(), 0))
        with pytest.raises(JournalError, match="which JSON does not have"):
            say(journal)


def test_a_negative_delay_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="journal_flush_seconds = -1"):
        Journal(tmp_path / "j", flush_seconds=-1)
