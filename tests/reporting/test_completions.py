"""The text of a run is readable: all of it in a table, a selection on the console and in the report."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from april import Group, Prompt, RolloutBatch, SamplingParams
from april.reporting.completions import CompletionsWriter, files, most_informative, read_completions, rows_of
from april.reporting.progress import Progress
from april.reporting.report import write_report
from april.reporting.run_log import RunLog
from april.rollout.batch import Plan
from april.rollout.sampling import FinishReason
from april.rollout.trajectory.transition import Transition
from tests.reporting.test_report import page

TEXT = "Ünïcode <script>alert(1)</script> \x1b[31m"


def decode(ids: Sequence[int]) -> str:
    """Token i is byte i, as in a byte-level tokenizer: a character may fall on two tokens."""
    return bytes(ids).decode("utf-8", "replace")


def step_of(version: int, text: str = TEXT, cuts: Sequence[int] = (1, 9)) -> RolloutBatch:
    """A group of two samples, each interrupted at the bytes `cuts`, the last part sampled by `version`."""
    group = Group.start(
        version, Prompt(tuple(b"say it"), f"prompt {version}"), 2, SamplingParams(max_tokens=30_000), seed=0
    )
    for sample in group.samples:
        body = text.encode() + b"!" * sample.index
        bounds = [0, *cuts, len(body)]
        first = version - len(cuts)
        for number, (start, end) in enumerate(itertools.pairwise(bounds)):
            finish = FinishReason.STOP if end == len(body) else None
            ids = list(body[start:end])
            sample.extend(ids, [-1.0] * len(ids), version=first + number, finish=finish)
        sample.reward, sample.reward_info = float(sample.index), {"form": 0.5}
    return RolloutBatch(version, Plan(1), groups=[group], seconds=1.0)


def test_the_pieces_of_a_completion_add_up_to_its_text() -> None:
    for cut in range(1, 9):
        step = step_of(5, cuts=(cut, cut + 1))
        for row in rows_of(step.groups, 6, step.version, decode, held_out=False):
            assert "".join(piece["text"] for piece in row["pieces"]) == row["completion"] == TEXT + "!" * row["sample"]
            assert [piece["version"] for piece in row["pieces"]] == [3, 4, 5]
            assert sum(piece["tokens"] for piece in row["pieces"]) == row["length"]
            assert row["staleness"] == 2
            assert row["components"] == '{"form": 0.5}'


def episode_step() -> RolloutBatch:
    """An episode of a reset, two answered turns of one version, and a third that the budget cut off in the next."""
    sampling = SamplingParams(max_tokens=12, max_turns=9)
    group = Group.start(0, Prompt(tuple(b"play"), "game"), 1, sampling, seed=0)
    (sample,) = group.samples

    def hear(text: str, **more: Any) -> None:
        sample.observe(list(text.encode()), Transition(sample.length, len(text.encode()), seconds=0.25, **more))

    def say(text: str, version: int, finish: FinishReason | None) -> None:
        sample.extend(list(text.encode()), [-1.0] * len(text.encode()), version, finish)

    hear("")
    say("öne", 4, FinishReason.STOP)
    hear("<b>héard</b>", reward=0.5, info={"right": 1})
    say("two", 4, FinishReason.STOP)
    hear("", failed=True)
    say("th", 4, None)
    say("ree", 5, FinishReason.LENGTH)
    sample.reward = 0.5
    return RolloutBatch(5, Plan(1), groups=[group], seconds=1.0)


def test_an_episode_is_read_turn_by_turn(tmp_path: Path) -> None:
    with RunLog(tmp_path, {}, decode=decode) as log:
        log.step(episode_step(), {}, slots=2)
    (row,) = read_completions(files(tmp_path)[0])
    assert [(piece["text"], piece["version"]) for piece in row["pieces"]] == [
        ("öne", 4),
        ("<b>héard</b>", -1),
        ("two", 4),
        ("th", 4),
        ("ree", 5),
    ]
    assert [
        (turn["policy_tokens"], turn["observation_tokens"], turn["reward"], turn["failed"]) for turn in row["turns"]
    ] == [
        (0, 0, 0.0, False),
        (4, 13, 0.5, False),
        (3, 0, 0.0, True),
        (5, 0, None, False),
    ]
    html = write_report(tmp_path).read_text()
    assert "Episodes, turn by turn" in html
    assert "turn 1 · 4 tokens · 13 from the environment in 0.25 s · reward 0.5 · {&quot;right&quot;: 1}" in html
    assert "&lt;b&gt;héard&lt;/b&gt;</span></pre>" in html
    assert "reward 0 · the environment failed" in html
    assert "turn 3, not answered · 5 tokens" in html
    said = re.findall(r'title="(policy version \d|the environment), (\d+) tokens">', html)
    assert said == [
        ("policy version 4", "4"),
        ("the environment", "13"),
        ("policy version 4", "3"),
        ("policy version 4", "2"),
        ("policy version 5", "3"),
    ]
    page(tmp_path)


def test_a_table_contains_all_text_and_each_step_once_after_a_resume(tmp_path: Path) -> None:
    with RunLog(tmp_path, {}, decode=decode) as log:
        for version in (2, 3, 4):
            log.step(step_of(version), {}, slots=2)
        log.evaluation({"eval_reward": 0.5}, step_of(9).groups)
        state = log.state_dict()
        log.step(step_of(5), {}, slots=2)
    with RunLog(tmp_path, {}, resume=True, state=state, decode=decode) as log:
        assert [path.stem for path in files(tmp_path)][2:] == ["step-000003", "step-000003-held-out"]
        log.step(step_of(6), {}, slots=2)
    rows = [row for path in files(tmp_path) for row in read_completions(path)]
    assert [(row["step"], row["held_out"], row["sample"], row["reward"]) for row in rows] == [
        (step, held_out, sample, float(sample))
        for step, held_out in ((1, False), (2, False), (3, False), (3, True), (4, False))
        for sample in (0, 1)
    ]
    assert {row["prompt"] for row in rows} == {"say it"}
    assert rows[-1]["prompt_id"] == "prompt 6"


def test_a_step_does_not_wait_for_its_text(tmp_path: Path) -> None:
    allowed = threading.Event()

    def slow(ids: Sequence[int]) -> str:
        assert allowed.wait(30)
        return decode(ids)

    done: list[int] = []
    with CompletionsWriter(tmp_path, slow, lambda rows: done.append(rows[0]["step"])) as writer:
        writer.write(step_of(4).groups, 1, 4)
        assert not files(tmp_path)
        allowed.set()
        writer.write(step_of(4).groups, 2, 4)
        assert done[0] == 1
    assert done == [1, 2]


def test_text_that_cannot_be_written_is_not_lost_in_silence(tmp_path: Path) -> None:
    (tmp_path / "completions").write_text("a file is in the way")
    writer = CompletionsWriter(tmp_path, decode, lambda rows: None)
    writer.write(step_of(4).groups, 1, 4)
    with pytest.raises(OSError, match="completions"):
        writer.close()


def test_the_report_shows_text_as_text_with_a_colour_for_each_age(tmp_path: Path) -> None:
    with RunLog(tmp_path, {}, decode=decode) as log:
        log.step(step_of(4), {}, slots=2)
    checker = page(tmp_path)
    assert checker.tags.get("script") == 1
    assert "Ünïcode <script>alert(1)</script>" in "".join(checker.text)
    html = (tmp_path / "report.html").read_text()
    assert 'class="piece c-age2" title="policy version 2, 1 tokens"' in html
    assert 'class="piece c-age0" title="policy version 4' in html


def test_the_page_of_a_run_with_long_text_stays_small(tmp_path: Path) -> None:
    with RunLog(tmp_path, {}, decode=decode) as log:
        for version in range(2, 122):
            log.step(step_of(version, text="long " * 4000), {}, slots=2)
    assert write_report(tmp_path).stat().st_size < 2_000_000


def test_completions_are_shown_on_request_without_control_characters(tmp_path: Path) -> None:
    out = io.StringIO()
    with RunLog(tmp_path, {}, progress=Progress(1, file=out), decode=decode, show_completions=1) as log:
        log.step(step_of(4), {}, slots=2)
    shown = out.getvalue()
    assert "--- step 1, prompt 4: reward 1.000, 42 tokens, staleness 2" in shown
    assert "say it\n>>> Ünïcode" in shown
    assert "\x1b" not in shown


def test_the_most_informative_completions_come_first() -> None:
    facts = ((0.5, 5, 0), (0.4, 9, 0), (0.9, 4, 0), (0.1, 3, 0), (0.3, 2, 7))
    rows = [
        {"group": 0, "sample": i, "reward": reward, "length": length, "staleness": staleness}
        for i, (reward, length, staleness) in enumerate(facts)
    ]
    assert [row["sample"] for row in most_informative(rows, 4)] == [2, 3, 1, 4]
    assert len(list(most_informative(rows, 99))) == 5
    assert json.dumps(list(most_informative([], 3))) == "[]"


@pytest.mark.parametrize(("answer", "written"), [("42", "42"), (None, None), ([3, 4], "[3, 4]"), (1e-05, "1e-05")])
def test_the_reference_answer_is_stored_with_the_completion(
    tmp_path: Path, answer: object, written: str | None
) -> None:
    step = step_of(2)
    group = step.groups[0]
    group.prompt = dataclasses.replace(group.prompt, metadata={"answer": answer})
    with RunLog(tmp_path, {}, decode=decode) as log:
        log.step(step, {}, slots=2)
    assert [row["answer"] for row in read_completions(files(tmp_path)[0])] == [written] * 2


def test_a_long_completion_is_shown_with_its_end(tmp_path: Path) -> None:
    shown = io.StringIO()
    with (
        Progress(3, shown) as progress,
        RunLog(tmp_path, {}, [], "april", False, None, progress, decode=decode, show_completions=2) as log,
    ):
        log.step(step_of(2, "so " + 5000 * "hm " + r"\boxed{42}"), {}, slots=2)
    assert r"\boxed{42}" in shown.getvalue()
    assert ">>> so hm" in shown.getvalue()
    assert len(shown.getvalue()) < 6000
