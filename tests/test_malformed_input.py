"""Recipes and data files with anything in them: an error that names the file, and never a crash."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import tempfile
import typing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from april.config.checking import check_recipe
from april.config.error import ConfigError
from april.config.reading import load_recipe
from april.config.recipe import Recipe
from april.tasks.records import read_records
from april.tasks.task import Problem, TaskSpec

GCD = (Path(__file__).parents[1] / "examples" / "gcd" / "recipe.toml").read_text()
SECTIONS = [field.name for field in dataclasses.fields(Recipe)]
SETTINGS = [(s, f.name) for s in SECTIONS for f in dataclasses.fields(getattr(Recipe(), s))]
VALUES = st.one_of(
    st.integers(),
    st.floats(),
    st.booleans(),
    st.text(max_size=8),
    st.just(10**400),
    st.lists(st.one_of(st.integers(), st.text(max_size=3)), max_size=3),
    st.dictionaries(st.sampled_from(["a", "path"]), st.integers(), max_size=2),
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=10)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["prompt", "answer", "id", "role", "content", "x.y"]), inner, max_size=4),
    ),
    max_leaves=8,
)


def load(content: bytes) -> Recipe | str:
    """Return the checked recipe in the bytes, or the problem with them."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "recipe.toml"
        path.write_bytes(content)
        try:
            recipe = load_recipe(path)
        except ConfigError as error:
            wrong = str(error)
        else:
            try:
                check_recipe(recipe)
            except ConfigError as error:
                return str(error)
            return recipe
        assert str(path) in wrong, "the file is named"
        return wrong


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value).replace("Infinity", "inf").replace("NaN", "nan")


@given(st.binary(max_size=200))
@example(b"\xff\xfe[model]")
@example(b"model = 3")
@example(b"[model]\npath = 3")
@settings(max_examples=200, deadline=None)
def test_a_recipe_of_any_bytes(content: bytes) -> None:
    load(content)


@given(st.integers(0, len(GCD) - 1), st.integers(0, 20), st.text(max_size=6))
@settings(max_examples=200, deadline=None)
def test_a_recipe_with_a_slip_anywhere(position: int, removed: int, inserted: str) -> None:
    load((GCD[:position] + inserted + GCD[position + removed :]).encode(errors="surrogatepass"))


@given(st.sampled_from(SETTINGS), VALUES)
@example(("trainer", "policy_replicas"), 0)
@example(("trainer", "context_parallel"), 0)
@example(("trainer", "tensor_parallel"), 0)
@example(("trainer", "expert_parallel"), 0)
@example(("training", "learning_rate"), float("nan"))
@example(("training", "learning_rate"), float("inf"))
@example(("training", "journal_flush_seconds"), float("nan"))
@example(("training", "steps"), 10**400)
@example(("algorithm", "correction_high"), -1)
@example(("model", "path"), "0")
@example(("model", "path"), "x" * 5000)
@example(("task", "path"), "x" * 5000)
@settings(max_examples=300, deadline=None)
def test_a_recipe_with_any_value_for_any_setting(setting: tuple[str, str], value: Any) -> None:
    section, name = setting
    found = load(f"[{section}]\n{name} = {toml(value)}\n".encode(errors="surrogatepass"))
    assert isinstance(found, str) or setting == ("model", "path"), "the model's path is missing at the least"
    if isinstance(value, float) and value != value:
        assert name in found, "no setting is allowed to be no number"


EXTREMES = {
    bool: (True,),
    int: (0, -1, 2**63 - 1, 10**400),
    float: (0.0, 5e-324, 1e308, 1e10, float("inf"), float("nan")),
    str: ("", "x" * 5000, "\0", "../..", "a:b", "http://["),
    list: ([], [10**400], [float("nan")], ["\0"]),
    dict: ({}, {"a": {"b": [1]}}, {"a": float("inf")}),
}
"""Values at the edge of each type."""


