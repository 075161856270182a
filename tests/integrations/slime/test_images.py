"""Prompts with images through slime's own data set, arguments and generation, on a played server with a real model."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integrations.slime.source import load_weights, need_slime, slime_arguments

need_slime()

import numpy as np  # noqa: E402
import pyarrow.parquet  # noqa: E402
import torch  # noqa: E402
from slime.ray.rollout import RolloutManager  # noqa: E402
from slime.rollout.data_source import RolloutDataSource  # noqa: E402
from slime.rollout.sglang_rollout import generate_and_rm_group  # noqa: E402
from slime.utils.async_utils import run  # noqa: E402
from slime.utils.http_utils import init_http_client  # noqa: E402
from slime.utils.types import Sample  # noqa: E402

from april import FinishReason, Group, SamplingParams  # noqa: E402
from april.disk import as_json  # noqa: E402
from april.engines.servers.client import RequestError, fault_of  # noqa: E402
from april.integrations import slime as plugin  # noqa: E402
from april.integrations.slime.data_source import state_path  # noqa: E402
from april.integrations.slime.dataset_images import CACHE_SIZE, check_input  # noqa: E402
from april.integrations.slime.rollouts import FORMAT, Batch, SlimeRollouts  # noqa: E402
from april.rollout.engine import Fault  # noqa: E402
from tests import vision  # noqa: E402
from tests.integrations.slime.vision_server import Policy, VisionServer  # noqa: E402

N, G, OVER, LENGTH = 2, 2, 5, 20
EXACT = 1e-4
ARCHITECTURES = ("Qwen3VL", "Qwen2_5_VL")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Path]]:
    """Three policies of an architecture."""
    root, made = tmp_path_factory.mktemp("models"), {}

    def of(architecture: str) -> list[Path]:
        if architecture not in made:
            folders = [root / f"{architecture}-{seed}" for seed in range(3)]
            made[architecture] = [vision.save(folder, architecture, seed=seed) for seed, folder in enumerate(folders)]
        return made[architecture]

    return of


def data_file(folder: Path, count: int, parquet: bool) -> Path:
    """Prompts with no image, one, and two, of different sizes; labels number them."""
    rows = []
    for number in range(count):
        sizes = [(24 + 8 * (number % 3), 16), (16, 40)][: number % 3]
        paths = [
            vision.picture(
                folder / f"{number}-{place}.png", size, f"rgb({8 * number}, 0, {200 * place})", mark=number % 5
            )
            for place, size in enumerate(sizes)
        ]
        text = "Which? " + " or ".join(["<image>"] * len(paths))
        rows.append({"input": text, "images": paths, "label": str(number)})
    path = folder / ("prompts.parquet" if parquet else "prompts.jsonl")
    if parquet:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return path
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def arguments(model: Path, folder: Path, parquet: bool = False, length: int = LENGTH) -> Namespace:
    checkpoint, data = str(folder / "checkpoint"), data_file(folder, 30, parquet)
    return slime_arguments(
        *("--hf-checkpoint", str(model), "--prompt-data", str(data), "--label-key", "label"),
        *("--multimodal-keys", '{"image": "images"}', "--apply-chat-template", "--num-rollout", "9"),
        *("--rollout-batch-size", str(N), "--n-samples-per-prompt", str(G), "--over-sampling-batch-size", str(OVER)),
        *("--partial-rollout", "--rollout-max-response-len", str(length), "--global-batch-size", str(N * G)),
        *("--micro-batch-size", "1", "--rollout-num-gpus", "1"),
        *("--custom-rm-path", "tests.integrations.slime.test_images.images_seen"),
        save=checkpoint,
        load=checkpoint,
    )


async def images_seen(args: Namespace, sample: Sample) -> float:
    """A custom reward model. It fails if the sample's images are not its own."""
    images, count = (sample.multimodal_inputs or {}).get("images") or [], int(sample.label) % 3
    assert len(images) == count
    assert (sample.multimodal_train_inputs is None) == (count == 0)
    if images:
        assert images[0].size == (24 + 8 * (int(sample.label) % 3), 16)
        assert len(sample.multimodal_train_inputs["image_grid_thw"]) == count
    return float(count)


