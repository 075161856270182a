"""The sequences of an episode in the report."""

from __future__ import annotations

from pathlib import Path

from april import FinishReason, Group, Prompt, SamplingParams
from april.reporting.browser import browser
from april.reporting.completions import read_completions, rows_of, write_rows
from april.reporting.episode_tree import episode_tree
from april.rollout.trajectory.transition import Origin, Transition


def group_of_a_program() -> Group:
    """Two episodes: one of three sequences, the second of which shares the first turn, and one of a single sequence."""
    group = Group.start(0, Prompt((1,), "p"), 2, SamplingParams(99, max_turns=9), 0)
    asked = [Transition(0, 0, number=number, request={"messages": [], "after": None}) for number in range(3)]
    group.branch(0, 0, Origin(), (10, 11), asked[0])
    group.sample(0).extend([20, 21], [-1.0, -1.0], 0, FinishReason.STOP)
    group.branch(2, 0, Origin(0, 4), (12,), asked[1])
    group.sample(2).extend([30], [-1.0], 0, FinishReason.STOP)
    group.branch(3, 0, Origin(), (40,), asked[2])
    group.sample(3).extend([50], [-1.0], 0, FinishReason.STOP)
    group.branch(1, 1, Origin(), (60,), asked[0])
    group.sample(1).extend([70], [-1.0], 0, FinishReason.STOP)
    for sample in group.samples:
        last = sample.index in (1, 3)
        sample.observe((), Transition(sample.length, 0, float(last), last), FinishReason.DONE)
        sample.reward = 1.0
    return group


def test_a_sequence_stands_under_the_one_that_it_shares_tokens_with(tmp_path: Path) -> None:
    rows = rows_of([group_of_a_program()], 1, 0, lambda ids: "".join(f"<{token}>" for token in ids), False)
    assert [(row["sample"], row["episode"], row["parent"], row["shared"]) for row in rows] == [
        (0, 0, None, 0),
        (1, 1, None, 0),
        (2, 0, 0, 4),
        (3, 0, None, 0),
    ]
    write_rows(tmp_path / "completions" / "step-000001.parquet", rows)
    html = episode_tree([row for row in read_completions(next(tmp_path.rglob("*.parquet"))) if row["episode"] == 0])
    assert html.count("&lt;10&gt;&lt;11&gt;") == 1, "the shared beginning is shown once"
    assert html.index("sequence 0") < html.index("sequence 2 · branches off from sequence 0 after 4 tokens")
    assert html.index("after 4 tokens") < html.index("sequence 3")
    page = browser(tmp_path).body
    assert page.count("<summary>") == 2, "an item is an episode"
    assert "3 sequences" in page


def test_a_chain_of_thousands_of_sequences_is_shown() -> None:
    """A client that leaves out thinking begins each sequence with the one before."""
    group = Group.start(0, Prompt((1,), "p"), 1, SamplingParams(99, max_turns=9), 0)
    for index in range(2000):
        origin = Origin(index - 1, 1) if index else Origin()
        group.branch(index, 0, origin, (10,), Transition(0, 0, number=index, request={"messages": [], "after": None}))
        group.samples[-1].extend([20], [-1.0], 0, FinishReason.STOP)
    for sample in group.samples:
        sample.observe((), Transition(sample.length, 0, 1.0, sample.index == 1999), FinishReason.DONE)
        sample.reward = 1.0
    html = episode_tree(rows_of([group], 1, 0, lambda ids: "".join(f"<{token}>" for token in ids), False))
    assert html.count("<div") == html.count("</div>")
    assert all(f"sequence {index} " in html for index in range(2000))
