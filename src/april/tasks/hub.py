"""Records of a data set on the Hugging Face hub, or of a directory in the hub's layout.

A data set is a name, `openai/gsm8k`, or a directory that holds what one on the hub does: data files, and a README.md
whose head may list the files of each subset and split.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from april.extras import install_command
from april.images.source import undecoded

FILES = (".jsonl", ".json", ".parquet")
"""Endings of paths that are single files."""
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def path_problem(path: str) -> str | None:
    """Return the problem with the path of records, as far as it shows without a network; None if there is none."""
    if path.lower().endswith(FILES):
        return None if os.path.isfile(path) else "there is no such file"
    if os.path.isfile(path):
        return f"must end in {', '.join(FILES)}"
    if not os.path.isdir(path) and not HUB_NAME.fullmatch(path):
        return "there is no such file or directory, and data sets of the hub are named owner/name"
    if find_spec("datasets") is None:
        return f"data sets of the hub need the library datasets: {install_command('hub')}"
    return None


def read_dataset(path: str, subset: str | None, split: str, setting: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Row number, counted from 1, and record of every row.

    Raises:
        ValueError: the data set, the subset or the split is not there, or the hub cannot be reached.
    """
    import datasets

    datasets.disable_progress_bars()
    try:
        rows = undecoded(datasets.load_dataset(path, subset, split=split))
    except Exception as error:  # of four libraries, none of them ours: each means that there is no data
        reason = " ".join(str(error).split())
        raise ValueError(f"{setting} = {path!r}, subset = {subset!r}, split = {split!r}: {reason}") from None
    yield from enumerate(rows, 1)
