"""What the documentation's site adds to the files of `docs/` (hooks of mkdocs).

Invariants:
- a relative link to a file outside `docs/` leads to a copy of that file, so that a figure and its JSON stay
  together; a link to a file that is not there fails the build;
- the help of a command is what the command prints.
"""

from __future__ import annotations

import os
import posixpath
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(!?)\[([^\]]*)\]\((\.\.?/[^)#\s]+)(#[^)\s]*)?\)")
HELP = re.compile(r"<!-- april ([a-z ]+) -->")
COPIED = {".json", ".jsonl", ".svg", ".png", ".toml", ".py"}


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    folder = posixpath.dirname(page.file.src_uri)

    def link(match: re.Match[str]) -> str:
        picture, text, target, anchor = match[1], match[2], match[3], match[4] or ""
        path = posixpath.normpath(posixpath.join("docs", folder, target))
        if path.startswith("docs/"):
            return match[0]
        if not (ROOT / path).exists():
            raise PluginError(f"{page.file.src_uri}: links to {target}, which is not there")
        if Path(path).suffix not in COPIED:
            return f"{text} (`{path}`)" if text != path else f"`{path}`"
        copy = f"files/{path}"
        if files.get_file_from_path(copy) is None:
            files.append(File.generated(config, copy, abs_src_path=str(ROOT / path)))
        return f"{picture}[{text}]({posixpath.relpath(copy, folder or '.')}{anchor})"

    return HELP.sub(lambda match: f"```text\n{_help(match[1].split())}\n```", LINK.sub(link, markdown))


def _help(command: list[str]) -> str:
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb", "PYTHONPATH": str(ROOT / "src")}
    run = [sys.executable, "-m", "april", *command, "--help"]
    return subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout.rstrip()
