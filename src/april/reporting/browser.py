"""The completions of a run, to browse in its report: bounded, so that the page of a long run still opens.

Invariant: text of the run is escaped, and the page states the number of rows that it omits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from april.reporting.completions import files, most_informative, read_completions
from april.reporting.episode_tree import episode_tree
from april.reporting.html import Section
from april.reporting.metrics import show
from april.reporting.transcript import Colours, transcript

MOST_STEPS, MOST_ROWS, LONGEST = 60, 240, 3000
"""Maximum numbers of files read, rows shown, and characters of a prompt or completion."""
MOST_EPISODES = 60
"""Maximum number of rows for a run with an environment, whose rows are longer."""

ENDING = 160
"""Characters of a completion's end in its closed row; the answer is usually at the end."""

CONTROLS = """<div class="choices"><input id="find" type="search" placeholder="find text" aria-label="find text">
<select id="which" aria-label="which completions">
<option value="">all shown</option><option value="false">trained on</option><option value="true">held out</option>
</select><select id="at" aria-label="of which step"><option value="">every step</option>{steps}</select>
<select id="order" aria-label="in which order"><option value="-step">latest step first</option>
<option value="step">first step first</option>
<option value="-reward">highest reward first</option><option value="reward">lowest reward first</option>
<option value="-length">longest first</option><option value="-staleness">stalest first</option>{more}</select></div>"""
TURNS = '<option value="-turns">most turns first</option>'


def browser(run_directory: Path) -> Section:
    """The section; empty if the run wrote no completions."""
    found = files(run_directory)
    if not found:
        return Section("", "")
    stride = -(-len(found) // MOST_STEPS)
    # Counted from the end, so that the latest step is always among them.
    chosen = found[::-1][::stride][::-1]
    episodes = any(row["turns"] for row in read_completions(chosen[-1]))
    each = max(1 if episodes else 4, (MOST_EPISODES if episodes else MOST_ROWS) // len(chosen))
    shown = [one for path in chosen for one in _most_informative_episodes(read_completions(path), each)]
    rows = [one[0] for one in shown]
    steps = "".join(f'<option value="{n}">step {n}</option>' for n in sorted({row["step"] for row in rows}))
    kind = "episodes" if episodes else "completions"
    controls = CONTROLS.format(steps=steps, more=TURNS * episodes)
    grey = ", grey: text of the environment" if episodes else ""
    return Section(
        "Episodes, turn by turn" if episodes else "Completions",
        controls + f'<div id="completions">{"".join(map(_item, shown))}</div>',
        f"{len(rows):,} {kind} of the run: of each shown step first the best and the worst rewarded, the longest and "
        "the stalest one; completions/ has all of them, in a Parquet file per step. Blue: sampled by the policy of the "
        f"step; warmer colours: sampled by older versions{grey}; the tooltip of a piece has the version.",
    )


def _most_informative_episodes(rows: Sequence[Mapping[str, Any]], count: int) -> list[list[Mapping[str, Any]]]:
    """Return informative episodes, each with all its sequences and the informative one first."""
    episodes: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        episodes.setdefault(_episode(row), []).append(row)
    if len(episodes) == len(rows):
        return [[row] for row in most_informative(rows, count)]
    told = list(dict.fromkeys(map(_episode, most_informative(rows, len(rows)))))[:count]
    return [episodes[episode] for episode in told]


def _episode(row: Mapping[str, Any]) -> tuple[int, int]:
    # Tables of earlier runs have no column for the episode: each sample was one.
    return row["group"], row["sample"] if row["episode"] is None else row["episode"]


def _item(sequences: Sequence[Mapping[str, Any]]) -> str:
    row = sequences[0]
    length = sum(one["length"] for one in sequences)
    turns = sum(max(len(one["turns"] or ()) - 1, 0) for one in sequences)
    facts = [
        f"step {row['step']}{', held out' * row['held_out']}",
        f"reward {show('reward', row['reward'])}",
        f"{length:,} tokens{', truncated' * (row['finish'] == 'length')}",
    ]
    if row["turns"]:
        facts.append(f"{turns:,} turn{'s' * (turns != 1)}, ended by {row['finish']}")
    if len(sequences) > 1:
        facts.append(f"{len(sequences)} sequences")
    if row["staleness"]:
        facts.append(f"staleness {row['staleness']}")
    if row["components"]:
        facts.append(row["components"])
    facts.append(row["prompt_id"])
    data = {name: row[name] for name in ("step", "reward", "staleness")} | {"length": length}
    data["turns"] = turns + bool(row["turns"])
    data["held"] = str(bool(row["held_out"])).lower()
    attributes = "".join(f' data-{name}="{escape(str(value))}"' for name, value in data.items())
    if len(sequences) > 1:
        body = episode_tree(sequences)
    else:
        body = f'<pre class="prompt">{_clipped(row["prompt"])}</pre>'
        body += transcript(row) if row["turns"] else f"<pre>{''.join(_pieces(row))}</pre>"
    return (
        f'<details class="completion"{attributes}><summary>{escape(" · ".join(facts))}'
        f'<span class="ending">{escape(_ending(row["completion"]))}</span></summary>'
        f"{body}</details>"
    )


def _pieces(row: Mapping[str, Any]) -> Sequence[str]:
    colours, left, parts = Colours(row), LONGEST, []
    for piece in row["pieces"]:
        text = piece["text"][:left]
        left -= len(text)
        parts.append(colours.span(piece, text))
    if len(row["completion"]) > LONGEST:
        parts.append(f"<i> … {len(row['completion']) - LONGEST:,} more characters</i>")
    return parts


def _ending(text: str) -> str:
    """The end of a completion on one line."""
    line = " ".join(text[-4 * ENDING :].split())
    return line if len(line) <= ENDING else f"… {line[-ENDING:]}"


def _clipped(text: str) -> str:
    left_out = len(text) - LONGEST
    return escape(text) if left_out <= 0 else f"<i>{left_out:,} characters before … </i>{escape(text[-LONGEST:])}"