@pytest.fixture
def serve() -> Iterator[Callable[..., VisionServer]]:
    """Starts a server that is the router of slime's arguments."""
    servers = []

    def start(args: Namespace, model: Path, **settings: Any) -> VisionServer:
        servers.append(server := VisionServer(model, context_length=128, **settings))
        args.sglang_router_ip, args.sglang_router_port = server.address.split(":")
        init_http_client(args)
        return server

    yield start
    for server in servers:
        server.close()


@torch.no_grad()
def logprobs(policy: Policy, sample: Sample) -> Any:
    """Of each response token, by a forward pass with what slime's trainer gets; shape [response_length]."""
    tokens = torch.tensor(sample.tokens)
    rows = policy(tokens[None], **(sample.multimodal_train_inputs or {})).logits[0].log_softmax(-1)
    return rows[-sample.response_length - 1 : -1].gather(1, tokens[-sample.response_length :, None])[:, 0].numpy()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_samples_with_images_are_exact_over_updates_and_a_restart(
    architecture: str, models: Any, serve: Any, tmp_path: Path
) -> None:
    """Each token has the log-probability of its version's policy, with the images that slime's trainer gets."""
    folders = models(architecture)
    policies = [Policy(folder) for folder in folders]
    args = arguments(folders[0], tmp_path, parquet=architecture == ARCHITECTURES[0])
    server = serve(args, folders[0])
    source = plugin.DataSource(args)
    held: dict[int, int] = {}
    """The policy of each version."""
    resumed, sent, labels = 0, set(), set()
    for rollout_id in range(4):
        if rollout_id == 2:  # a new process, with a new server
            source.save(1)
            saved = state_path(args.save, 1).read_text()
            assert "features" in saved
            assert not re.search("pixel|data:image|PIL", saved)
            server = serve(args, folders[1])
            source = plugin.DataSource(args)
            source.load(1)
        groups = plugin.rollout(args, rollout_id, source).samples
        version, rollouts = source.rollouts._adapter.version, source.rollouts  # type: ignore[union-attr]
        held[version] = min(rollout_id, 2) if rollout_id != 2 else 1
        assert [len(group) for group in groups] == [G] * N
        for group, ours in zip(groups, rollouts._batch.groups, strict=True):
            for sample, own in zip(group, ours.samples, strict=True):
                found = np.stack([logprobs(policy, sample) for policy in policies])
                expected = found[[held[int(number)] for number in own.versions], range(sample.response_length)]
                assert np.abs(expected - np.array(sample.rollout_log_probs)).max() < EXACT
                assert sample.reward == int(sample.label) % 3
                resumed += bool(ours.prompt.features) and len(set(own.versions.tolist())) > 1
            labels.add(group[0].label)
        for given, images in server.requests:
            assert given.count(vision.PLACEHOLDER) == images, "one placeholder for each image"
            sent.add(images)
        if rollout_id != 1:
            following = 1 if rollout_id == 0 else 2
            load_weights(server.url, folders[following], following + 1)
    assert resumed, "a sample with images has tokens of several versions"
    assert sent == {0, 1, 2}
    assert len(labels) == 4 * N


def train_data(args: Namespace, samples: list[Sample]) -> dict[str, list[Any]]:
    """What slime's rollout manager hands to its trainer."""
    manager = RolloutManager.__ray_metadata__.modified_class
    rewards = [sample.reward for sample in samples]
    mine = SimpleNamespace(args=args, custom_convert_samples_to_train_data_func=None)
    mine._post_process_rewards = lambda _: (rewards, rewards)
    return manager._convert_samples_to_train_data(mine, samples)  # type: ignore[no-any-return]


