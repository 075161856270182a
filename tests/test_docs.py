"""The pages name settings, commands, files and objects that exist, and their links lead somewhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from april.algorithms.catalogue import ALGORITHMS
from april.algorithms.corrections import CORRECTIONS
from april.config.reading import load_recipe

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
REPORTS = sorted((DOCS / "reports").glob("*.md"))
GUIDE = [*sorted(DOCS.glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
INTEGRATIONS = sorted((DOCS / "integrations").glob("*.md"))
REFERENCE = sorted((DOCS / "reference").glob("*.md"))
OTHERS = [page for folder in ("benchmarks", "examples") for page in sorted((ROOT / folder).rglob("*.md"))]
PAGES = [*GUIDE, *INTEGRATIONS, *REFERENCE, *REPORTS, *OTHERS]

FOREIGN = {"num_speculative_tokens", "rejection_sample_method", "draft_model"}
"""Names of other projects, or of the user, on pages of the guide."""


def ids(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def spans(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))


@cache
def source_words() -> frozenset[str]:
    """All identifiers in april's source."""
    found: set[str] = set()
    for path in (ROOT / "src").rglob("*.py"):
        found.update(re.findall(r"\w+", path.read_text()))
    return frozenset(found)


@cache
def anchors(page: Path) -> frozenset[str]:
    """Anchors of a page's headings, as GitHub and mkdocs make them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return frozenset(re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip()) for title in titles)


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), target


@pytest.mark.parametrize("page", GUIDE, ids=ids(GUIDE))
def test_recipes_have_only_settings_and_values_that_exist(page: Path, tmp_path: Path) -> None:
    for block in blocks(page, "toml"):
        (tmp_path / "recipe.toml").write_text(block)
        load_recipe(tmp_path / "recipe.toml")


def test_algorithms_and_corrections_are_listed_completely() -> None:
    """The tables of the page name what a recipe can name."""
    rows = re.findall(r"^\|(.*?)\|(.*?)\|", (DOCS / "algorithms.md").read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", " ".join(row))}
    assert set(ALGORITHMS) | set(CORRECTIONS) <= named
    assert named <= set(ALGORITHMS) | set(CORRECTIONS) | {"algorithm", "correction"}


@pytest.mark.parametrize("page", GUIDE, ids=ids(GUIDE))
def test_names_in_code_type_exist(page: Path) -> None:
    """Names with an underscore, and names of classes, are in april's source."""
    for span in spans(page):
        variable = re.fullmatch(r"(?:[a-z]+\.)?([a-z]+(?:_[a-z0-9]+)+)(?: = .+)?", span)
        if match := variable or re.match(r"([A-Z][a-z]+[A-Z]\w+)", span):
            assert match[1] in source_words() | FOREIGN, span


@pytest.mark.parametrize("page", PAGES[: len(PAGES) - len(OTHERS)], ids=ids(PAGES[: len(PAGES) - len(OTHERS)]))
def test_files_and_objects_that_are_named_exist(page: Path) -> None:
    tests = {path.name for path in (ROOT / "tests").rglob("*.py")}
    for span in spans(page):
        if re.fullmatch(r"(?:src|tests|examples|scripts|benchmarks|docker)/[\w./-]*", span):
            assert (ROOT / span).exists(), span
        elif re.fullmatch(r"\w+\.py", span) and span.startswith(("test_", "crash_")):
            assert span in tests, span
    for name in re.findall(r"\bapril(?:\.[a-z_]\w*)+(?:[.:]\w+)?", page.read_text()):
        assert resolves(name), name


def resolves(name: str) -> bool:
    """Whether a dotted name is a module of april, or an object in one, by the source alone."""
    parts = re.split(r"[.:]", name)
    if parts[1] in ("over_sampling_batch_size", "max_staleness", "sh", "json"):  # settings of frameworks, files
        return True
    for length in range(len(parts), 0, -1):
        base = ROOT / "src" / Path(*parts[:length])
        file = base.with_suffix(".py") if base.with_suffix(".py").exists() else base / "__init__.py"
        if file.exists():
            return all(part in source_words() for part in parts[length:])
    return False


def commands(page: Path) -> Iterator[str]:
    for block in blocks(page, "sh"):
        yield from re.sub(r"\\\n", " ", block).splitlines()


@pytest.mark.parametrize("page", [*GUIDE, *INTEGRATIONS], ids=ids([*GUIDE, *INTEGRATIONS]))
def test_commands_and_their_flags_exist(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in commands(page):
        command = line.split("#")[0].strip()
        if match := re.match(r"make ([\w-]+)", command):
            assert match[1] in targets, line
        if match := re.match(r"(?:\S*/|.* -m )?april (\w+)", command):
            assert (ROOT / "src/april/commands" / f"{match[1]}.py").exists(), line
            for flag in re.findall(r"--([\w.-]+)", command.split(f"april {match[1]}", 1)[1]):
                name = flag.split(".")[-1].replace("-", "_").removeprefix("no_")
                assert name in source_words() | {"help"}, line
        for script in re.findall(r"(?:scripts|benchmarks|examples)/[\w./-]+", command):
            assert (ROOT / script).exists(), line


@pytest.mark.parametrize("page", [*GUIDE, *INTEGRATIONS], ids=ids([*GUIDE, *INTEGRATIONS]))
def test_python_of_pages_is_python(page: Path) -> None:
    for block in blocks(page, "python"):
        compile(block, page.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_pages_that_messages_name_exist() -> None:
    """A message or docstring that names a page, or a heading of one, names one that exists."""
    for folder in ("src", "tests", "benchmarks", "examples", "scripts"):
        for path in (ROOT / folder).rglob("*.py"):
            for page, title in re.findall(r"\b(docs/[\w/-]+\.md)(?:, ([A-Z]\w+))?", path.read_text()):
                assert (ROOT / page).exists(), f"{path}: {page}"
                assert not title or title.lower() in anchors(ROOT / page), f"{path}: {page}, {title}"


def test_the_site_lists_every_page() -> None:
    listed = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert listed == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} | {"contributing.md"}
