"""Error messages of `april train` for recipes that cannot run."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tests.commands.conftest import status


@pytest.mark.parametrize(
    ("change", "flags", "message"),
    [
        (("rollout_batch_size = 3", "rollout_batch_size = 9"), (), "recipe.toml:10: rollout.over_sampling_batch_size"),
        ((), ("--over-sampling-batch-size", "2"), "less than rollout_batch_size = 3"),
        ((), ("--max-staleness", "0"), "cannot keep max_staleness = 0"),
        (
            ("over_sampling_batch_size = 6", 'over_sampling_batch_size = "many"'),
            (),
            "a valid integer; or: Input should be 'auto'",
        ),
        ((), ("--policy", "april-paper", "--on-update", "keep"), 'set engine.on_update = "recompute"'),
        (
            (),
            ("--processes", "3", "--context-parallel", "2"),
            "trainer.context_parallel = 2 does not divide processes = 3",
        ),
        (
            (),
            ("--processes", "4", "--tensor-parallel", "2", "--context-parallel", "4"),
            "trainer.tensor_parallel = 2 (with context_parallel = 4) does not divide the 4 processes",
        ),
        ((), ("--processes", "4", "--expert-parallel", "3"), "trainer.expert_parallel = 3 does not divide the 4"),
        (
            (),
            ("--processes", "4", "--tensor-parallel", "4", "--expert-parallel", "2"),
            "trainer.expert_parallel = 2 is no multiple of tensor_parallel = 4",
        ),
        (
            (),
            ("--processes", "2", "--expert-parallel", "2", "--lora.rank", "4"),
            "trainer.expert_parallel = 2 with lora.rank = 4: adapters are not divided among ranks; leave expert_par",
        ),
        ((), ("--updates-per-step", "2"), "does not divide rollout_batch_size = 3"),
        (("max_staleness", "max_stalenes"), (), "recipe.toml:13: unknown setting rollout.max_stalenes; did you mean"),
        (("[engine]", "[engin]"), (), "unknown section or setting engin; did you mean engine?"),
        (("steps = 6", 'steps = "six"'), (), "training.steps = 'six'"),
        (("steps = 6", "steps = "), (), "no valid TOML"),
        ((), ("--task.name", "gdc"), "gcd"),
        ((), ("--model.path", "/nowhere"), "no such directory"),
        ((), ("--algorithm", "ppo", "--value-clip", "inf", "--steps", "0"), "training.steps = 0: must be positive"),
        ((), ("--task.kind", "records", "--task.path", "nothing.jsonl"), "no such file"),
        ((), ("--algorithm", "grop"), "did you mean 'grpo'"),
        ((), ("--correction", "tiss"), "correction"),
        ((), ("--correction-cap", "2"), "correction_cap does not apply to correction = 'rollout_logprobs'"),
        ((), ("--correction", "tis", "--correction-delta", "1"), "choose one of dppo"),
        ((), ("--correction", "icepop", "--correction-low", "9"), "correction_low = 9 is above correction_high = 5"),
        ((), ("--gae-lambda", "1.5"), "must lie in [0, 1]"),
        ((), ("--learning-rate", "0"), "training.learning_rate = 0.0: must be positive"),
        ((), ("--rollout-batch-siz", "3"), "no option --rollout-batch-siz; did you mean --rollout-batch-size?"),
        ((), ("--engine.engine", "vllm"), "no option --engine.engine; did you mean --engine?"),
        ((), ("--nothing-like-it=3",), "april: command line: there is no option --nothing-like-it; april train"),
        ((), ("--temperature", "hot"), "april: command line: --temperature: could not convert string to float: 'hot'"),
        ((), ("--steps",), "april: command line: Missing value for argument '--steps'"),
        ((), ("--policy", "mine"), "april: command line: invalid choice 'mine' for argument '--policy'"),
        ((), ("--max-tokens-per-micro-batch", "10"), "one sample would not fit"),
        ((), ("--trackers", "wandb"), "wandb is not installed: pip install"),
        ((), ("--max-response-length", "256"), "leaves no room for a prompt in a context of 256 tokens"),
        (
            (),
            ("--context-length", "4096"),
            "engine.context_length = 4096, but the model was configured for 512: lower it",
        ),
        ((), ("--max-prompt-length", "5"), "more than the 5 for which there is room (max_prompt_length)"),
        (
            (),
            ("--max-prompt-length", "105"),
            "(4 of 4 held-out prompts cannot be used)",
        ),
        ((), ("--urls", "http://me:secret@host:1", "--engine", "vllm"), "engine.urls holds a password"),
        ((), ("--urls", "host:1", "--engine", "vllm"), "engine.urls has 'host:1': write each as"),
        ((), ("--urls", "http://host:1"), 'engine.urls is set but engine = "embedded"'),
        ((), ("--engine", "sglang", "--server-python", "/none"), "engine.server_python = '/none': no such interpreter"),
        ((), ("--engine", "vllm-inproc"), "needs vLLM in this environment"),
        ((), ("--engine", "vllm-inproc", "--on-update", "keep"), "computes anew only"),
        ((), ("--weight-transfer", "adapters", "--lora.rank", "4"), "vLLM takes them, with lora.rank above 0"),
        ((), ("--weight-transfer", "adapters", "--engine", "vllm"), "vLLM takes them, with lora.rank above 0"),
        ((), ("--on-update", "redraft", "--engine", "vllm"), "vllm verifies no drafts"),
        ((), ("--on-update", "redraft", "--over-sampling-batch-size", "auto"), "not forecast; give a number"),
        ((), ("--server-args=--host=0.0.0.0",), "set engine.server_host instead"),
        ((), ("--server-args=--api-key=x",), "everybody on the machine sees the options of a process"),
        ((), ("--engine", "vllm", "--server-args=-sc", "--min-p", "0.1"), "rollout.min_p = 0.1: vLLM takes none"),
        ((), ("--engine", "sglang", "--server-args=--speculative-algorithm=NGRAM"), "not known to draw drafted tokens"),
        ((), ("--server-host", "0.0.0.0"), "set the environment variable APRIL_ENGINE_API_KEY"),
        ((), ("--reward-memory-gb", "0"), "rollout.reward_memory_gb = 0.0: must be positive gigabytes"),
        ((), ("--model.device", "gpu"), "model.device = 'gpu': PyTorch cannot compute on it here"),
        ((), ("--model.device", "cuda:99"), "model.device = 'cuda:99': PyTorch cannot compute on it here"),
        ((), ("--model.path", "/nowhere"), "april: command line: model.path = '/nowhere'"),
        ((), ("--n-samples-per-prompt", "1000000"), "with 6 groups, more than 1,000,000 samples would be in progress"),
        ((), ("--steps=0",), "april: command line: training.steps = 0"),
        ((), ("--no-partial-rollout", "--lora.rank=-1"), "april: command line: lora.rank = -1"),
    ],
)
def test_invalid_settings_are_one_clear_line_before_a_start(
    recipe: Path,
    tmp_path: Path,
    change: tuple[str, str],
    flags: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if change:
        recipe.write_text(recipe.read_text().replace(*change))
    assert status("train", str(recipe), *flags) == 2
    printed = "".join(capsys.readouterr())
    assert message in printed
    assert "│" not in printed
    assert not (tmp_path / "run").exists()


def test_missing_memory_is_one_line(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def too_large(*_: object, **__: object) -> None:
        raise MemoryError("Unable to allocate 16.0 GiB")

    monkeypatch.setattr("april.commands.trainer.train", too_large)
    assert status("train", str(recipe)) == 1
    assert capsys.readouterr().err == "april: MemoryError: Unable to allocate 16.0 GiB\n"


def test_user_code_that_exits_in_a_separate_task_ends_the_run_with_a_message(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def train(*_: object, **__: object) -> None:
        async def child() -> None:
            sys.exit(0)

        await asyncio.create_task(child())

    monkeypatch.setattr("april.commands.trainer.train", train)
    assert status("train", str(recipe)) == 1
    assert "april: user code called sys.exit(0) in a task of its own" in capsys.readouterr().err
