"""Writes the table of clients in docs/agents.md from benchmarks/clients.json, which `make test-clients` makes."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- clients: begin -->\n", "<!-- clients: end -->\n"
SITUATIONS = (
    "tools",
    "two turns",
    "stream",
    "structured output",
    "sub-agent",
    "rewritten history",
    "held by training",
)


def table(results: dict[str, dict[str, bool]]) -> str:
    """Return the results as a table; a situation that was not tried has a dash."""
    marks = {True: "yes", False: "**no**", None: "–"}
    lines = [f"| client | {' | '.join(SITUATIONS)} |", f"|{'---|' * (len(SITUATIONS) + 1)}"]
    for client, found in results.items():
        lines.append(f"| {client} | {' | '.join(marks[found.get(name)] for name in SITUATIONS)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    page = ROOT / "docs" / "agents.md"
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    results = json.loads((ROOT / "benchmarks" / "clients.json").read_text())
    page.write_text(f"{before}{BEGIN}{table(results)}{END}{after}")


if __name__ == "__main__":
    main()
