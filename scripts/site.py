"""Additions of the documentation's site to the files of `docs/` (hooks of mkdocs).

Invariants:
- A relative link to a file outside `docs/` leads to a copy of that file, so that a figure and its JSON file stay
  together. A link to a missing file fails the build.
- The help of a command is the output of the command.
- A Mermaid diagram is shown as the SVG file that `scripts/diagrams.sh` drew from the same code, so that browsers load
  nothing from elsewhere. A drawing of other code fails the build.
- The page on contributing is CONTRIBUTING.md.
"""

from __future__ import annotations

import hashlib
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
MERMAID = re.compile(r"```mermaid\n(.*?)```", re.DOTALL)
HELP = re.compile(r"<!-- april ([a-z ]+) -->")
COPIED = {".json", ".jsonl", ".svg", ".png", ".toml", ".py"}


def on_files(files: Any, config: Any) -> Any:
    text = (ROOT / "CONTRIBUTING.md").read_text().replace("](docs/", "](")
    files.append(File.generated(config, "contributing.md", content=text))
    return files


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

    markdown = _diagrams(LINK.sub(link, markdown), page.file.src_uri)
    return HELP.sub(lambda match: f"```text\n{_help(match[1].split())}\n```", markdown)


def _diagrams(markdown: str, page: str) -> str:
    """Replace the code of Mermaid diagrams with their drawings."""
    count = 0

    def drawing(match: re.Match[str]) -> str:
        nonlocal count
        count += 1
        file = ROOT / "docs" / "images" / f"{Path(page).stem}-{count}.svg"
        first, _, svg = file.read_text().partition("\n") if file.exists() else ("", "", "")
        if hashlib.sha256(match[1].encode()).hexdigest() not in first:
            raise PluginError(f"{page}: {file.name} is not the drawing of diagram {count}; run scripts/diagrams.sh")
        return f'<div class="diagram">{svg.strip()}</div>'

    return MERMAID.sub(drawing, markdown)


def _help(command: list[str]) -> str:
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb", "PYTHONPATH": str(ROOT / "src")}
    run = [sys.executable, "-m", "april", *command, "--help"]
    return subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout.rstrip()
