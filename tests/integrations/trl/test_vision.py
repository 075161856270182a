"""TRL's own trainer on prompts with images."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from PIL import Image

from april.images.source import ImageError
from april.integrations.trl import PartialRollouts
from april.integrations.trl.checkpoint import STATE
from april.integrations.trl.settings import refuse_images
from april.integrations.trl.stored_images import StoredImages
from tests import vision
from tests.integrations.trl.trainer import SMALL, Watched

COLOURS = ("red", "blue", "green", "black", "yellow", "gray")


def picture(number: int) -> Image.Image:
    """Images of two sizes."""
    image = Image.new("RGB", (24 + number % 2 * 16, 16), COLOURS[number % len(COLOURS)])
    image.paste("white", (number % 8, 0, number % 8 + 6, 6))
    return image


def rows(count: int = 12, several: bool = False) -> Dataset:
    """Rows with an image each, or with none, one or two."""
    table: dict[str, list[Any]] = {
        "prompt": [[{"role": "user", "content": f"Is it {n}?"}] for n in range(count)],
        "answer": list(range(count)),
    }
    if several:
        table["images"] = [[picture(n + i) for i in range(n % 3)] for n in range(count)]
        feature: Any = datasets.List(datasets.Image())
        column = "images"
    else:
        table["image"], feature, column = [picture(n) for n in range(count)], datasets.Image(), "image"
    without = Dataset.from_dict({name: values for name, values in table.items() if name != column})
    return Dataset.from_dict(table, features=datasets.Features({**without.features, column: feature}))


class Colour:
    """Scores by length, and keeps the images and answers that it gets."""

    __name__ = "colour"

    def __init__(self) -> None:
        self.seen: list[tuple[Any, int]] = []

    def __call__(self, completions: list[Any], answer: list[int], **columns: Any) -> list[float]:
        self.seen += zip(columns.get("image") or columns["images"], answer, strict=True)
        return [float(len(completion[0]["content"]) % 3) for completion in completions]


def trainer(folder: Path, rollouts: dict[str, Any] | None = None, **settings: Any) -> Any:
    own = {name: settings.pop(name) for name in ("train_dataset", "eval_dataset", "peft_config") if name in settings}
    given = {"model": vision.model(settings.pop("architecture", "Qwen3VL"), sharpness=2.0)}
    given |= {name: settings.pop(name) for name in ("processing_class", "model") if name in settings}
    config = {
        **SMALL,
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "max_completion_length": 24,
        "max_steps": 3,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    return Watched(
        reward_funcs=Colour(),
        args=trl.GRPOConfig(**{**config, **settings}),
        partial_rollouts=PartialRollouts(
            **{"over_sampling_batch_size": 8, "max_num_seqs": 16, "stream_interval": 2, **(rollouts or {})}
        ),
        **{"train_dataset": rows(), "processing_class": vision.processor(), **own, **given},
    )


def scores(trained: Any, output: dict[str, Any]) -> torch.Tensor:
    """Log-probabilities of all completion tokens by TRL's inputs and the trainer's model, without the placeholder."""
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], 1)
    mask = torch.cat([output["prompt_mask"], output["completion_mask"]], 1)
    names = ("pixel_values", "image_grid_thw", "mm_token_type_ids")
    more = {name: output[name] for name in names if name in output}
    with torch.no_grad():
        logits = trained.model(input_ids=ids, attention_mask=mask, **more).logits / trained.temperature
    logits[..., vision.PLACEHOLDER] = -torch.inf
    width = output["completion_ids"].shape[1]
    drawn = logits[:, -width - 1 : -1].log_softmax(-1).gather(-1, output["completion_ids"][..., None])[..., 0]
    return drawn[output["completion_mask"].bool()]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A trainer after three batches of four groups, eight in flight, whose weights stay the same."""
    trained = trainer(tmp_path_factory.mktemp("run"), learning_rate=0.0)
    trained.train()
    yield trained
    trained.close()


def interrupted(groups: list[Any]) -> int:
    return sum(len(set(sample.versions.tolist())) > 1 for group in groups for sample in group.samples)


def test_rewards_and_loss_get_the_images_of_each_completions_row(run: Any) -> None:
    given = [group for groups, _ in run.batches for group in groups]
    assert [answer for _, answer in run.reward_funcs[0].seen] == [
        g.prompt.metadata["answer"] for g in given for _ in "1234"
    ]
    for image, answer in run.reward_funcs[0].seen:
        assert (image.size, image.tobytes()) == (picture(answer).size, picture(answer).tobytes())
    for groups, output in run.batches:
        answers = [group.prompt.metadata["answer"] for group in groups for _ in group.samples]
        expected = vision.image_processor()(images=[picture(answer) for answer in answers], return_tensors="pt")
        assert torch.equal(output["pixel_values"], expected["pixel_values"])
        assert torch.equal(output["image_grid_thw"], expected["image_grid_thw"])
        assert output["num_images"] == [1] * len(answers)


