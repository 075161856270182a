"""Prompts with images on real servers: every token has the log-probability of its version, through interruptions."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForImageTextToText

from april import Chunk, Fault, FinishReason, SamplingParams
from april.engines.servers.launch import Launch, Server, launch_sglang, launch_vllm
from april.engines.servers.sent_images import SentImages
from april.engines.servers.server import ServerEngine
from april.engines.servers.sglang import connect_sglang
from april.engines.servers.sglang_images import KEEPS_IDS
from april.engines.servers.vllm import OWN_PIXELS, connect_vllm
from april.images.store import ImageStore
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.sample import Sample
from tests import vision
from tests.forked import run as april
from tests.images.test_model_inputs import encode
from tests.servers.conftest import CONTEXT, SGLANG, SLOTS, VLLM, environment, python_of
from tests.training.test_image_runs import steps_of, write_recipe
from tests.training.test_images import recorded, samples_of, scores

AGREES = 1e-4
"""Largest difference of log-probabilities between a server and the trainer, both in float32."""
LENGTH = 300


OPTIONS = {
    "vllm": [*VLLM, "--max-model-len", str(CONTEXT), "--max-num-seqs", str(SLOTS), OWN_PIXELS],
    "sglang": [*SGLANG, "--context-length", str(CONTEXT), "--max-running-requests", str(SLOTS), KEEPS_IDS, "64"],
}
PATCHES = {"vllm": vision.PATCH, "sglang": 14}
"""Pixels of a patch. SGLang computes patches of other sizes with Qwen3-VL alone."""
LAUNCH = {"vllm": launch_vllm, "sglang": launch_sglang}
CONNECT = {"vllm": connect_vllm, "sglang": connect_sglang}


class Served:
    """A server, and two policies of its shapes; it runs the first."""

    def __init__(self, kind: str, server: Server, directories: list[Path]) -> None:
        self.kind = kind
        self.server = server
        self.directories = directories
        self.policies = [AutoModelForImageTextToText.from_pretrained(path).eval() for path in directories]

    async def engine(self) -> ServerEngine:
        """Connect to the server, on the first policy."""
        images = SentImages(str(self.directories[0]), expected=True)
        engine = await CONNECT[self.kind](self.server.url, images=images, patience=120)
        await engine.update_weights(0, self.directories[0])
        return engine


@pytest_asyncio.fixture(
    scope="module", loop_scope="session", params=itertools.product(OPTIONS, vision.ARCHITECTURES), ids="-".join
)
async def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    kind, architecture = request.param
    root = tmp_path_factory.mktemp(architecture)
    # SGLang takes drawn placeholders of a resumed sample for further images.
    settings = {"draws_media": kind == "vllm", "patch": PATCHES[kind]}
    directories = [
        vision.save_for_servers(root / f"policy-{seed}", architecture, seed, **settings) for seed in range(2)
    ]
    arguments = [*OPTIONS[kind], "--dtype", "float32"]
    how = Launch(log_dir=root, python=python_of(kind), arguments=arguments, environment=environment(0))
    async with LAUNCH[kind](directories[0], how) as server:
        yield Served(kind, server, directories)


@pytest.fixture
def store(served: Served) -> ImageStore:
    return vision.image_store(PATCHES[served.kind])


@pytest.fixture
def prompts(served: Served, store: ImageStore, tmp_path: Path) -> list[Prompt]:
    """Prompts with two images, with one, with an image of the same size and other pixels, and with none."""
    patch = PATCHES[served.kind]
    # Of other sides than whole patches: both are resized.
    first = vision.picture(tmp_path / "1.png", (10 * patch + 1, 6 * patch - 1), "blue")
    size = 6 * patch, 4 * patch
    second, third = (vision.picture(tmp_path / f"{number}.png", size, mark=2 * patch * number) for number in (2, 0))
    return [encode(store, *images, "What is it?") for images in ([first, second], [second], [third], [])]


async def generate(engine: ServerEngine, samples: list[Sample], updates: Sequence[Path] = ()) -> list[Sample]:
    """Generate all samples; with `updates`, interrupt them for each, after some tokens.

    An update waits for an interruption that leaves a response unfinished. Where the server ends all responses earlier,
    it is given the same prompts once more, so the machine's speed does not matter.

    Returns:
        `samples`, and in the same order those that were started once more.
    """
    given, samples, left, lengths = samples, list(samples), list(updates), dict[str, int]()

    def submit() -> None:
        for sample in samples:
            lengths[sample.id] = sample.length
            if sample.finish is None:
                engine.submit(sample)

    def advanced(tokens: int) -> bool:
        return any(s.finish is None and s.length > lengths[s.id] + tokens for s in samples)

    def take(chunks: list[Chunk]) -> None:
        by_id = {sample.id: sample for sample in samples}
        for chunk in chunks:
            assert chunk.error is None
            by_id[chunk.sample_id].extend(chunk.token_ids, chunk.logprobs, chunk.version, chunk.finish)

    submit()
    while left or any(sample.finish is None for sample in samples):
        if all(sample.finish for sample in samples):
            samples += [
                Sample(s.group_id + len(samples), s.index, s.prompt_ids, s.sampling, s.seed, features=s.features)
                for s in given
            ]
            submit()
        take(await engine.poll())
        if left and advanced(3):
            take(await engine.interrupt())
            if advanced(0):
                await engine.update_weights(engine.version + 1, left.pop(0))
            submit()
    return samples


async def test_every_token_has_the_log_probability_of_its_version(
    served: Served, store: ImageStore, prompts: list[Prompt]
) -> None:
    engine = await served.engine()
    updates = [served.directories[1], served.directories[0]]
    try:
        samples = await generate(engine, samples_of(prompts, SamplingParams(LENGTH)), updates)
    finally:
        await engine.close()
    versions = torch.cat([torch.from_numpy(sample.versions) for sample in samples])
    found = [scores(policy, store, samples, False) for policy in served.policies]
    expected = torch.where(versions == 1, found[1], found[0])
    assert set(versions.tolist()) == {0, 1, 2}
    assert (expected - recorded(samples)).abs().max() < AGREES
    # Another policy, or the images of another one, would be found.
    assert (found[1] - recorded(samples))[versions != 1].abs().max() > 100 * AGREES


async def test_interrupted_samples_continue_as_uninterrupted_ones(
    served: Served, store: ImageStore, prompts: list[Prompt]
) -> None:
    greedy = SamplingParams(LENGTH, temperature=0)
    engine = await served.engine()
    try:
        undisturbed = await generate(engine, samples_of(prompts, greedy, 1))
        interrupted = await generate(engine, samples_of(prompts, greedy, 1), [served.directories[0]])
    finally:
        await engine.close()
    assert {s.finish for s in interrupted} == {FinishReason.LENGTH}
    undisturbed *= len(interrupted) // len(undisturbed)
    assert [s.response_ids for s in interrupted] == [s.response_ids for s in undisturbed]
    assert prompts[1].token_ids == prompts[2].token_ids
    assert (recorded(interrupted) - recorded(undisturbed)).abs().max() < AGREES
    assert (recorded(undisturbed[1:2]) - recorded(undisturbed[2:3])).abs().max() > 100 * AGREES, "images are read"


async def test_an_image_that_disappears_fails_its_sample_by_name(
    served: Served, prompts: list[Prompt], tmp_path: Path
) -> None:
    (tmp_path / "1.png").unlink()
    engine = await served.engine()
    try:
        engine.submit(samples_of(prompts[:1], SamplingParams(4), 1)[0])
        [chunk] = await engine.poll()
    finally:
        await engine.close()
    assert chunk.fault is Fault.INPUT
    assert str(tmp_path / "1.png") in (chunk.error or "")


@pytest.fixture(params=OPTIONS)
def recipe(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    kind = request.param
    for name, value in environment(0).items():
        monkeypatch.setenv(name, value)
    vision.save_for_servers(tmp_path / "policy", "Qwen3VL")
    path = write_recipe(tmp_path)
    engine = {"engine": kind, "server_python": str(python_of(kind)), "server_args": VLLM if kind == "vllm" else SGLANG}
    engine["weight_transfer"] = "broadcast"
    settings = "".join(f"{name} = {json.dumps(value)}\n" for name, value in engine.items())
    text = path.read_text().replace("prefill_chunk = 16\n", settings)
    text = text.replace("over_sampling_batch_size = 6", "over_sampling_batch_size = 3")
    path.write_text(text.replace("max_staleness = 2", "max_staleness = 0"))
    return path


async def test_a_server_that_expands_a_prompt_otherwise_names_the_image_processor(
    served: Served, tmp_path: Path
) -> None:
    if served.kind != "sglang":
        pytest.skip("vLLM takes the expanded ids")
    patch = PATCHES[served.kind]
    processor = vision.image_processor(patch)
    processor.size["longest_edge"] *= 2
    larger = ImageStore(processor, vision.PLACEHOLDER)
    picture = vision.picture(tmp_path / "3.png", (20 * patch, 20 * patch))
    samples = samples_of([encode(larger, picture, "What is it?")], SamplingParams(4), 1)
    engine = await connect_sglang(served.server.url, images=SentImages(str(served.directories[0]), store=larger))
    try:
        await engine.update_weights(0, served.directories[0])
        engine.submit(samples[0])
        [chunk] = await engine.poll()
    finally:
        await engine.close()
    assert chunk.fault is Fault.INPUT
    assert f"the image processor of {served.directories[0]}" in (chunk.error or "")


def test_april_train_starts_servers_that_take_its_images(recipe: Path, tmp_path: Path) -> None:
    """All tokens are fresh and have the ratio 1 to the policy that sampled them, so the server computed the trainer's
    images with the weights that were broadcast."""
    done = april("train", recipe, "--steps", 2)
    assert done.returncode == 0, done.stderr
    lines = steps_of(tmp_path / "run")
    assert len(lines) == 2
    assert max(line["kl_behaviour"] for line in lines) < 1e-6
