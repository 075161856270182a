from __future__ import annotations

import datetime
import json
import re

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from april.tasks.build import build_task
from april.tasks.encoding import Encoder
from april.tasks.records import hold_out
from april.tasks.task import Problem, TaskSpec
from tests import tiny

RECORDS = [{"prompt": f"{n} + {n}?", "answer": str(2 * n), "level": n % 3} for n in range(40)]


def write(path, records) -> str:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records) + "\n", encoding="utf-8")
    return str(path)


def task(path, **settings):
    return build_task(TaskSpec("records", path=str(path), **settings))


def problems(task, split="train") -> list[Problem]:
    return [task.problem(i, split) for i in range(len(task) if split == "train" else task.eval_size)]


def test_jsonl_and_parquet_give_the_same_problems(tmp_path):
    lines = write(tmp_path / "sums.jsonl", RECORDS)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), tmp_path / "sums.parquet", row_group_size=7)
    from_lines, from_parquet = task(lines), task(tmp_path / "sums.parquet")
    assert problems(from_lines) == problems(from_parquet)
    assert problems(from_lines, "eval") == problems(from_parquet, "eval")
    first = problems(from_lines)[0]
    assert (first.id, first.metadata.keys()) == ("sums:1", {"level"})


def test_records_are_scored_by_math_verify(tmp_path):
    sums = task(write(tmp_path / "sums.jsonl", RECORDS))
    problem = problems(sums)[3]
    assert sums.score(problem, f"It is \\boxed{{{problem.answer}.0}}.") == 1.0
    assert sums.score(problem, "It is \\boxed{-1}.") == 0.0


def test_columns_ids_and_nested_columns(tmp_path):
    row = {"uid": 7, "chat": [{"role": "user", "content": "hi"}], "reward_model": {"ground_truth": 5}, "kind": "x"}
    path = write(tmp_path / "a.jsonl", [row])
    only = task(
        path, prompt_column="chat", answer_column="reward_model.ground_truth", id_column="uid", system_prompt="Think."
    ).problem(0)
    assert (only.id, only.answer, only.question) == ("7", 5, "hi")
    assert only.prompt == [{"role": "system", "content": "Think."}, *row["chat"]]
    assert only.metadata == {"reward_model": {"ground_truth": 5}, "kind": "x"}


