"""Starting a server by hand, with the commands of docs/engines.md."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "engines.md"


def documented(title: str, model: Path, python: Path) -> tuple[dict[str, str], list[str]]:
    """The environment and the command under the comment that begins with `title`, for this model and interpreter."""
    block = re.search(
        rf"^# {re.escape(title)}\b[^\n]*\n(.*?)\n(\n|```)", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE
    )
    assert block, f"{DOCUMENT} has no command for {title!r}"
    words = shlex.split(block[1].replace("\\\n", " "))
    start = words.index("python")
    filled = {"python": str(python), "DIR": str(model)}
    return _variables(words[:start]), [filled.get(word, word) for word in words[start:]]


def _variables(words: Sequence[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in words)
