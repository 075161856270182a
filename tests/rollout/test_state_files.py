"""A saved state with routes: what is read is what was written, and a damaged file is one line."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from april import Group, Prompt, SamplingParams
from april.rollout.state_files import (
    COMPARED,
    StateFileError,
    pack_state,
    read_state,
    routes_file,
    unpack_state,
    write_state,
)
from april.rollout.trajectory.routes import RouteRows, Routes

LAYERS, TOP_K = 3, 2


def of(values: list[int], dtype: type = np.uint8) -> Routes:
    return Routes(np.repeat(np.array(values, dtype), LAYERS * TOP_K).reshape(-1, LAYERS, TOP_K))


SAMPLES = st.lists(
    st.tuples(st.integers(0, COMPARED * 2 + 3), st.lists(st.integers(0, 2), max_size=4), st.booleans()), max_size=5
)


@given(SAMPLES)
def test_what_is_read_is_what_was_written(samples: list[tuple[int, list[int], bool]]) -> None:
    """Samples begin with the same rows, up to a length of their own."""
    prompt = (np.arange(COMPARED * 2 + 3) % 250).tolist()
    state = {
        "version": 3,
        "info": {"april.routes": "a text", "other": np.float32(0.5)},
        "samples": [
            {"routes": of(prompt[:shared] + own, np.uint16 if wide else np.uint8)} for shared, own, wide in samples
        ],
    }
    text, pieces = pack_state(state)
    content = b"".join(pieces)
    assert unpack_state(text, content, "routes") == state
    assert len(content) == 0 or "routes_file" in json.loads(text)


def test_rows_of_a_shared_prompt_are_written_once() -> None:
    prompt, row = list(range(200)), LAYERS * TOP_K
    text, pieces = pack_state({"all": [of([*prompt, *[sample] * 10]) for sample in range(8)]})
    assert sum(map(len, pieces)) == (200 + 8 * 10) * row
    again = unpack_state(text, b"".join(pieces), "routes")["all"]
    assert [list(routes.experts[:, 0, 0]) for routes in again] == [[*prompt, *[sample] * 10] for sample in range(8)]


def test_captured_rows_stay_while_their_sample_goes_on() -> None:
    sample = Group.start(0, Prompt((2, 3, 4)), 1, SamplingParams(100), 3).samples[0]
    sample.extend([5, 6], [-1.0, -1.0], 0)
    sample.route(RouteRows(0, of([1, 2, 3]).experts), 0, latest=True)
    captured = sample.to_dict()["routes"]
    sample.extend([7], [-1.0], 1)
    sample.route(RouteRows(3, of([4]).experts), 1, latest=True)
    again = sample.to_dict()["routes"]
    sample.route(RouteRows(0, of([9, 9, 9, 9]).experts), 1, latest=True)
    assert captured == of([1, 2, 3])
    assert again == of([1, 2, 3, 4])
    assert sample.routes == of([9, 9, 9, 9])


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[3] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, "missing: the routes of unfinished samples are in it"),
        (lambda file: file.write_bytes(b""), "missing: the routes of unfinished samples are in it"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "damaged: truncated"),
        (lambda file: file.write_bytes(file.read_bytes() + b"1"), "damaged: its checksum"),
        (_flip, "damaged: its checksum"),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path: Path, damage: Callable[[Path], Any], message: str) -> None:
    path = tmp_path / "april.json"
    state = {"samples": [of([1, 2, 3]), of([1, 2, 4])]}
    write_state(path, state)
    assert read_state(path) == state
    file = routes_file(path, path.read_text())
    assert file is not None
    damage(file)
    with pytest.raises(StateFileError, match=message) as error:
        read_state(path)
    assert str(error.value).startswith(f"{file}: ")
    assert len(str(error.value).splitlines()) == 1


def test_a_state_without_routes_replaces_one_with_routes(tmp_path: Path) -> None:
    write_state(tmp_path / "april.json", {"samples": [of([1, 2, 3])]})
    write_state(tmp_path / "april.json", {"samples": []})
    assert read_state(tmp_path / "april.json") == {"samples": []}
    assert [path.name for path in tmp_path.iterdir()] == ["april.json"]


CHANGES = ("open", "os.rename", "os.remove")
"""Audit events between which a write may be killed; files are opened to be written, and to be synchronised."""


@pytest.mark.parametrize("after", [[], [4, 5]])
def test_a_write_that_is_killed_leaves_the_old_state_or_the_new_one(tmp_path: Path, after: list[int]) -> None:
    path, old = tmp_path / "april.json", {"samples": [of([1, 2, 3])]}
    new = {"samples": [of(after)] if after else []}
    write_state(path, old)
    outcomes = []
    for survived in itertools.count():
        if (child := os.fork()) == 0:
            _kill_after(survived)
            write_state(path, new)
            os._exit(0)
        killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        outcomes.append(read_state(path) == new)
        assert outcomes[-1] or read_state(path) == old
        if not killed:
            break
        write_state(path, old)
    assert survived > 3
    assert outcomes[-1]
    assert not outcomes[0]
    assert len(list(tmp_path.iterdir())) == (2 if after else 1), "files of the old state are removed"


def _kill_after(changes: int) -> None:
    left = itertools.count(changes, -1)
    sys.addaudithook(lambda event, arguments: os._exit(9) if event in CHANGES and next(left) == 0 else None)


def test_a_state_without_routes_is_one_file(tmp_path: Path) -> None:
    write_state(tmp_path / "april.json", {"samples": []})
    assert [path.name for path in tmp_path.iterdir()] == ["april.json"]
    assert read_state(tmp_path / "april.json") == {"samples": []}