def test_parquet_values_without_a_json_type_become_text(tmp_path):
    table = pyarrow.table({"prompt": ["hi"], "answer": [4], "day": [datetime.date(2026, 1, 2)]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    only = task(tmp_path / "a.parquet").problem(0)
    assert (only.answer, only.metadata) == (4, {"day": "2026-01-02"})


def test_answers_may_be_missing_for_a_reward_function(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": "write a poem"}])
    poem = task(path, answer_column=None, reward="builtins:len").problem(0)
    assert poem.answer is None


GOOD = {"prompt": "p", "answer": "a"}


@pytest.mark.parametrize(
    ("lines", "settings", "message"),
    [
        ([GOOD, '{"prompt": "p", '], {}, "a.jsonl:2: not valid JSON"),
        ([GOOD, "", "[1]"], {}, "a.jsonl:3: a record must be a JSON object"),
        ([{"question": "q", "answer": "a"}], {}, "a.jsonl:1: prompt_column = 'prompt': .*'question', 'answer'"),
        ([GOOD, {"prompt": "p"}], {}, "a.jsonl:2: answer_column = 'answer'"),
        ([GOOD, {"prompt": "p", "answer": None}], {}, "a.jsonl:2: the answer in column 'answer' is empty"),
        ([GOOD, {"prompt": "  ", "answer": "a"}], {}, "a.jsonl:2: the prompt in column 'prompt' is empty"),
        ([{"prompt": [], "answer": "a"}], {}, "a.jsonl:1: the prompt in column 'prompt' is empty"),
        ([{"prompt": 5, "answer": "a"}], {}, "a.jsonl:1: the prompt in column 'prompt' must be text"),
        ([{"prompt": [{"role": "user"}], "answer": "a"}], {}, "a.jsonl:1: .* messages with role and content"),
        ([{**GOOD, "n": 1}, {**GOOD, "n": 1}], {"id_column": "n"}, "a.jsonl:2: the id '1' belongs to line 1 already"),
        ([GOOD], {"id_column": "n"}, "a.jsonl:1: id_column = 'n'"),
        ([{**GOOD, "n": None}], {"id_column": "n"}, "a.jsonl:1: the id in column 'n' is missing"),
        ([], {}, "there are no records"),
        ([GOOD], {"eval_size": 1}, "eval_size = 1: of 1 records some must be left"),
        ([GOOD, GOOD], {"eval_size": 1}, "no record is left to train on"),
        ([GOOD], {"answer_column": None}, "answer_column = None"),
    ],
)
def test_broken_files_are_named_by_file_and_line(tmp_path, lines, settings, message):
    with pytest.raises(ValueError, match=message):
        task(write(tmp_path / "a.jsonl", lines), **settings)


def test_bytes_that_are_no_text_are_named_by_file_and_line(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json.dumps(GOOD).encode() + b'\n{"prompt": "\xff\xfe\xff"}\n')
    with pytest.raises(ValueError, match=r"a.jsonl:2: not valid JSON"):
        task(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("name", "message"),
    [("none.jsonl", "there is no such file"), ("a.csv", "must end in .jsonl"), ("a.parquet", "not a Parquet file")],
)
def test_wrong_files_are_named(tmp_path, name, message):
    if name != "none.jsonl":
        write(tmp_path / name, [GOOD])
    with pytest.raises(ValueError, match=f"{re.escape(name)}.*{message}"):
        task(tmp_path / name)


@pytest.mark.parametrize(("eval_size", "count"), [(None, 4), (0, 0), (5, 5), (0.25, 10)])
def test_how_many_are_held_out(tmp_path, eval_size, count):
    sums = task(write(tmp_path / "sums.jsonl", RECORDS), eval_size=eval_size)
    assert (sums.eval_size, len(sums)) == (count, 40 - count)


def test_a_file_to_evaluate_on(tmp_path):
    train, held_out = write(tmp_path / "train.jsonl", RECORDS), write(tmp_path / "test.jsonl", RECORDS[:6])
    sums = task(train, eval_path=held_out)
    assert (len(sums), sums.eval_size) == (40, 6)
    assert [p.id for p in problems(sums, "eval")] == [f"test:{n}" for n in range(1, 7)]
    sums = task(train, eval_path=held_out, size=3, eval_size=2)
    assert (len(sums), sums.eval_size) == (3, 2)
    with pytest.raises(ValueError, match=r"eval_path = .*none.jsonl"):
        task(train, eval_path=str(tmp_path / "none.jsonl"))


@given(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=30), st.integers(0, 30), st.integers(0, 5))
def test_held_out_prompts_are_never_trained_on(prompts, count, seed):
    everything = [Problem(str(i), prompt) for i, prompt in enumerate(prompts)]
    train, held_out = hold_out(everything, min(count, len(prompts)), seed)
    assert len(held_out) == min(count, len(prompts))
    kept_out = {p.prompt for p in held_out}
    assert train == [p for p in everything if p.prompt not in kept_out]
    assert (train, held_out) == hold_out(everything, min(count, len(prompts)), seed)


def test_the_seed_chooses_the_held_out_problems(tmp_path):
    path = write(tmp_path / "sums.jsonl", RECORDS)
    chosen = [[p.id for p in problems(task(path, seed=seed), "eval")] for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1] != chosen[2]


@pytest.mark.parametrize(
    ("settings", "correct"),
    [
        ({"reward": "task"}, [False, True, True]),
        ({"reward": "math-verify", "correct_at": 0.5}, [True, True, True]),
        ({"reward": "statistics:mean"}, None),
        ({"reward": "statistics:mean", "correct_at": 2}, [False, False, True]),
    ],
)
def test_accuracy_exists_only_if_the_task_defines_correct(tmp_path, settings, correct):
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": "2 + 2?", "answer": "4"}) + "\n")
    task = build_task(TaskSpec("records", path=str(tmp_path / "data.jsonl"), eval_size=0, **settings))
    assert (task.correct and [task.correct(reward) for reward in (0.5, 1.0, 2.0)]) == correct


CARD = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files:
  - split: train
    path: socratic/train-*
---
# A data set in the layout of openai/gsm8k
"""


@pytest.fixture
def gsm8k(tmp_path, monkeypatch):
    """A directory with the layout, subsets, splits and columns of openai/gsm8k."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    directory = tmp_path / "gsm8k"
    for subset, split, count in (("main", "train", 6), ("main", "test", 3), ("socratic", "train", 2)):
        (directory / subset).mkdir(parents=True, exist_ok=True)
        rows = [{"question": f"{subset} {split} {i % 5}?", "answer": f"So {i}.\n#### {i}"} for i in range(count)]
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist(rows), directory / subset / f"{split}-00000-of-00001.parquet"
        )
    (directory / "README.md").write_text(CARD)
    return directory


def test_a_data_set_in_the_hubs_layout_by_subset_split_and_columns(gsm8k):
    columns = {"subset": "main", "prompt_column": "question", "unique_prompts": True}
    subject = task(gsm8k, eval_split="test", **columns)
    assert [subject.problem(i).prompt for i in range(len(subject))] == [f"main train {i}?" for i in range(5)]
    assert [subject.problem(i, "eval").id for i in range(subject.eval_size)] == ["gsm8k:1", "gsm8k:2", "gsm8k:3"]
    assert subject.score(subject.problem(4), "#### 4") == 1.0
    held_out = task(gsm8k, split="test", eval_size=1, **columns)
    assert (len(held_out), held_out.eval_size) == (2, 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"subset": "other"}, "subset = 'other'.*main.*socratic"),
        ({}, "subset = None.*(main|Config)"),
        ({"subset": "main", "split": "validation"}, "split = 'validation'.*(train|test)"),
        ({"subset": "main", "prompt_column": "problem"}, "prompt_column = 'problem': no such column.*'question'"),
    ],
)
def test_missing_parts_of_a_data_set_are_named(gsm8k, settings, message):
    with pytest.raises(ValueError, match=message):
        task(gsm8k, **settings)