def test_interrupted_completions_have_the_log_probabilities_of_the_whole(run: Any) -> None:
    assert any(interrupted(groups) for groups, _ in run.batches)
    for _, output in run.batches:
        found = output["old_per_token_logps"][output["completion_mask"].bool()]
        assert (found - scores(run, output)).abs().max() < 1e-4
        assert not (output["completion_ids"] == vision.PLACEHOLDER).any()


def test_interrupted_completions_are_those_of_a_run_without_interruptions(tmp_path: Path) -> None:
    """With top_k = 1, the response depends on the prompt and its images alone."""
    settings = {"learning_rate": 0.0, "generation_kwargs": {"top_k": 1}, "train_dataset": rows(several=True)}
    found: list[dict[int, list[int]]] = []
    for name, in_flight in (("partial", 8), ("whole", 4)):
        trained = trainer(tmp_path / name, {"over_sampling_batch_size": in_flight}, **settings)
        trained.train()
        groups = [group for batch, _ in trained.batches for group in batch]
        assert bool(interrupted(groups)) is (name == "partial")
        found.append({g.prompt.metadata["answer"]: s.response_ids for g in groups for s in g.samples})
        trained.close()
    common = set(found[0]) & set(found[1])
    assert {answer % 3 for answer in common} == {0, 1, 2}  # prompts with none, one and two images
    assert all(found[0][answer] == found[1][answer] for answer in common)


@pytest.mark.parametrize("architecture", vision.ARCHITECTURES)
def test_engine_and_loss_agree_on_images_of_every_row(tmp_path: Path, architecture: str) -> None:
    """Of rows with none, one and two images, before the first update."""
    trained = trainer(
        tmp_path,
        {"over_sampling_batch_size": 4},
        architecture=architecture,
        train_dataset=rows(several=True),
        per_device_train_batch_size=12,
        gradient_accumulation_steps=1,
        max_steps=1,
        temperature=0.7,
    )
    trained.model.train()
    inputs = next(iter(trained.get_train_dataloader()))
    output = trained._generate_and_score_completions(inputs)
    found = output["old_per_token_logps"][output["completion_mask"].bool()]
    assert (found - scores(trained, output)).abs().max() < 1e-4
    blind = {**output, "pixel_values": torch.zeros_like(output["pixel_values"])}
    assert (found - scores(trained, blind)).abs().max() > 1e-2
    trained.close()


