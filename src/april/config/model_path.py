"""Checks of `model.path`: a directory with a model and its tokenizer, or a name on the Hugging Face hub.

Invariant: a value that can be neither is refused from its spelling and the local disk; only valid hub names are looked
up on the hub.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from difflib import get_close_matches

PART = r"(?=[\w.-]{1,96}(?:/|$))\w(?:[\w.-]*\w)?"
HUB_NAME = re.compile(rf"(?:{PART}/)?{PART}", re.ASCII)
"""`owner/name`, or `name` alone for the oldest models of the hub."""
TOKENIZERS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
)
"""Files of which any one indicates a tokenizer."""


def model_path_problem(path: str, loads: bool = True) -> str | None:
    """Return an error message about `model.path`, or None.

    Args:
        loads: whether model and tokenizer are needed; otherwise the model's configuration suffices.
    """
    if not path:
        return "model.path is not set: name a Hugging Face model, as a directory or a hub name"
    problem = _directory_problem(path, loads) if os.path.isdir(os.path.expanduser(path)) else _name_problem(path)
    return f"model.path = {path!r}: {problem}" if problem else None


def _directory_problem(path: str, loads: bool) -> str | None:
    files = os.listdir(os.path.expanduser(path))
    if "config.json" not in files:
        return "there is no config.json in this directory: name one that save_pretrained wrote"
    if loads and not set(files) & set(TOKENIZERS):
        return (
            "this directory has a model but no tokenizer: save the tokenizer of its base model there, with "
            f"AutoTokenizer.from_pretrained(...).save_pretrained({path!r})"
        )
    return None


def _name_problem(path: str) -> str | None:
    owner, slash, name = path.rpartition("/")
    if path.startswith((".", "/", "~")) or "/" in owner or (slash and os.path.isdir(owner)):
        return f"no such directory{_hint(owner or '.', name)}"
    if not HUB_NAME.fullmatch(path) or re.search(r"--|\.\.|\.git$", path):
        return "neither an existing directory nor a hub name (owner/name)"
    hint = "" if slash else _hint(".", name)
    return f"no such directory{hint}" if hint else None


def _hint(folder: str, name: str) -> str:
    """Return a hint with the directory in `folder` whose name is most similar to `name`; empty if none is."""
    near = get_close_matches(name, _directories(folder), n=1, cutoff=0.8)
    return f"; did you mean {os.path.join(folder, near[0])}?" if near else ""


def _directories(folder: str) -> Iterator[str]:
    try:
        with os.scandir(os.path.expanduser(folder)) as entries:
            yield from (entry.name for entry in entries if entry.is_dir())
    except OSError:
        return