def test_an_unreachable_hub_is_reported_in_one_line(monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"^path = .owner.nothing-of-that-name., subset = None") as caught:
        build_task(TaskSpec("records", path="owner/nothing-of-that-name"))
    assert "\n" not in str(caught.value)


def test_repeated_prompts_are_kept_by_default(tmp_path):
    path = write(tmp_path / "a.jsonl", ['{"prompt": "2 + 2?", "answer": "4"}'] * 3)
    assert len(task(path, eval_size=0)) == 3
    assert len(task(path, eval_size=0, unique_prompts=True)) == 1


def table(path, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def test_a_json_file_may_hold_an_array(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(RECORDS[:3], indent=2))
    array = task(tmp_path / "a.json", eval_size=0)
    assert [p.prompt for p in problems(array)] == [r["prompt"] for r in RECORDS[:3]]
    (tmp_path / "a.json").write_text('[{"prompt": "p", "answer": 1},\n {"prompt": "q"}]')
    with pytest.raises(ValueError, match=r"a.json:2: answer_column"):
        task(tmp_path / "a.json")
    (tmp_path / "a.json").write_text('[{"prompt": "p", "answer": 1},\n\n {"prompt": "q"')
    with pytest.raises(ValueError, match=r"a.json:3: not valid JSON"):
        task(tmp_path / "a.json")


def test_answers_keep_their_type(tmp_path):
    answers = [True, 1e-05, 2e16, [3, 4], {"x": 1}, "4"]
    path = write(tmp_path / "a.jsonl", [{"prompt": str(i), "answer": answer} for i, answer in enumerate(answers)])
    assert [p.answer for p in problems(task(path, eval_size=0))] == answers


BAD = [
    '{"prompt": "half a pair: \\ud83d", "answer": "1"}',
    '{"prompt": "no answer", "answer": ""}',
    '{"prompt": "no answer", "answer": "#### "}',
    '{"prompt": "no answer", "answer": NaN}',
    '{"prompt": "too much", "answer": 1e999}',
    '{"prompt": "p", "answer": "1", "level": 1e999}',
    '{"prompt": "p", "answer": "1", "level": "\\udc00"}',
    f'{{"prompt": "p", "answer": "1", "level": {"9" * 400}}}',
    f'{{"prompt": "p", "answer": "1", "level": {"[" * 600}{"]" * 600}}}',
    '{"prompt": ["p"], "answer": "1"}',
    '{"prompt": "p", "answer"',
    "[1]",
]


@pytest.mark.parametrize("line", BAD)
def test_a_bad_record_stops_the_run_before_its_start_or_is_omitted(tmp_path, caplog, line):
    path = write(tmp_path / "a.jsonl", [GOOD, line, GOOD])
    with pytest.raises(
        ValueError, match=r"a.jsonl:2: .* \(1 of 3 records cannot be used; task.on_bad_record = .skip."
    ) as e:
        task(path, eval_size=0)
    assert "\n" not in str(e.value)
    left = task(path, eval_size=0, on_bad_record="skip", reward="builtins:len" if "level" in line else "task")
    assert (len(left), left.skipped) == (2, 1)
    assert [left.place(p) for p in problems(left)] == [f"{path}:1", f"{path}:3"]
    assert "1 of 3 records are left out" in caplog.text


def test_a_file_of_bad_records_is_refused_with_any_setting(tmp_path):
    with pytest.raises(ValueError, match=r"a.jsonl:1: .* \(12 of 12 records cannot be used\)"):
        task(write(tmp_path / "a.jsonl", BAD), on_bad_record="skip")


def test_missing_values_of_tables_are_missing(tmp_path):
    path = table(tmp_path / "a.parquet", prompt=["p"], answer=["4"], level=[float("nan")])
    assert task(path).problem(0).metadata == {"level": None}


def test_binary_columns_are_text_or_refused(tmp_path):
    path = table(tmp_path / "a.parquet", prompt=[b"caf\xc3\xa9"], answer=[b"4"], image=[b"\x89PNG\xff"])
    with pytest.raises(ValueError, match=r"a.parquet:1: column 'image' holds bytes .* metadata_columns"):
        task(path)
    only = task(path, metadata_columns=()).problem(0)
    assert (only.prompt, only.answer, only.metadata) == ("café", "4", {})


def test_metadata_columns_that_no_record_has_are_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", [{**GOOD, "level": 1}, GOOD])
    assert [p.metadata for p in problems(task(path, metadata_columns=("level",)))] == [{"level": 1}, {}]
    with pytest.raises(ValueError, match=r"metadata_columns: no record of .* has 'levle'; there are 'answer', 'level'"):
        task(path, metadata_columns=("level", "levle"))


def test_the_system_prompt_does_not_replace_a_records_own(tmp_path, caplog):
    own = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    path = write(tmp_path / "a.jsonl", [{"prompt": own, "answer": "1"}, {"prompt": own[1:], "answer": "1"}])
    found = problems(task(path, eval_size=0, system_prompt="Think."))
    assert [p.prompt for p in found] == [own, [{"role": "system", "content": "Think."}, own[1]]]
    assert "system_prompt is not added to 1 of 2 conversations" in caplog.text


@pytest.mark.parametrize("levels", [98, 99])
def test_an_accepted_record_can_be_saved_as_a_prompt(tmp_path, levels):
    line = '{"prompt": "p", "answer": "1", "level": ' + "[" * levels + "]" * levels + "}"
    left = task(write(tmp_path / "a.jsonl", [GOOD, line]), eval_size=0, on_bad_record="skip")
    sealed = [Encoder(tiny.tokenizer())(problem).sealed() for problem in problems(left)]
    assert len(sealed) == (2 if levels == 98 else 1)
