"""`april train` on a recipe, records, a chat template or a model folder with anything in them, to its second step.

Only three ends are accepted: success, perhaps with records that were skipped and counted; or a message of april's own,
after which `april resume` works or gives such a message too. Never a traceback, and never a hang.

`make test-mutations` tries 600 examples and records their counts; CI tries a few.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from april.config.recipe import Recipe
from tests import forked, tiny
from tests.limits import HANG
from tests.test_malformed_input import JSON, VALUES, toml

EXAMPLES = int(os.environ.get("APRIL_MUTATIONS", "24"))
COUNTS = os.environ.get("APRIL_MUTATION_COUNTS")
"""A file that gets the counts of each kind of end, as JSON."""
RECIPE = """
[model]
path = "policy"
[task]
kind = "records"
path = "data.jsonl"
[rollout]
rollout_batch_size = 2
over_sampling_batch_size = 4
n_samples_per_prompt = 2
max_response_length = 6
reward_workers = 0
[engine]
max_num_seqs = 8
context_length = 256
[training]
steps = 2
threads = 1
eval_interval = 0
[reporting]
output = "run"
trackers = []
"""
TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
RECORDS = [{"prompt": [{"role": "user", "content": f"{n} + 1 ="}], "answer": str(n + 1)} for n in range(12)]
FIXED = ("threads", "steps", "processes", "reward_workers", "output", "device")
"""Settings that decide how long a run takes, or which device and folder it has."""
SECTIONS = [field.name for field in dataclasses.fields(Recipe) if field.name not in ("cluster", "trainer")]
SETTINGS = [
    (section, field.name)
    for section in SECTIONS
    for field in dataclasses.fields(getattr(Recipe(), section))
    if field.name not in FIXED
]
INTEGERS = st.one_of(st.integers(0, 9), st.sampled_from([-1, 64, 10**6, 2**31, 2**63]))
FLOATS = st.one_of(st.floats(0, 2), st.sampled_from([-1.0, 1e-30, 1e4, 1e12, 1e38, 1e300]))


def of_type(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a setting's own type, most of them possible."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return of_type(arguments[0])
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (Union, UnionType):
        return st.one_of(*(of_type(argument) for argument in arguments if argument is not NoneType))
    if origin is tuple:
        return st.lists(of_type(arguments[0]), max_size=2)
    plain = {bool: st.booleans(), int: INTEGERS, float: FLOATS, str: st.text(max_size=4)}
    return plain.get(hint, VALUES)


TYPES = {
    (section, name): hint
    for section in SECTIONS
    for name, hint in get_type_hints(type(getattr(Recipe(), section)), include_extras=True).items()
}


@st.composite
def settings_of_a_type(draw: st.DrawFn) -> tuple[tuple[str, str], Any]:
    setting = draw(st.sampled_from(SETTINGS))
    return setting, draw(of_type(TYPES[setting]))


TEMPLATES = [
    "{{ raise_exception('System role not supported') }}",
    "{% for m in messages %}{% if m['role'] != 'user' %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ m['content'] }}{% endfor %}",
    "{% for m in messages %}{{ m['content'] }}",
    "{{ messages[0]['content']['text'] }}",
    "{{ undefined_function() }}",
    "{{ messages[9]['content'] }}",
    "",
    "{{ 1 / 0 }}",
]


@dataclass(frozen=True)
class Mutation:
    """A change of one of the four things that a user brings."""

    kind: str
    what: Any

    def apply(self, folder: Path) -> None:
        getattr(self, f"_{self.kind}")(folder)

    def _recipe(self, folder: Path) -> None:
        (section, name), value = self.what
        lines = RECIPE.splitlines()
        lines = [line for line in lines if not line.startswith(f"{name} = ")]
        head = f"[{section}]"
        if head not in lines:
            lines.append(head)
        lines.insert(lines.index(head) + 1, f"{name} = {toml(value)}")
        (folder / "recipe.toml").write_text("\n".join(lines), errors="surrogatepass")

    def _slip(self, folder: Path) -> None:
        position, removed, inserted = self.what
        text = RECIPE[:position] + inserted + RECIPE[position + removed :]
        (folder / "recipe.toml").write_bytes(text.encode(errors="surrogatepass"))

    def _records(self, folder: Path) -> None:
        lines = [json.dumps(record) for record in RECORDS]
        for position, record in self.what:
            lines[position] = json.dumps(record)
        (folder / "data.jsonl").write_text("\n".join(lines))

    def _fields(self, folder: Path) -> None:
        records: list[dict[str, Any]] = [dict(record) for record in RECORDS]
        for position, name, value in self.what:
            records[position][name] = value
        (folder / "data.jsonl").write_text("\n".join(map(json.dumps, records)))

    def _data(self, folder: Path) -> None:
        _damage(folder / "data.jsonl", *self.what)

    def _template(self, folder: Path) -> None:
        (folder / "policy" / "chat_template.jinja").write_text(self.what)

    def _model(self, folder: Path) -> None:
        names = sorted(path.name for path in (folder / "policy").iterdir())
        index, how = self.what
        _damage(folder / "policy" / names[index % len(names)], *how)

    def _config(self, folder: Path) -> None:
        file, name, value = self.what
        path = folder / "policy" / file
        config = json.loads(path.read_text())
        names = sorted(config)
        config[names[name % len(names)]] = value
        path.write_text(json.dumps(config))


def _damage(path: Path, how: str, position: float, byte: int) -> None:
    content = bytearray(path.read_bytes())
    at = int(position * (len(content) - 1))
    if how == "delete":
        path.unlink()
    elif how == "truncate":
        path.write_bytes(content[:at])
    else:
        content[at] ^= byte
        path.write_bytes(content)


DAMAGE = st.tuples(st.sampled_from(["delete", "truncate", "flip"]), st.floats(0, 1), st.integers(1, 255))
POSITIONS = st.integers(0, len(RECORDS) - 1)
FIELDS = st.sampled_from(["prompt", "answer", "id", "messages", "role"])
FILES = st.sampled_from(["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
MUTATIONS = st.one_of(
    st.builds(Mutation, st.just("recipe"), settings_of_a_type()),
    st.builds(Mutation, st.just("recipe"), st.tuples(st.sampled_from(SETTINGS), VALUES)),
    st.builds(
        Mutation, st.just("slip"), st.tuples(st.integers(0, len(RECIPE)), st.integers(0, 12), st.text(max_size=6))
    ),
    st.builds(Mutation, st.just("records"), st.lists(st.tuples(POSITIONS, JSON), min_size=1, max_size=4)),
    st.builds(Mutation, st.just("fields"), st.lists(st.tuples(POSITIONS, FIELDS, JSON), min_size=1, max_size=4)),
    st.builds(Mutation, st.just("data"), DAMAGE),
    st.builds(Mutation, st.just("template"), st.one_of(st.sampled_from(TEMPLATES), st.text(max_size=20))),
    st.builds(Mutation, st.just("model"), st.tuples(st.integers(0, 9), DAMAGE)),
    st.builds(Mutation, st.just("config"), st.tuples(FILES, st.integers(0, 60), JSON)),
)
ENDS: Counter[tuple[str, str]] = Counter()


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tiny.save(tmp_path_factory.mktemp("mutations") / "policy")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    yield folder
    if COUNTS:
        counts = {f"{kind}: {end}": count for (kind, end), count in sorted(ENDS.items())}
        Path(COUNTS).write_text(json.dumps({"examples": sum(ENDS.values()), "ends": counts}, indent=2) + "\n")


def orderly(command: subprocess.CompletedProcess[str]) -> bool:
    """Return whether a command succeeded, or failed with a message of april's own and no traceback."""
    printed = command.stdout + command.stderr
    if "Traceback (most recent call last)" in printed:
        return False
    named = any(line.startswith("april: ") for line in printed.splitlines())
    return command.returncode == 0 or (command.returncode in (1, 2, 130) and named)


def try_out(mutation: Mutation | None, policy: Path) -> str:
    """How a run with the mutation ends: trained, refused, resumed or stopped."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        folder = Path(directory)
        shutil.copytree(policy, folder / "policy")
        (folder / "recipe.toml").write_text(RECIPE)
        (folder / "data.jsonl").write_text("\n".join(map(json.dumps, RECORDS)))
        if mutation is not None:
            mutation.apply(folder)
        trained = forked.run("train", "recipe.toml", cwd=folder, timeout=HANG)
        assert orderly(trained), f"{mutation}: {trained}"
        if trained.returncode == 0:
            return "trained"
        if not (folder / "run").exists():
            return "refused"
        resumed = forked.run("resume", "run", cwd=folder, timeout=HANG)
        assert orderly(resumed), f"resume after {mutation}: {resumed}"
        return "resumed" if resumed.returncode == 0 else "stopped"


def test_without_a_mutation_it_trains(policy: Path) -> None:
    assert try_out(None, policy) == "trained"


@given(mutation=MUTATIONS)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
def test_any_input_ends_in_success_or_in_a_clear_message(policy: Path, mutation: Mutation) -> None:
    ENDS[mutation.kind, try_out(mutation, policy)] += 1