def test_slimes_trainer_gets_what_slimes_own_rollout_hands_over(models: Any, serve: Any, tmp_path: Path) -> None:
    """Also of samples that were interrupted, and resumed in another process: all weights are the same, and leave no
    choice of tokens. slime sends the text of a prompt, april its ids."""
    (folder, *_) = models("Qwen3VL")
    args = arguments(folder, tmp_path)
    server = serve(args, folder, scale=1e4)
    source = plugin.DataSource(args)
    ours: dict[int, Sample] = {}
    resumed = 0
    for rollout_id in range(4):
        for sample in chain.from_iterable(plugin.rollout(args, rollout_id, source).samples):
            ours[sample.index] = sample
            resumed += sample.multimodal_train_inputs is not None and len(sample.weight_versions) > 1
        load_weights(server.url, folder, rollout_id + 2)
        if rollout_id == 1:
            source.save(rollout_id)
            source = plugin.DataSource(args)
            source.load(rollout_id)
    assert resumed, "a sample with images has tokens of several versions"
    parameters = {"temperature": args.rollout_temperature, "max_new_tokens": LENGTH, "top_p": 1.0, "top_k": -1}
    groups = RolloutDataSource(args).get_samples(max(ours) // G + 1)
    made = [run(generate_and_rm_group(args, group, parameters)) for group in groups]
    theirs = [sample for sample in chain.from_iterable(made) if sample.index in ours]
    got = train_data(args, [ours[sample.index] for sample in theirs])
    expected = train_data(args, theirs)
    assert got.keys() == expected.keys()
    pixels = zip(got.pop("multimodal_train_inputs"), expected.pop("multimodal_train_inputs"), strict=True)
    assert got == expected
    for own, slimes in pixels:
        assert (own or {}).keys() == (slimes or {}).keys()
        assert all(torch.equal(own[name], tensor) for name, tensor in (slimes or {}).items())
    for slimes in theirs:
        own = ours[slimes.index]
        assert own.response == slimes.response
        pairs = zip(*((one.multimodal_inputs or {}).get("images") or [] for one in (own, slimes)), strict=True)
        assert all(one.tobytes() == other.tobytes() for one, other in pairs)


@pytest.fixture
def args(models: Any, tmp_path: Path) -> Namespace:
    return arguments(models("Qwen3VL")[0], tmp_path)


def waiting_group(args: Namespace) -> tuple[plugin.DataSource, SlimeRollouts, Group]:
    """A data source, its rollouts, and an unfinished group of the first prompt with two images."""
    source = plugin.DataSource(args)
    rollouts = source.rollouts = SlimeRollouts(args, source)
    prompts = rollouts.prompts()
    prompt = next(prompt for prompt in prompts if len(prompt.features) == 2)
    return source, rollouts, Group.start(0, prompt, 1, SamplingParams(max_tokens=4), seed=0)


def save(source: plugin.DataSource, rollouts: SlimeRollouts, group: Group) -> None:
    rollouts._batch = Batch(1, 0, [group])  # of a later rollout than the checkpoint's: it is saved whole
    rollouts._saved = {"format": FORMAT, "support_sets": None}
    source.save(0)


def test_a_server_that_keeps_embeddings_is_a_warning(
    args: Namespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    images = SlimeRollouts(args, plugin.DataSource(args))._images
    monkeypatch.setenv(CACHE_SIZE, "0")
    images.warn_of_cached_embeddings()
    assert not caplog.text
    monkeypatch.delenv(CACHE_SIZE)
    images.warn_of_cached_embeddings()
    assert f"set {CACHE_SIZE} to 0" in caplog.text


def test_a_changed_image_is_named_when_a_checkpoint_is_loaded(args: Namespace, tmp_path: Path) -> None:
    save(*waiting_group(args))
    plugin.DataSource(args).load(0)
    vision.picture(tmp_path / "2-1.png", (16, 40), "blue", mark=3)
    with pytest.raises(ValueError, match=r"^image 2 of prompt 4 of .*prompts.jsonl: it is missing or has changed"):
        plugin.DataSource(args).load(0)


def test_another_processor_is_named_when_a_checkpoint_is_loaded(
    args: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, rollouts, group = waiting_group(args)
    longer = (*group.prompt.token_ids, 40)
    state = json.loads(as_json(group.to_dict()))
    state["prompt"]["token_ids"] = longer
    save(source, rollouts, Group.from_dict(state))
    with pytest.raises(ValueError, match=r"^image 1 of prompt 4 of .*: the processor of --hf-checkpoint has changed$"):
        plugin.DataSource(args).load(0)


def test_a_group_with_a_drawn_placeholder_is_left_out(args: Namespace, caplog: pytest.LogCaptureFixture) -> None:
    """slime's trainer would take it for a part of an image, and SGLang refuses it when the sample is resumed."""
    _, rollouts, group = waiting_group(args)
    (sample,) = group.samples
    sample.extend((40, 41), (-1.0, -1.0), 0)
    images, ids = rollouts._images, [*sample.prompt_ids, *sample.response_ids]
    assert images.unsendable(group.prompt.features, ids) is None
    assert rollouts._keep(group)
    sample.extend((vision.PLACEHOLDER, 41), (-1.0, -1.0), 0, FinishReason.LENGTH)
    assert "placeholder" in images.unsendable(group.prompt.features, [*ids, vision.PLACEHOLDER])  # type: ignore[operator]
    assert not rollouts._keep(group)
    assert f"the policy has drawn token {vision.PLACEHOLDER}" in caplog.text


@pytest.mark.parametrize(
    ("count", "ids"), [(4, [1, 2, 2, 3]), (3, [1, 2, 4]), (3, None)], ids=["more", "others", "not reported"]
)
def test_a_server_that_computes_with_other_tokens_is_an_error(count: int, ids: list[int] | None) -> None:
    check_input(event_of(3, [1, 2, 3]), [1, 2, 3], ids_asked=True)
    check_input(event_of(3, None), [1, 2, 3], ids_asked=False)
    with pytest.raises(RequestError, match=r"SGLang 0\.5\.15|other tokens .* a prompt with images") as error:
        check_input(event_of(count, ids), [1, 2, 3], ids_asked=True)
    assert fault_of(error.value) is Fault.REFUSED, "no other attempt would do better"


def event_of(count: int, ids: list[int] | None) -> bytes:
    return json.dumps(
        {"meta_info": {"prompt_tokens": count}} | ({} if ids is None else {"prompt_token_ids": ids})
    ).encode()


@pytest.mark.parametrize(
    ("keys", "function"), [({"video": "clips"}, None), ({"image": "images"}, "my.generate")], ids=["video", "function"]
)
def test_other_media_and_generate_functions_are_refused(
    args: Namespace, keys: dict[str, str], function: str | None
) -> None:
    args.multimodal_keys, args.custom_generate_function_path = keys, function
    with pytest.raises(ValueError, match=r"^--multimodal-keys .*: .* leave them out"):
        plugin.DataSource(args)


def test_a_prompt_with_a_video_is_named(args: Namespace) -> None:
    source = plugin.DataSource(args)
    source.dataset.origin_samples[1].multimodal_inputs["videos"] = ["a clip"]
    with pytest.raises(ValueError, match=r"^prompt 2 has videos, which april does not send"):
        list(islice(SlimeRollouts(args, source).prompts(), 2))


def test_a_text_with_a_placeholder_of_its_own_is_named(args: Namespace) -> None:
    source = plugin.DataSource(args)
    sample = source.dataset.origin_samples[1]
    sample.prompt = sample.prompt.replace("<|vision_end|>", "<|vision_end|> <|image_pad|>")
    with pytest.raises(ValueError, match="prompt 2: "):
        list(islice(SlimeRollouts(args, source).prompts(), 2))
