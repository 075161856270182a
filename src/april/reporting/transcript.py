"""Transcript of an episode by turn: the policy's text, coloured by version, and the observations.

Invariant: each token is in the turn that the completions table records, and the page states the omitted length.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from html import escape
from typing import Any

from april.reporting.formats import compact

AGES = 6
LONGEST = 24_000
"""Characters of one episode's HTML: a hundred short turns, or a few long ones."""
LONGEST_PIECE = 6_000


class Colours:
    """Colours of the pieces of a completion, by the age of the policy.

    Args:
        row: row of the table of completions.
    """

    def __init__(self, row: Mapping[str, Any]) -> None:
        sampled = [piece["version"] for piece in row["pieces"] if piece["version"] >= 0]
        self.newest = min(sampled, default=0) + row["staleness"]

    def span(self, piece: Mapping[str, Any], text: str) -> str:
        by_policy = piece["version"] >= 0
        style = f"c-age{min(self.newest - piece['version'], AGES - 1)}" if by_policy else "c-grey"
        source = f"policy version {piece['version']}" if by_policy else "the environment"
        return f'<span class="piece {style}" title="{source}, {piece["tokens"]:,} tokens">{escape(text)}</span>'


def transcript(row: Mapping[str, Any]) -> str:
    """The episode as HTML.

    Args:
        row: row of the table of completions, with turns.
    """
    pieces, colours = deque(row["pieces"]), Colours(row)

    def next_tokens(count: int) -> str:
        spans = []
        while count > 0:
            piece = pieces.popleft()
            # Pieces are cut where turns begin and end, so the count reaches exactly 0.
            count -= piece["tokens"]
            spans.append(colours.span(piece, piece["text"][:LONGEST_PIECE]))
            if (more := len(piece["text"]) - LONGEST_PIECE) > 0:
                spans.append(f"<i> … {more:,} more characters</i>")
        return "".join(spans)

    parts: list[str] = []
    left = LONGEST
    for number, turn in enumerate(row["turns"]):
        text = next_tokens(turn["policy_tokens"]) + next_tokens(turn["observation_tokens"])
        part = f'<p class="turn">{escape(_heading(number, turn))}</p>' + (f"<pre>{text}</pre>" if text else "")
        if len(part) > left:
            parts.append(f'<p class="turn">{len(row["turns"]) - number:,} more turns: the table has them.</p>')
            break
        left -= len(part)
        parts.append(part)
    return "".join(parts)


def _heading(number: int, turn: Mapping[str, Any]) -> str:
    if turn["reward"] is None:
        return f"turn {number}, not answered · {turn['policy_tokens']:,} tokens"
    facts = [f"turn {number}" if number else "reset"]
    if number:
        facts.append(f"{turn['policy_tokens']:,} tokens")
    facts.append(f"{turn['observation_tokens']:,} from the environment in {compact(turn['seconds'])} s")
    if number:
        facts.append(f"reward {turn['reward']:g}")
    if turn["failed"]:
        facts.append("the environment failed")
    if turn["info"]:
        facts.append(turn["info"])
    return " · ".join(facts)
