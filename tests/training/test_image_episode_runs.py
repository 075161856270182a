"""`april train` on episodes with images; killed at any moment, it ends like the run that never died."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from april.config.image_rules import image_problem
from april.config.reading import load_recipe
from april.reporting.completions import files, read_completions
from april.training.checkpoint import STATE, checkpoints
from april.training.resume import JOURNAL
from tests import tiny, vision
from tests.forked import run as april
from tests.killed_run import straight_and_killed
from tests.training.test_image_runs import steps_of

ENVIRONMENT = '''
import random

from PIL import Image

from april import EnvStep


class Screens:
    """Shows a picture after each turn, and rewards vowels."""

    def reset(self, prompt, seed):
        self.random = random.Random(seed)
        return ""

    def step(self, turn):
        reward = sum(letter in "aeiou" for letter in turn.text.lower()) / 8
        picture = Image.new("RGB", (24, 16), tuple(self.random.randrange(256) for _ in range(3)))
        shown = [{"type": "text", "text": "now"}, {"type": "image", "image": picture}]
        return EnvStep([{"role": "user", "content": shown}], reward, self.random.random() < 0.2)

    def close(self):
        pass
'''
PROGRAM = '''
import base64, io, random

from openai import AsyncOpenAI
from PIL import Image


def shown(path_or_colour):
    """A part with an image: the record's file, or a picture of one colour."""
    if isinstance(path_or_colour, str):
        content = open(path_or_colour, "rb").read()
    else:
        file = io.BytesIO()
        Image.new("RGB", (24, 16), path_or_colour).save(file, "PNG")
        content = file.getvalue()
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(content).decode()}}


async def play(record, access):
    """Two turns with a picture each, the second one again with another picture of the same size, and a summary."""
    draw = random.Random(record["seed"])
    colours = [tuple(draw.randrange(256) for _ in range(3)) for _ in range(2)]
    async with AsyncOpenAI(base_url=f"{access.address}/v1", api_key=access.secret, timeout=3600) as client:
        async def ask(messages):
            answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=8)
            return answer.choices[0].message
        asked = [shown(part["image"]) if part["type"] == "image" else part for part in record["prompt"][0]["content"]]
        messages = [{"role": "user", "content": asked}]
        first = await ask(messages)
        said = {"role": "assistant", "content": first.content or ""}
        texts = [first.content or ""]
        for colour in colours:
            more = {"role": "user", "content": [{"type": "text", "text": "and"}, shown(colour)]}
            texts.append((await ask([*messages, said, more])).content or "")
        texts.append((await ask([{"role": "user", "content": [shown(colours[0])]}])).content or "")
    return {"reward": sum(len(text) % 5 for text in texts) / 16}
