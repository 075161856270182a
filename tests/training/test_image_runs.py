"""`april train` on images, as a user runs it; killed at any moment, it ends like the run that never died."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from april.images.store import ImageStore
from april.images.support import load_images
from april.rollout.journal.journal import Journal
from april.training.checkpoint import checkpoints
from april.training.resume import JOURNAL
from tests import tiny, vision
from tests.forked import run as april
from tests.killed_run import straight_and_killed
from tests.training.test_trainer import metrics

RECIPE = """
[model]
path = "policy"
[task]
kind = "records"
path = "train.jsonl"
image_column = "images"
reward = "rewards.py:vowels"
eval_size = 2
[rollout]
rollout_batch_size = 3
over_sampling_batch_size = 6
n_samples_per_prompt = 2
max_response_length = 16
max_staleness = 2
[engine]
max_num_seqs = 6
context_length = 128
prefill_chunk = 16
[training]
steps = 3
threads = 1
learning_rate = 1e-3
updates_per_step = 1
[reporting]
output = "OUT"
"""
REWARD = 'def vowels(response: str) -> float:\n    return sum(letter in "aeiou" for letter in response.lower()) / 8\n'


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    vision.save(tmp_path / "policy")
    return write_recipe(tmp_path)


def write_recipe(directory: Path) -> Path:
    """A recipe and its records, beside a folder `policy`."""
    rows = []
    for number in range(10):
        name = f"pictures/{number}.png"
        vision.picture(directory / name, (24 + 8 * (number % 2), 16), mark=number)
        rows.append({"prompt": f"What is <image>? {number % 3}", "images": [name], "answer": "x"})
    rows[0] = {"prompt": "No image.", "images": [], "answer": "x"}
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "rewards.py").write_text(REWARD)
    path = directory / "recipe.toml"
    path.write_text(RECIPE.replace("OUT", str(directory / "run")))
    return path


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [line for line in metrics(run) if "loss" in line]


def test_a_repeatedly_killed_run_ends_like_an_undisturbed_one(recipe: Path, tmp_path: Path) -> None:
    straight, killed = straight_and_killed(recipe, tmp_path)
    for one, other in zip(steps_of(killed), steps_of(straight), strict=True):
        assert one["generated_tokens"] == other["generated_tokens"]
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4, abs=1e-4)
    # Checkpoints are policies that take images, and journals hold references to images, not pixels.
    [*_, last] = checkpoints(killed / "checkpoints")
    assert isinstance(load_images(str(last)), ImageStore)
    journal = Journal(killed / JOURNAL)
    journal.close()
    assert sum(file.stat().st_size for file in (killed / JOURNAL).iterdir() if file.is_file()) < 100_000


def test_a_resumed_run_outlives_the_checkpoint_that_it_began_from(recipe: Path, tmp_path: Path) -> None:
    recipe.write_text(recipe.read_text().replace("steps = 3", "steps = 1\nsave_interval = 1\nkeep_checkpoints = 1"))
    assert april("train", recipe).returncode == 0
    [first] = checkpoints(tmp_path / "run" / "checkpoints")
    done = april("resume", tmp_path / "run", "--steps", "3")
    assert done.returncode == 0, done.stderr
    [last] = checkpoints(tmp_path / "run" / "checkpoints")
    assert last != first
    assert isinstance(load_images(str(last)), ImageStore)


def test_interrupted_samples_are_trained_on_and_the_run_is_exact(recipe: Path, tmp_path: Path) -> None:
    """Partial rollouts: with one update a step, fresh tokens have a ratio of 1 to the policy that sampled them."""
    done = april("train", recipe, "--max-staleness", "0", "--over-sampling-batch-size", "3")
    assert done.returncode == 0, done.stderr
    for line in steps_of(tmp_path / "run"):
        assert line["kl_behaviour"] < 1e-6
    partial = april("train", recipe, "--output", tmp_path / "partial")
    assert partial.returncode == 0, partial.stderr
    assert sum(line["samples_resumed"] for line in steps_of(tmp_path / "partial")) > 0


@pytest.mark.parametrize("section", ["[lora]\nrank = 4", '[trainer]\nbackend = "fsdp2"\nprocesses = 2'])
def test_adapters_and_ranks_train_on_what_they_sampled(section: str, recipe: Path, tmp_path: Path) -> None:
    recipe.write_text(recipe.read_text().replace("[engine]\n", f"{section}\n[engine]\n"))
    done = april("train", recipe, "--max-staleness", "0", "--over-sampling-batch-size", "3", "--steps", "2")
    assert done.returncode == 0, done.stderr
    lines = steps_of(tmp_path / "run")
    assert len(lines) == 2
    for line in lines:
        assert line["kl_behaviour"] < 1e-6
    [*_, last] = checkpoints(tmp_path / "run" / "checkpoints")
    assert isinstance(load_images(str(last)), ImageStore)


def test_a_changed_image_stops_a_resumed_run_in_one_line(recipe: Path, tmp_path: Path) -> None:
    assert april("train", recipe).returncode == 0
    for picture in (tmp_path / "pictures").iterdir():
        vision.picture(picture, (64, 64), "green")
    done = april("resume", tmp_path / "run", "--steps", "6")
    assert done.returncode != 0
    assert "has changed since its prompt was encoded" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            ("[engine]\n", '[engine]\nengine = "vllm-inproc"\n'),
            "task.image_column = 'images': engine.engine = \"vllm-inproc\" gets no images from april",
        ),
        (
            ("[engine]\n", '[trainer]\nbackend = "fsdp2"\nprocesses = 2\ncontext_parallel = 2\n[engine]\n'),
            "task.image_column = 'images': trainer.context_parallel = 2",
        ),
        (('"images"', '"pictures"'), "train.jsonl:1: image_column = 'pictures': no such column"),
        (('image_column = "images"\n', ""), "'images'"),
    ],
)
def test_settings_that_take_no_images_are_one_line(recipe: Path, change: tuple[str, str], said: str) -> None:
    recipe.write_text(recipe.read_text().replace(*change))
    done = april("train", recipe)
    if change[1]:
        assert done.returncode == 2
        assert said in done.stderr
        assert "Traceback" not in done.stderr
    else:  # without the column, `<image>` is text, and the paths are data of the reward
        assert done.returncode == 0, done.stderr


def test_a_policy_without_images_is_refused_before_it_is_loaded(recipe: Path, tmp_path: Path) -> None:
    tiny.save(tmp_path / "policy2")
    recipe.write_text(recipe.read_text().replace('"policy"', '"policy2"'))
    (tmp_path / "policy2" / "model.safetensors").unlink()
    done = april("train", recipe)
    assert done.returncode == 2
    assert "task.image_column = 'images': the policy reads none" in done.stderr


def damaged_jpeg() -> bytes:
    """A JPEG file with its header and its end, and a marker that may not be in its data."""
    file = io.BytesIO()
    Image.effect_noise((24, 16), 50).convert("RGB").save(file, "JPEG")
    content = bytearray(file.getvalue())
    at = content.index(b"\xff\xda") + 40
    content[at : at + 2] = b"\xff\xd8"
    return bytes(content)


@pytest.mark.parametrize("content", [b"no image", damaged_jpeg()])
def test_an_image_that_cannot_be_read_is_named_with_its_record(content: bytes, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "pictures" / "4.png").write_bytes(content)
    done = april("train", recipe)
    assert done.returncode == 2
    assert "train.jsonl:5: image" in done.stderr
    assert "4.png: cannot be decoded" in done.stderr
    skipped = april("train", recipe, "--task.on-bad-record", "skip", "--steps", "1")
    assert skipped.returncode == 0, skipped.stderr