@pytest.mark.parametrize("on_update", ["recompute", "keep"])
def test_a_resumed_run_trains_on_the_same_samples_as_the_saved_one(tmp_path: Path, on_update: str) -> None:
    settings = {"save_strategy": "steps", "save_steps": 1, "train_dataset": rows(several=True)}
    straight = trainer(tmp_path, {"on_update": on_update}, **settings)
    straight.train()
    straight.close()
    assert any(interrupted(groups) for groups, _ in straight.batches[1:])
    saved = json.loads((tmp_path / "checkpoint-1" / STATE).read_text())
    prompts = [group["prompt"] for group in saved["scheduler"]["state"]["buffer"]["groups"]]
    assert any(prompt.get("features") for prompt in prompts)

    resumed = trainer(tmp_path, {"on_update": on_update}, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    resumed.close()
    taken = [[group.to_dict() for group in groups] for groups, _ in resumed.batches]
    assert taken == [[group.to_dict() for group in groups] for groups, _ in straight.batches[1:]]
    for ours, theirs in zip(resumed.model.parameters(), straight.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("adapted", [False, True])
def test_engine_and_loss_agree_after_updates(tmp_path: Path, adapted: bool) -> None:
    """Of all parameters, the vision tower included, or of adapters; evaluation sees the rows that it asks for."""
    settings = {"eval_dataset": rows(4), "per_device_eval_batch_size": 4, "max_steps": 2, "num_generations_eval": 2}
    adapters = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    settings |= {"peft_config": adapters} if adapted else {}
    trained = trainer(tmp_path, {"over_sampling_batch_size": 4}, **settings)
    trained.train()
    assert {answer for _, answer in trained.reward_funcs[0].seen[:8]} <= set(range(12))
    trained.reward_funcs[0].seen.clear()
    trained.evaluate()
    assert sorted(answer for _, answer in trained.reward_funcs[0].seen) == [0, 0, 1, 1, 2, 2, 3, 3]
    trained.model.train()
    output = trained._generate_and_score_completions(next(iter(trained.get_train_dataloader())))
    newest = torch.cat(
        [torch.from_numpy(s.versions == trained.rollouts.adapter.version) for _, s in trained.rollouts.rows]
    )
    found = output["old_per_token_logps"][output["completion_mask"].bool()]
    assert newest.any()
    assert (found - scores(trained, output))[newest].abs().max() < 1e-4
    trained.close()


class TestRefused:
    @staticmethod
    def refused(folder: Path, message: str, rollouts: dict[str, Any] | None = None, **settings: Any) -> None:
        with pytest.raises(ValueError, match=message) as caught:
            trainer(folder, rollouts, **settings)
        assert "\n" not in str(caught.value)

    def test_a_tokenizer(self, tmp_path: Path) -> None:
        self.refused(
            tmp_path, "its rows have images, but processing_class is a token", processing_class=vision.tokenizer()
        )

    def test_vllm(self, tmp_path: Path) -> None:
        self.refused(tmp_path, "use_vllm = True: TRL's vLLM gets no images", use_vllm=True, vllm_mode="server")
        self.refused(tmp_path, "use_vllm = True: TRL's vLLM gets no images", use_vllm=True, vllm_mode="colocate")

    def test_another_engine(self, tmp_path: Path) -> None:
        servers = {"engine": "sglang", "urls": ("http://127.0.0.1:9",)}
        self.refused(tmp_path, 'engine = "sglang" gets no images from april; choose "embedded"', servers)

    def test_a_policy_of_another_family(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("april.images.support.FAMILY", ("gemma4",))
        self.refused(tmp_path, "images, but april trains gemma4 with images, and the policy is qwen3_vl")

    def test_padding_on_the_right(self, tmp_path: Path) -> None:
        processor = vision.processor()
        processor.tokenizer.padding_side = "right"
        self.refused(tmp_path, "processing_class: it pads on the right", processing_class=processor)

    def test_tools_and_several_processes(self, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        settings = PartialRollouts()
        with monkeypatch.context() as patch:
            patch.setattr(run, "tools", [len])
            with pytest.raises(ValueError, match="tools and environment_factory take prompts"):
                refuse_images(run, settings)
        monkeypatch.setattr(run, "accelerator", SimpleNamespace(num_processes=2))
        with pytest.raises(ValueError, match="april trains on images in one process only"):
            refuse_images(run, settings)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": [{"role": "user", "content": "<|image_pad|>?"}]}, "its text has 2 placeholders for 1 image"),
        ({"prompt": [{"role": "user", "content": [{"type": "text", "text": "?"}]}]}, "Number of images provided"),
        ({"prompt": "<|image_pad|>"}, "its text has 1 placeholder for no images"),
    ],
)
def test_a_prompt_whose_placeholders_are_not_its_images_is_refused(run: Any, row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run.rollouts.encode({"image": picture(0), **row})


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK"])
def test_images_are_stored_without_loss(tmp_path: Path, mode: str) -> None:
    image = Image.linear_gradient("L").resize((16, 16)).convert("RGB").convert(mode)
    stored = StoredImages(tmp_path / "images")
    row = {"images": [image, image], "text": "x", "number": 1, "nested": {"image": (image,)}}
    kept = json.loads(json.dumps(stored.store(row)))
    assert len(list((tmp_path / "images").iterdir())) == 1
    [loaded] = stored.load([kept])
    expected = image.convert("RGB") if mode == "CMYK" else image
    for found in (*loaded["images"], loaded["nested"]["image"][0]):
        assert (found.mode, found.tobytes()) == (expected.mode, expected.tobytes())
    assert (loaded["text"], loaded["number"]) == ("x", 1)


def test_a_changed_or_missing_file_is_named(tmp_path: Path) -> None:
    stored = StoredImages(tmp_path)
    row = stored.store({"image": picture(1)})
    [path] = tmp_path.iterdir()
    stored.store({"image": picture(2)})
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ImageError, match=rf"image {path}: has changed since it was stored"):
        stored.load([row])
    assert stored.store({"image": picture(1)}) == row  # a row that is drawn again replaces the file
    assert stored.load([row])[0]["image"].tobytes() == picture(1).tobytes()
    path.unlink()
    with pytest.raises(ImageError, match=rf"image {path}: cannot be read: No such file"):
        stored.load([row])
