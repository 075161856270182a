"""Size and language of the source tree: lines, functions, comments, words of documents, and phrases to avoid.

    python benchmarks/codebase.py                  # this tree
    python benchmarks/codebase.py --commit 5809427 # an earlier commit

Prints one JSON object. `codebase.json` holds the figures before and after each restructuring of November 2026.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import statistics
import subprocess
import tarfile
import tempfile
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PHRASES = (
    r"\b(what|whatever) (is|was|are|were|came|comes|it|they|has|had|can|goes|an? \w+ (is|was|says|does))\b",
    r"\b(says?|said|told|tells?|asks?|hears?)\b",
    r"\b(go|goes|went|going) on\b",
    r"\bunder way\b",
    r"\b(whoever|whom|somebody|someone|nobody|anybody|who (has|is|was|had|waits|wants))\b",
    r"\b(so|as) (many|much|few)\b",
    r"\b(anew|beside|besides|thereby|therein|whereby|meanwhile)\b",
    r"\b(that|those) of\b",
)
"""Turns of phrase that name no subject, or that are not the field's."""
TESTS = ("tests", "benchmarks", "examples")
"""Folders whose prose is counted apart from the source's."""
LONG_FILE = 450
"""Lines above which a file needs a reason."""


def prose(source: str) -> Iterator[str]:
    """Yield the docstrings and comments of a Python file."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        docstring = token.type == tokenize.STRING and token.string.lstrip("rRbBfFuU").startswith('"""')
        if token.type == tokenize.COMMENT or docstring:
            yield token.string


def phrases(text: str) -> dict[str, float]:
    """Return the number of words, and of phrases for each 1,000 words."""
    words = len(re.findall(r"[A-Za-z']+", text))
    hits = sum(len(re.findall(pattern, text, re.IGNORECASE)) for pattern in PHRASES)
    return {"words": words, "phrases_per_1000_words": round(1000 * hits / max(words, 1), 1)}


def figures(root: Path) -> dict[str, Any]:
    """Return the figures of a source tree."""
    files = {path: path.read_text() for path in sorted((root / "src").rglob("*.py"))}
    lengths = [
        node.end_lineno - node.lineno + 1
        for text in files.values()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
    ]
    tests = [path.read_text() for folder in TESTS for path in sorted((root / folder).rglob("*.py"))]
    documents = sorted((root / "docs").rglob("*.md"))
    guide = [path for path in documents if "reports" not in path.parts]
    counted = [*documents, root / "README.md", root / "CONTRIBUTING.md"]
    return {
        "source_lines": sum(len(text.splitlines()) for text in files.values()),
        "source_files": len(files),
        "files_over_450_lines": [
            str(path.relative_to(root)) for path, text in files.items() if len(text.splitlines()) > LONG_FILE
        ],
        "functions": len(lengths),
        "median_function_lines": statistics.median(lengths),
        "functions_over_60_lines": sum(length > 60 for length in lengths),
        "comment_lines": sum(line.lstrip().startswith("#") for text in files.values() for line in text.splitlines()),
        "source": phrases("\n".join(part for text in files.values() for part in prose(text))),
        "tests": phrases("\n".join(part for text in tests for part in prose(text))),
        "test_names": phrases("\n".join(name for text in tests for name in _test_names(text))),
        "documents": phrases("\n".join(_text(path) for path in counted if path.exists())),
        "guide_words": sum(len(_text(path).split()) for path in guide),
        "report_words": sum(len(_text(path).split()) for path in documents if path not in guide),
    }


def _test_names(text: str) -> Iterator[str]:
    for name in re.findall(r"def test_(\w+)", text):
        yield name.replace("_", " ")


def _text(path: Path) -> str:
    """Return a Markdown file without its code blocks."""
    return re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", help="count the tree of this commit")
    commit = parser.parse_args().commit
    if commit is None:
        found = figures(ROOT)
    else:
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
        with tempfile.TemporaryDirectory() as folder:
            with tarfile.open(fileobj=io.BytesIO(archive)) as tree:
                tree.extractall(folder, filter="data")
            found = {"commit": commit, **figures(Path(folder))}
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
