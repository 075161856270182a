"""`april check`: a dry run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from april.commands import check
from tests import gpus, vision
from tests.commands.conftest import status


@pytest.fixture(autouse=True)
def _nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a dry run loads no weights and no tokenizer")

    monkeypatch.setattr("april.engines.pretrained.AutoModelForCausalLM.from_pretrained", refuse)
    monkeypatch.setattr("april.engines.pretrained.AutoTokenizer.from_pretrained", refuse)


@pytest.mark.parametrize("command", [("check",), ("cluster", "check")])
def test_a_context_that_does_not_fit_is_named(
    command: tuple[str, ...], recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("april.config.checking.find_spec", lambda name: True)  # Ray counts as installed
    cluster = ("--cluster.address", "10.0.0.1:6379")
    for flags, message in (
        (("--context-length", "4096"), "engine.context_length = 4096, but the model was configured for 512: lower it"),
        (("--max-response-length", "256"), "leaves no room for a prompt in a context of 256 tokens"),
    ):
        assert status(*command, str(recipe), *cluster, *flags) == 2
        assert message in capsys.readouterr().err


def test_a_dry_run_prints_devices_memory_engines_steps_and_data(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus.install(monkeypatch, 2)
    assert status("check", str(recipe), "--n-samples-per-prompt", "3") == 0
    printed = capsys.readouterr().out
    assert [line[:-1] for line in printed.splitlines() if not line.startswith(" ")] == [
        "devices",
        "model",
        "memory",
        "engines",
        "steps",
        "data",
    ]
    assert "trains and generates" in printed
    assert "unused" in printed
    assert printed.count(": fits") == 3
    assert "groups of G = 3" in printed
    assert "problems to train on" in printed


def test_a_machine_without_gpus_gets_no_verdict(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "visible_gpus", lambda: [])
    assert status("check", str(recipe)) == 0
    assert "no verdict: --gpus and --gpu-memory name the GPUs" in capsys.readouterr().out


def test_the_exit_status_reports_whether_the_run_fits(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("check", str(recipe), "--gpu-memory", "0.02")
    assert status(*arguments, "--gpus", "1") == 1
    assert "training does not fit the GPUs" in capsys.readouterr().err
    assert status(*arguments, "--gpus", "1", "--engine", "vllm") == 2
    assert "but training takes GPU 0" in capsys.readouterr().err
    assert status(*arguments) == 2
    assert "--gpus and --gpu-memory describe a machine together" in capsys.readouterr().err


def test_a_column_that_the_data_lacks_is_named(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps({"question": f"{i} + 1?", "answer": str(i + 1)}) + "\n" for i in range(1, 5))
    )
    task = ("--task.kind", "records", "--task.path", str(tmp_path / "data.jsonl"), "--task.reward", "math-verify")
    assert status("check", str(recipe), *task) == 2
    assert "prompt" in capsys.readouterr().err
    assert status("check", str(recipe), *task, "--task.prompt-column", "question", "--task.eval-size", "1") == 0
    assert "3 problems to train on, 1 held out; the first begins '" in capsys.readouterr().out


def test_a_missing_image_is_named_with_its_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "visible_gpus", lambda: [])
    vision.save(tmp_path / "policy")
    vision.picture(tmp_path / "a.png")
    rows = [{"prompt": "Is <image> like <image>?", "images": ["a.png", name], "answer": "no"} for name in "ab"]
    rows[0]["images"] = ["a.png", "a.png"]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "recipe.toml").write_text(
        '[model]\npath = "policy"\n[task]\nkind = "records"\npath = "data.jsonl"\nimage_column = "images"\n'
        "eval_size = 0\n[rollout]\nmax_response_length = 8\n[engine]\ncontext_length = 256\n"
    )
    assert status("check", str(tmp_path / "recipe.toml")) == 2
    assert f"data.jsonl:2: image {tmp_path / 'b'}: there is no such file" in capsys.readouterr().err
    assert status("check", str(tmp_path / "recipe.toml"), "--task.on-bad-record", "skip") == 0
    (tmp_path / "b").write_bytes(b"")
    assert status("check", str(tmp_path / "recipe.toml")) == 0
    assert "the first begins 'Is  like ?', with 2 images" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "found", "flags", "line"),
    [
        (
            "summary.json",
            {"resumed_prefill_share": 0.08},
            (),
            '"keep" would save about 0:08 of 1:40',
        ),
        (
            "profile.json",
            {"resumed_prefill_share": 0.08},
            (),
            '"keep" would save about 0:08 of 1:40',
        ),
        ("summary.json", {"resumed_prefill_share": 0.02}, (), "below 5%, so KV caches are not worth keeping"),
        ("summary.json", {"resumed_prefill_share": 0.08}, ("--on-update", "keep"), "took 8.0% of the engines' time in"),
        ("summary.json", {}, (), "only runs with automatic N' and profiles have one"),
        ("summary.json", {"resumed_prefill_share": 0.08}, ("--no-partial-rollout",), "no response is resumed"),
    ],
)
def test_an_earlier_run_or_profile_decides_whether_keep_is_advised(
    recipe: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    found: dict[str, float],
    flags: tuple[str, ...],
    line: str,
) -> None:
    measured = {**found, "rollout_seconds": 100.0}
    (tmp_path / name).write_text(json.dumps(measured if name == "summary.json" else {"recommended": measured}))
    note_recipe(tmp_path)
    assert status("check", str(recipe), "--run", str(tmp_path), *flags) == 0
    printed = capsys.readouterr().out
    assert line in printed
    assert ("would save" in printed) is ("would save" in line)


@pytest.mark.parametrize("share", [0.0, 0.08])
def test_a_run_that_kept_its_caches_cannot_tell_whether_that_is_worthwhile(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], share: float
) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"resumed_prefill_share": share, "rollout_seconds": 100.0}))
    note_recipe(tmp_path, "keep")
    assert status("check", str(recipe), "--run", str(tmp_path)) == 0
    printed = capsys.readouterr().out
    assert "cannot tell what keeping KV caches saves" in printed
    assert "worth" not in printed
    assert "would save" not in printed


def note_recipe(run: Path, on_update: str = "recompute") -> None:
    (run / "recipe.json").write_text(json.dumps({"engine": {"on_update": on_update}}))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "neither a finished run"),
        ("[]", "summary.json is not one that april wrote"),
        ('{"resumed_prefill_share": "most"}', "summary.json is not one that april wrote"),
        *(
            (f'{{"resumed_prefill_share": {share}, "rollout_seconds": {seconds}}}', "summary.json is not one")
            for share, seconds in [
                *((share, 100.0) for share in ("-0.1", "1.1", "8", "NaN", "Infinity", '"0.08"', "true", "[0.08]")),
                *((0.08, seconds) for seconds in ("0", "-1", "NaN", "Infinity", '"8"', "true", "[1]", "null")),
            ]
        ),
        ('{"resumed_prefill_share": 0.08, "rollout_seconds": 100}', "recipe.json is not one that april wrote"),
    ],
)
def test_a_directory_without_a_usable_run_is_refused(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "summary.json").write_text(content)
    assert status("check", str(recipe), "--run", str(tmp_path)) == 2
    printed = capsys.readouterr().err
    assert f"--run {tmp_path}: " in printed
    assert message in printed
    assert printed.count("\n") == 1
