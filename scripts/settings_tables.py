"""Writes the tables of settings on the integrations' pages from their rules (april.integrations.rules).

scripts/settings_tables.py [--check]    --check only compares, and fails if a page is not current
"""

from __future__ import annotations

import argparse
from pathlib import Path

from april.integrations.rules.catalogue import FRAMEWORKS
from april.integrations.rules.rule import table

PAGES = Path(__file__).parents[1] / "docs" / "integrations"
BEGIN, END = "<!-- settings: begin -->\n", "<!-- settings: end -->\n"


def page_with_table(framework: str) -> str:
    """Return the page of a framework with its current table.

    Raises:
        ValueError: the page does not mark the table's place.
    """
    before, begin, rest = (PAGES / f"{framework}.md").read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"docs/integrations/{framework}.md: no place for the table: add {BEGIN.strip()} {END.strip()}")
    rules = FRAMEWORKS[framework]
    return f"{before}{BEGIN}{table(rules.rules, rules.name)}{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    for framework in FRAMEWORKS:
        path, text = PAGES / f"{framework}.md", page_with_table(framework)
        if check and path.read_text() != text:
            raise SystemExit(f"{path}: the table is not current: python scripts/settings_tables.py")
        path.write_text(text)


if __name__ == "__main__":
    main()