'''
RECIPE = """
[model]
path = "policy"
[task]
kind = "records"
path = "train.jsonl"
image_column = "images"
answer_column = "answer"
eval_size = 2
correct_at = 1.0
[environment]
OWN
max_turns = 4
[rollout]
rollout_batch_size = 2
over_sampling_batch_size = 4
n_samples_per_prompt = 2
max_response_length = 40
max_staleness = 2
stop = ["a", "e", "i", "o", "u", " ", "0", "1", "2", "3", "4", "5", "A", "E", "I", "O", "U"]
[engine]
max_num_seqs = 6
context_length = 400
prefill_chunk = 16
[training]
steps = 3
threads = 1
learning_rate = 1e-3
updates_per_step = 1
eval_samples = 1
save_interval = 2
journal_flush_seconds = 0
[reporting]
output = "OUT"
"""
KINDS = {"environment": 'path = "screens.py:Screens"\nworkers = 1', "program": 'function = "agent.py:play"'}


@pytest.fixture(params=KINDS)
def recipe(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    vision.save(tmp_path / "policy")
    return write_recipe(tmp_path, request.param)


def write_recipe(tmp_path: Path, kind: str) -> Path:
    """Write a recipe for the policy in `policy`, and its records, and return its path."""
    rows = []
    for number in range(10):
        name = f"pictures/{number}.png"
        vision.picture(tmp_path / name, (24 + 8 * (number % 2), 16), mark=number)
        rows.append({"prompt": f"What is <image>? {number % 3}", "images": [name], "answer": "x"})
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "screens.py").write_text(ENVIRONMENT)
    (tmp_path / "agent.py").write_text(PROGRAM)
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.replace("OUT", str(tmp_path / "run")).replace("OWN", KINDS[kind]))
    return path


def test_a_repeatedly_killed_run_ends_like_an_undisturbed_one(recipe: Path, tmp_path: Path) -> None:
    straight, killed = straight_and_killed(recipe, tmp_path)
    for one, other in zip(steps_of(killed), steps_of(straight), strict=True):
        assert one["generated_tokens"] == other["generated_tokens"]
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-3, abs=1e-4)
        assert one["episodes_restarted"] == one["environment_failures"] == 0
    # The images of unfinished episodes are files of both runs, once each; journals hold references.
    assert images_named_in(straight) == images_named_in(killed)
    for run in (straight, killed):
        assert {file.name for file in (run / "images").iterdir()} >= images_named_in(run)
    assert b"data:image" not in b"".join(f.read_bytes() for f in (killed / JOURNAL).iterdir() if f.is_file())


def test_episodes_are_continued_after_updates_and_the_run_is_exact(recipe: Path, tmp_path: Path) -> None:
    """With one update a step and no staleness, tokens have a ratio of 1 to the policy that sampled them."""
    done = april("train", recipe, "--max-staleness", "0", "--over-sampling-batch-size", "2")
    assert done.returncode == 0, done.stderr
    lines = steps_of(tmp_path / "run")
    assert len(lines) == 3
    for line in lines:
        assert line["kl_behaviour"] < 1e-6
        assert line["turns_mean"] > 1
    partial = april("train", recipe, "--output", tmp_path / "partial")
    assert partial.returncode == 0, partial.stderr
    lines = steps_of(tmp_path / "partial")
    assert max(line["staleness_max"] for line in lines) > 0, "episodes are continued after an update"
    assert all(line["environment_failures"] == 0 for line in lines)
    text = "".join(row["prompt"] + row["completion"] for row in read_completions(files(tmp_path / "partial")[0]))
    assert "<|image_pad|>" in text
    assert "<|image_pad|><|image_pad|>" not in text


def images_named_in(run: Path) -> set[str]:
    """Hashes of the images that the newest checkpoint needs."""
    return set(re.findall("run:([0-9a-f]{64})", (checkpoints(run / "checkpoints")[-1] / STATE).read_text()))


def test_images_of_finished_episodes_are_deleted_and_a_resumed_run_has_the_others(recipe: Path, tmp_path: Path) -> None:
    text = recipe.read_text().replace("save_interval = 2", "save_interval = 1\nkeep_checkpoints = 1")
    recipe.write_text(text.replace("over_sampling_batch_size = 4", "over_sampling_batch_size = 6"))
    run = tmp_path / "run"
    seen = list[set[str]]()
    for command in (
        ("train", recipe, "--steps", "2"),
        ("resume", run, "--steps", "5"),
        ("resume", run, "--steps", "6"),
    ):
        done = april(*command)
        assert done.returncode == 0, done.stderr
        seen.append({file.name for file in (run / "images").iterdir()})
        assert seen[-1] >= images_named_in(run)
        assert all(line["environment_failures"] == 0 for line in steps_of(run))
    assert seen[0] - seen[1], "images of episodes that were trained on are deleted"


def test_a_run_is_resumed_after_its_directory_was_moved(recipe: Path, tmp_path: Path) -> None:
    """Unfinished episodes have images that the run keeps, in the journal and in the checkpoint."""
    done = april("train", recipe, "--over-sampling-batch-size", "6")
    assert done.returncode == 0, done.stderr
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    resumed = april("resume", moved, "--steps", "5")
    assert resumed.returncode == 0, resumed.stderr
    lines = steps_of(moved)
    assert len(lines) == 5
    assert sum(line["samples_resumed"] for line in lines[3:]) > 0
    assert all(line["environment_failures"] == 0 for line in lines)


@pytest.mark.parametrize("recipe", ["environment"], indirect=True)
def test_a_lost_image_stops_a_resumed_run_in_one_line(recipe: Path, tmp_path: Path) -> None:
    """Not with a program: it sends the images of its unfinished episodes again."""
    assert april("train", recipe, "--over-sampling-batch-size", "6").returncode == 0
    shutil.rmtree(tmp_path / "run" / "images")
    done = april("resume", tmp_path / "run", "--steps", "6")
    assert done.returncode != 0
    assert f"image {tmp_path / 'run' / 'images'}" in done.stderr
    assert "cannot be read" in done.stderr
    assert "Traceback" not in done.stderr


def test_servers_that_run_already_are_not_sent_images_unasked(recipe: Path) -> None:
    text = recipe.read_text().replace("[engine]\n", '[engine]\nengine = "vllm"\nurls = ["http://127.0.0.1:1"]\n')
    recipe.write_text(text.replace("prefill_chunk = 16\n", ""))
    assert image_problem(load_recipe(recipe)) is None
    recipe.write_text(recipe.read_text().replace('image_column = "images"\n', ""))
    assert "engine.urls" in (image_problem(load_recipe(recipe)) or "")


@pytest.mark.parametrize("recipe", ["environment"], indirect=True)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            ("[engine]\n", '[engine]\nengine = "vllm-inproc"\n'),
            "task.image_column = 'images': engine.engine = \"vllm-inproc\"",
        ),
        (('"policy"', '"text"'), "task.image_column = 'images': the policy reads none"),
    ],
)
def test_settings_without_images_in_episodes_are_one_line(
    recipe: Path, tmp_path: Path, change: tuple[str, str], said: str
) -> None:
    tiny.save(tmp_path / "text")
    recipe.write_text(recipe.read_text().replace(*change))
    done = april("train", recipe)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
