"""The scan of launch scripts, on a checkout with made scripts; nothing is run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from benchmarks.launch_scripts import scan as scanner
from benchmarks.launch_scripts.shell_reader import ShellScript


def commands(folder: Path, text: str) -> list[list[str]]:
    path = folder / "run.sh"
    path.write_text(text)
    return ShellScript(path).commands


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("echo a 'b c' \"d e\" f\\ g", ["a", "b c", "d e", "f g"]),
        ("N=4; M=$((N * 2 + 1))\necho $M n=${N}", ["9", "n=4"]),
        ("echo ${N:-7} ${N:=8} $N ${K:-}end", ["7", "8", "8", "end"]),
        ("A='x y'\necho $A \"$A\" '$A'", ["x", "y", "x y", "$A"]),
        (
            'A=(\n  --one 1 # a note\n  # --two 2\n  "three 3"\n)\nA+=(4)\necho ${A[@]}',
            ["--one", "1", "three", "3", "4"],
        ),
        ('A=(1 "2 3")\necho "${A[@]}" $@ "$@"', ["1", "2 3"]),
        ("echo a \\\n  b # c\n# echo d", ["a", "b"]),
        ("echo $(rm -rf / | wc -l) `rm -rf /`x", ["unknown", "unknownx"]),
        ("echo $((2 * $(nproc)))", ["unknown"]),
        ('A={\\"a\\":\\ 1}\necho "$A" "{\\"b\\": 2}" \'["c"]\'', ['{"a": 1}', '{"b": 2}', '["c"]']),
        (
            "E=sglang\nif [ $E = vllm ]; then\n  X=1\nelif [ $E == sglang ]; then\n  X=2\nelse\n  X=3\nfi\necho $X",
            ["2"],
        ),
        ("if [ -z $UNSET ]; then\n  X=1\nelse\n  X=2\nfi\necho $X", ["1"]),
        ("E=b\ncase $E in\n  a) X=1 ;;\n  b|c)\n    X=2\n    Y=3 ;;\n  *) X=4 ;;\nesac\necho $X $Y", ["2", "3"]),
        ("export A=1 B=2\nlocal C=3\nset -x; echo $A$B$C && true", ["123"]),
    ],
)
def test_words_of_a_command_are_those_that_bash_makes(tmp_path: Path, text: str, words: list[str]) -> None:
    found = [command[1:] for command in commands(tmp_path, text) if command[0] == "echo"]
    assert found == [words]


def test_other_files_are_read_where_they_are_sourced(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "small.sh").write_text("MODEL=(--layers 2)\n")
    text = (
        'HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"\nsource "$HERE/models/small.sh"\necho ${MODEL[@]}'
    )
    assert commands(tmp_path, text)[-1] == ["echo", "--layers", "2"]


@pytest.mark.parametrize("text", ["echo 'open", 'echo "open', "A=(1 2", "echo ${A", "echo $(a", "fi\nesac\n;;\n", "\\"])
def test_an_incomplete_script_is_read_as_far_as_it_goes(tmp_path: Path, text: str) -> None:
    commands(tmp_path, text)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    scripts = {
        "examples/math/run.sh": "ALGO=grpo\n"
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=$ALGO \\\n  data.n=1 $@",
        "examples/remax/run.sh": "ALGO=remax\npython3 -m verl.trainer.main_ppo algorithm.adv_estimator=$ALGO",
        "examples/moe/run.sh": "A=(algorithm.adv_estimator=remax\n"
        "  actor_rollout_ref.rollout.disaggregation.enabled=True)\n"
        'ray job submit --address=x -- python3 -m verl.trainer.main_ppo "${A[@]}"',
        "examples/bound/run.sh": "python -m verl.trainer.main_ppo trainer.v1.sampler.max_off_policy_threshold=2",
        "examples/slurm/run.sh": 'srun bash -c "python -m verl.trainer.main_ppo algorithm.adv_estimator=remax"',
        "examples/sft/run.sh": "torchrun -m verl.trainer.sft_trainer data.n=1",
        "examples/README.md": "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=remax",
    }
    for name, text in scripts.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_scripts_are_counted_by_the_settings_that_are_refused(
    checkout: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["scan", "verl", str(checkout), "--json", str(checkout / "found.json")])
    scanner.main()
    printed = capsys.readouterr().out
    assert "examples/remax/run.sh: refused: algorithm.adv_estimator = remax: verl's V1 trainer makes no" in printed
    assert "verl: 2 of 5 runs are not refused; the framework itself does not accept 0" in printed
    assert "refused algorithm.adv_estimator: 3, 2 for it alone" in printed
    assert "refused actor_rollout_ref.rollout.disaggregation.enabled: 1, 0 for it alone" in printed
    assert "ignored trainer.v1.sampler.max_off_policy_threshold: 1, 1 for it alone" in printed
    runs = {run["script"]: run["verdict"] for run in json.loads((checkout / "found.json").read_text())["runs"]}
    assert runs == {
        "examples/bound/run.sh": "not refused",
        "examples/math/run.sh": "not refused",
        "examples/moe/run.sh": "refused",
        "examples/remax/run.sh": "refused",
        "examples/slurm/run.sh": "refused",
    }


@pytest.mark.parametrize(
    ("framework", "script", "refused", "ignored"),
    [
        ("slime", "A=(--buffer-filter-path x --lr 1)\npython3 train.py ${A[@]}", {"buffer-filter-path"}, set()),
        ("slime", "python3 train_async.py --use-distributed-post", set(), {"use-distributed-post"}),
        (
            "openrlhf",
            "python3 -m openrlhf.cli.train_ppo_ray --train.async_enable \\\n  --data.max_images_per_prompt 1",
            {"data.max_images_per_prompt"},
            set(),
        ),
        ("openrlhf", "python3 -m openrlhf.cli.train_ppo_ray --rollout.batch_size=8", set(), set()),
        (
            "skyrl",
            "uv run -m examples.train.search.main_search generator.inference_engine.enable_pd=true",
            {"generator.inference_engine.enable_pd"},
            set(),
        ),
        ("skyrl", "uv run -m skyrl.train.entrypoints.main_base generator.batched=true", set(), set()),
    ],
)
def test_each_frameworks_arguments_are_read(
    tmp_path: Path, framework: str, script: str, refused: set[str], ignored: set[str]
) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "run.sh").write_text(script)
    (found,) = scanner.scan(framework, tmp_path)
    assert (set(found.refused), set(found.ignored), found.invalid) == (refused, ignored, "")


def test_runs_without_samples_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "run.sh").write_text("python3 train.py --debug-train-only")
    with pytest.raises(ValueError, match="no launch scripts of slime in examples, scripts, recipe"):
        scanner.scan("slime", tmp_path)


def test_a_wrong_folder_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, message in ((tmp_path / "none", "no such folder"), (tmp_path, "no launch scripts of verl")):
        monkeypatch.setattr(sys, "argv", ["scan", "verl", str(folder)])
        with pytest.raises(SystemExit):
            scanner.main()
        assert message in capsys.readouterr().err