@pytest.mark.parametrize("section", SECTIONS)
def test_extreme_values_of_every_type_for_every_setting(section: str) -> None:
    """A value is accepted, or refused by name."""
    for field in dataclasses.fields(getattr(Recipe(), section)):
        for value in itertools.chain.from_iterable(EXTREMES.values()):
            found = load(f"[{section}]\n{field.name} = {toml(value)}\n".encode())
            if isinstance(value, bool) and not _takes_a_boolean(getattr(Recipe(), section), field.name):
                assert isinstance(found, str)
                assert f"{section}.{field.name}" in found, f"{value} is no number and no text"


def _takes_a_boolean(section: object, name: str) -> bool:
    return "bool" in str(typing.get_type_hints(type(section))[name])


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"[training]\nsteps = true\n", ":2: training.steps = True: Input should be a valid integer"),
        (b"[training]\nlearning_rate = true\n", ":2: training.learning_rate = True: Input should be a valid number"),
        (b"[training]\nbetas = [0.9, true]\n", ":2: training.betas.1 = True: Input should be a valid number"),
        (b'[training]\nsteps = "3"\n', ":2: training.steps = '3': Input should be a valid integer"),
        (
            b'[task]\nkind = "reasoning_gym"\nname = "gcd"\neval_size = inf\n',
            "task.eval_size = inf: must be from 0 to 1,000,000",
        ),
        (
            b"[training]\njournal_flush_seconds = 1e10\n",
            "training.journal_flush_seconds = 10000000000.0: must be seconds",
        ),
        (b"[training]\nsteps = " + b"9" * 5000, "no valid TOML: Exceeds the limit (4300 digits)"),
        (b"[training]\nbetas = " + b"[" * 3000, "no valid TOML: maximum recursion depth"),
        (b"\xef\xbb\xbf[training]\nsteps = 0\n", "training.steps = 0: must be positive"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_name(content: bytes, problem: str) -> None:
    assert problem in load(content)


def read(content: bytes, spec: TaskSpec, suffix: str = ".jsonl") -> list[Problem] | str:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / f"data{suffix}"
        path.write_bytes(content)
        try:
            return read_records(str(path), spec).problems
        except ValueError as error:
            wrong = str(error)
        assert str(path) in wrong, "the file is named"
        return wrong


SPEC = TaskSpec("records", path="data.jsonl")


@given(st.binary(max_size=200), st.sampled_from([".jsonl", ".json", ".parquet"]))
@example(b'{"prompt": "\xff", "answer": "1"}', ".jsonl")
@example(b"PAR1", ".parquet")
@example(b"[" * 100_000, ".jsonl")
@settings(max_examples=200, deadline=None)
def test_a_data_file_of_any_bytes(content: bytes, suffix: str) -> None:
    read(content, SPEC, suffix)


@given(st.lists(JSON, max_size=4), st.sampled_from(["prompt", "x.y", "prompt.content"]))
@example([{"prompt": "\ud800", "answer": "1"}], "prompt")
@example([{"prompt": [{"role": "user", "content": "a"}, 3], "answer": "1"}], "prompt")
@settings(max_examples=300, deadline=None)
def test_records_of_any_shape(records: list[Any], column: str) -> None:
    spec = dataclasses.replace(copy.copy(SPEC), prompt_column=column)
    content = "\n".join(json.dumps(record) for record in records).encode()
    found = read(content, spec)
    if isinstance(found, list):
        assert len(found) == len(records)
        assert all(problem.question.strip() for problem in found)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_a_parquet_file_with_damage_anywhere(parquet: bytes, data: st.DataObject) -> None:
    content = bytearray(parquet)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    read(bytes(content), SPEC, ".parquet")


@pytest.fixture(scope="module")
def parquet(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    import pyarrow
    from pyarrow import parquet

    path = tmp_path_factory.mktemp("parquet") / "data.parquet"
    parquet.write_table(pyarrow.table({"prompt": ["1+1=", "2+2="], "answer": ["2", "4"]}), path)
    return path.read_bytes()
