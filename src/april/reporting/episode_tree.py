"""The sequences of an episode as a tree: each under the one whose beginning it shares.

Invariant: each sequence is shown once, with the text that it does not share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from april.reporting.transcript import transcript

LONGEST = 4_000
"""Characters of a sequence's own prompt."""
DEEPEST = 12
"""Levels that are shown; deeper sequences are shown at the last one."""
OPEN = '<div class="branch" style="border-left:2px solid #8884;margin-left:.6em;padding-left:.8em">'
"""The line at the left shows what a sequence branches off from."""
CLOSE = "</div>"


def episode_tree(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the sequences of one episode as HTML.

    Args:
        rows: of the table of completions, all of one episode.
    """
    known = {row["sample"]: row for row in rows}
    behind: dict[int | None, list[Mapping[str, Any]]] = {}
    for row in rows:
        behind.setdefault(row["parent"] if row["parent"] in known else None, []).append(row)

    # Without recursion: a client that leaves out thinking begins each sequence with the one before.
    parts: list[str] = []
    left, depth = [(row, 1) for row in reversed(behind.get(None, ()))], 0
    while left:
        row, level = left.pop()
        shown = min(level, DEEPEST)
        parts += [OPEN] * (shown - depth) + [CLOSE] * (depth - shown)
        parts.append(_sequence(row, known.get(row["parent"])))
        left += [(one, level + 1) for one in reversed(behind.get(row["sample"], ()))]
        depth = shown
    return "".join([*parts, *[CLOSE] * depth])


def _sequence(row: Mapping[str, Any], parent: Mapping[str, Any] | None) -> str:
    facts = [f"sequence {row['sample']}"]
    if parent is not None:
        facts.append(f"branches off from sequence {parent['sample']} after {row['shared']:,} tokens")
    turns = len(row["turns"]) - 1
    facts += [f"{turns:,} turn{'s' * (turns != 1)}", f"{row['length']:,} tokens", f"ended by {row['finish']}"]
    own = row["prompt"] if parent is None else _unshared(row["prompt"], parent["prompt"] + parent["completion"])
    text = escape(own[-LONGEST:])
    return f'<p class="turn"><b>{escape(" · ".join(facts))}</b></p><pre class="prompt">{text}</pre>{transcript(row)}'


def _unshared(text: str, other: str) -> str:
    """Return `text` without the beginning that it has in common with `other`."""
    same = next(
        (place for place, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other))
    )
    return text[same:]
