"""The completions of a run, to browse in its report: bounded, so that the page of a long run still opens.

Invariant: text of the run reaches the page escaped; what is left out is said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from april.reporting.completions import files, read_completions, telling
from april.reporting.html import Section
from april.reporting.metrics import show

MOST_STEPS, MOST_ROWS, LONGEST = 60, 240, 3000
"""Files that are read, rows that are shown, and characters of a prompt or completion."""
AGES = 6

CONTROLS = """<div class="choices"><select id="which" aria-label="which completions">
<option value="">all shown</option><option value="false">trained on</option><option value="true">held out</option>
</select><select id="at" aria-label="of which step"><option value="">every step</option>{steps}</select>
<select id="order" aria-label="in which order"><option value="-step">latest step first</option>
<option value="step">first step first</option>
<option value="-reward">highest reward first</option><option value="reward">lowest reward first</option>
<option value="-length">longest first</option><option value="-staleness">stalest first</option></select></div>"""


def browser(run_directory: Path) -> Section:
    """The section; empty if the run wrote no completions."""
    found = files(run_directory)
    if not found:
        return Section("", "")
    stride = -(-len(found) // MOST_STEPS)
    chosen = found[::-1][::stride][::-1]
    each = max(4, MOST_ROWS // len(chosen))
    rows = [row for path in chosen for row in telling(read_completions(path), each)]
    steps = "".join(f'<option value="{n}">step {n}</option>' for n in sorted({row["step"] for row in rows}))
    return Section(
        "Completions",
        CONTROLS.format(steps=steps) + f'<div id="completions">{"".join(map(_item, rows))}</div>',
        f"Of each step shown, the best and the worst rewarded, the longest and the stalest completions first: "
        f"{len(rows):,} of the run; all of them are in completions/, a Parquet file a step. Blue is what the policy of "
        "the step itself sampled, warmer colours what older versions did; point at a piece to see which.",
    )


def _item(row: Mapping[str, Any]) -> str:
    facts = [
        f"step {row['step']}{', held out' * row['held_out']}",
        f"reward {show('reward', row['reward'])}",
        f"{row['length']:,} tokens{', truncated' * (row['finish'] == 'length')}",
    ]
    if row["staleness"]:
        facts.append(f"staleness {row['staleness']}")
    if row["components"]:
        facts.append(row["components"])
    facts.append(row["prompt_id"])
    data = {name: row[name] for name in ("step", "reward", "length", "staleness")}
    data["held"] = str(bool(row["held_out"])).lower()
    attributes = "".join(f' data-{name}="{escape(str(value))}"' for name, value in data.items())
    return (
        f'<details class="completion"{attributes}><summary>{escape(" · ".join(facts))}</summary>'
        f'<pre class="prompt">{_clipped(row["prompt"])}</pre><pre>{"".join(_pieces(row))}</pre></details>'
    )


def _pieces(row: Mapping[str, Any]) -> Sequence[str]:
    pieces, left, parts = row["pieces"], LONGEST, []
    sampled = [piece["version"] for piece in pieces if piece["version"] >= 0]
    newest = min(sampled, default=0) + row["staleness"]
    for piece in pieces:
        text = piece["text"][:left]
        left -= len(text)
        by_policy = piece["version"] >= 0
        style = f"c-age{min(newest - piece['version'], AGES - 1)}" if by_policy else "c-grey"
        source = f"policy version {piece['version']}" if by_policy else "the environment"
        parts.append(f'<span class="piece {style}" title="{source}, {piece["tokens"]:,} tokens">{escape(text)}</span>')
    if len(row["completion"]) > LONGEST:
        parts.append(f"<i> … {len(row['completion']) - LONGEST:,} more characters</i>")
    return parts


def _clipped(text: str) -> str:
    left_out = len(text) - LONGEST
    return escape(text) if left_out <= 0 else f"<i>{left_out:,} characters before … </i>{escape(text[-LONGEST:])}"
