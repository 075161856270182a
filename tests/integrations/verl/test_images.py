"""Prompts with images in verl: its dataset, processor, agent-loop worker, TransferQueue and checkpoints."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transfer_queue", reason="verl is not installed here: scripts/setup_verl.sh")
pytest.importorskip("qwen_vl_utils", reason="verl is not installed here: scripts/setup_verl.sh")

import torch
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.tokenizer import hf_processor

from april.integrations.verl.agent_loops import TRACE_INFO, AgentLoops
from april.integrations.verl.images import media_of
from april.integrations.verl.manager import row_of
from april.integrations.verl.prompt_encoder import PromptEncoder
from april.integrations.verl.trainer import STATE
from april.rollout.episodes.environment import ObservationError
from tests import vision
from tests.integrations.verl.cluster import local_cluster
from tests.integrations.verl.trainer import (
    TinyTrainer,
    config_of,
    save_prompts_with_images,
    save_seeing_policy,
    seeing,
    train,
)

N, G = 3, 2
PAD = vision.PLACEHOLDER
ROLLOUT = "actor_rollout_ref.rollout"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_seeing_policy(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_prompts_with_images(tmp_path_factory.mktemp("data") / "prompts.parquet", 30, "decoded")


def images_config(model: Path, data: Path, folder: Path, *more: str) -> DictConfig:
    custom = f"+{ROLLOUT}.custom={{still_from:{N},standing:{N * G},images:{model}}}"
    return config_of(model, data, folder, custom, "trainer.val_before_train=false", "data.max_prompt_length=96", *more)


class Trained:
    """A run of two steps. Its folder has the checkpoints.

    Args:
        settings: of this run and the next.
    """

    def __init__(self, model: Path, data: Path, folder: Path, *settings: str) -> None:
        self.folder, self.settings = folder, settings
        self.config = images_config(model, data, folder, *settings, "trainer.total_training_steps=2")
        self.trainer = train(self.config, TinyTrainer)
        self.batches = self.trainer.batches


@pytest.fixture(scope="module", params=[(), (f"{ROLLOUT}.multi_turn.enable=true",)], ids=["prompts", "agent loops"])
def trained(
    request: pytest.FixtureRequest, model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Trained]:
    """With prompts that april encodes, and with agent loops that encode them."""
    with local_cluster():
        yield Trained(model, data, tmp_path_factory.mktemp("run"), *request.param)


def logprobs(policy: Any, row: dict[str, Any]) -> np.ndarray:
    """Of each response token, from the inputs that verl's engine passes to the model; shape [length]."""
    length = len(row["responses"])
    given = dict(row["multi_modal_inputs"])
    given.pop("images_seqlens", None)  # of verl's FLOPs counter
    with torch.no_grad():
        logits = policy(row["input_ids"][None], position_ids=row["position_ids"][:, None], **given).logits
    rows = logits[0, -length - 1 : -1]
    rows[:, [vision.PLACEHOLDER, vision.TOKEN["<|video_pad|>"]]] = -torch.inf
    return rows.log_softmax(-1).gather(1, row["responses"][:, None])[:, 0].numpy()


def check(batches: list[list[dict[str, Any]]], first_step: int = 1) -> None:
    """Whole groups with the images of their prompt, and the log-probability of each token's own policy."""
    policies = [seeing(version) for version in range(first_step + len(batches))]
    for step, batch in enumerate(batches, first_step):
        assert len(batch) == N * G
        for row in batch:
            i = row["extra_info"]["index"]
            assert f"prompt {i} of many: " in vision.tokenizer().decode(row["prompts"])
            grids = row["multi_modal_inputs"].get("image_grid_thw", torch.zeros(0, 3, dtype=torch.int))
            assert len(grids) == i % 3
            assert (row["prompts"] == vision.PLACEHOLDER).sum() == sum(int(grid.prod()) // 4 for grid in grids)
            versions = np.array(row["extra_fields"]["policy_versions"])
            assert versions[-1] <= step - 1
            own = np.stack([logprobs(policy, row) for policy in policies])[versions, np.arange(len(versions))]
            np.testing.assert_allclose(row["rollout_log_probs"].numpy(), own, atol=1e-4)


def test_images_across_interrupts_and_a_restart(model: Path, data: Path, trained: Trained) -> None:
    check(trained.batches)
    resumed = [row for row in trained.batches[1] if len(set(row["extra_fields"]["policy_versions"])) > 1]
    assert any(row["extra_info"]["index"] % 3 for row in resumed), "no sample with images was interrupted"

    text = (trained.folder / "global_step_2" / STATE).read_text()
    saved = json.loads(text)
    waiting = {
        (group["prompt"]["id"], sample["index"]): [token for _, ids, _ in sample["segments"] for token in ids]
        for group in saved["scheduler"]["state"]["buffer"]["groups"]
        for sample in group["samples"]
        if group["prompt"].get("features") or group["prompt"]["metadata"].get("images")
    }
    assert any(waiting.values()), "nothing unfinished with images was saved"
    assert len(saved["ahead"]) == N + 2, "the prompts that were encoded ahead, and two of the trainer's own"
    assert len(text) < 50_000, "pixels are in the checkpoint"
    config = images_config(model, data, trained.folder, *trained.settings, "trainer.total_training_steps=4")
    again = train(config, TinyTrainer)
    check(again.batches, first_step=3)
    rows = {(row["uid"], row["session_id"]): row for batch in again.batches for row in batch}
    continued = [key for key, begun in waiting.items() if begun and key in rows]
    assert continued, "no saved sample with images was trained on"
    for key in continued:
        assert rows[key]["responses"][: len(waiting[key])].tolist() == waiting[key]
    kept = again.agent_loop_manager.encoder._images
    assert set(kept) <= set(again.agent_loop_manager.rows), "images of prompts stay that are no longer in flight"
    done = [row["extra_info"]["index"] for batch in [*trained.batches, *again.batches] for row in batch[::G]]
    prompts = [*done, *(row["extra_info"]["index"] for row in again.agent_loop_manager.rows.values())]
    assert sorted(prompts) == list(range(len(prompts))), "a prompt was lost or begun twice across the restart"


def test_rows_are_those_of_verls_own_rollout(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's worker and its agent loop of one turn, given april's responses, write rows that equal april's."""
    written: list[dict[str, Any]] = []

    async def put(keys: list[str], fields: Any, tags: Any, partition_id: str) -> None:
        written.extend(row_of(fields, i) for i in range(len(keys)))

    async def generate(request_id: str, **request: Any) -> Any:
        images = request["image_data"] or []
        assert len(images) == row["extra_info"]["index"] % 3
        given = {"token_ids": row["responses"].tolist(), "log_probs": row["rollout_log_probs"].tolist()}
        return SimpleNamespace(**given, num_preempted=None, routed_experts=None, extra_fields={})

    kind, client = AgentLoopWorkerTQ.__ray_actor_class__, SimpleNamespace(generate=generate)
    queue = SimpleNamespace(init=lambda: None, async_kv_batch_put=put)
    monkeypatch.setitem(kind._agent_loop_postprocess.__globals__, "tq", queue)
    worker = kind(trained.config, client, None, None)
    dataset = RLHFDataset(str(trained.config.data.train_files), worker.tokenizer, trained.config.data, worker.processor)
    rows = [row for batch in trained.batches for row in batch]
    for row in rows:
        written.clear()
        item = {**dataset[row["extra_info"]["index"]], "uid": row["uid"], "global_steps": row["global_steps"]}
        loop = worker._run_agent_loop(
            {}, TRACE_INFO, agent_name="single_turn_agent", trace=False, session_id=row["session_id"], **item
        )
        asyncio.run(loop)
        (own,) = written
        # Times, rewards, versions and april's tag are not verl's to write here; a decoded image is no longer a file.
        others = {"metrics", "rm_scores", "extra_fields", "tag", "raw_prompt"}
        assert set(row) - others == set(own) - others
        for name in set(own) - others:
            assert_equal(row[name], own[name], name)
        count = row["extra_info"]["index"] % 3
        assert media_of(row["raw_prompt"]) == media_of(own["raw_prompt"]) == ["image"] * count
        assert set(own["extra_fields"]) <= set(row["extra_fields"])
    assert {row["position_ids"].shape[0] for row in rows} == {4}, "mrope's positions, and those of text"


def assert_equal(one: Any, other: Any, name: str) -> None:
    if isinstance(one, dict):
        assert set(one) == set(other), name
        for key in one:
            assert_equal(one[key], other[key], f"{name}.{key}")
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, name
        assert torch.equal(one, other), name
    else:
        assert one == other, name


def worker_of(config: DictConfig, model: Path) -> Any:
    """What an encoder needs of verl's agent-loop worker."""
    OmegaConf.resolve(config)
    processor = hf_processor(str(model))
    return SimpleNamespace(
        config=config,
        processor=processor,
        tokenizer=processor.tokenizer,
        rollout_config=config.actor_rollout_ref.rollout,
        dataset_cls=RLHFDataset,
        hf_model_type="qwen2_5_vl",
    )


class Rows:
    """An encoder, and verl's dataset of files."""

    def __init__(
        self, model: Path, folder: Path, *settings: str, agent_loops: bool = False, column: str = "paths"
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.data = save_prompts_with_images(folder / "prompts.parquet", 6, column)
        self.config = images_config(model, self.data, folder, *settings)
        self.worker = worker_of(self.config, model)
        self.encoder = PromptEncoder(self.worker, agent_loops)
        self.dataset = RLHFDataset(str(self.data), self.worker.tokenizer, self.config.data, self.worker.processor)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.dataset[index], "uid": f"uid-{index}"}


@pytest.fixture
def rows(model: Path, tmp_path: Path) -> Rows:
    return Rows(model, tmp_path)


def content(*parts: Any) -> dict[str, Any]:
    return {"uid": "it", "raw_prompt": [{"role": "user", "content": list(parts)}]}


def test_threads_encode_rows_and_read_images(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()
    real = RLHFDataset._process_multi_modal_info.__func__

    def process(cls: Any, *args: Any, **kwargs: Any) -> Any:
        threads.add(threading.current_thread())
        return real(cls, *args, **kwargs)

    monkeypatch.setattr(RLHFDataset, "_process_multi_modal_info", classmethod(process))
    prompt = rows.encoder.start(rows[2]).result()
    assert threads
    assert threading.main_thread() not in threads
    first, second = prompt.features
    assert first.source == f"uid-2/0 ({rows.data.parent / '2-0.png'})"
    assert {prompt.token_ids[i] for i in range(second.offset, second.end)} == {vision.PLACEHOLDER}
    assert len(rows.encoder.images("uid-2", prompt.token_ids)) == 2
    assert rows.encoder.ahead == N
    rows.encoder.forget("uid-2")
    assert not rows.encoder.images("uid-2", prompt.token_ids)


def test_images_are_equal_however_they_are_stored(rows: Rows, model: Path, tmp_path: Path) -> None:
    one = tuple((f.digest, f.offset, f.length) for f in rows.encoder.prompt(rows[2]).features)
    for column in ("bytes", "decoded"):
        others = Rows(model, tmp_path / column, column=column)
        prompt = others.encoder.prompt(others[2])
        assert one == tuple((f.digest, f.offset, f.length) for f in prompt.features)
        assert [f.source for f in prompt.features] == ["uid-2/0", "uid-2/1"]


def test_an_image_that_is_missing_or_has_changed_is_one_line(rows: Rows) -> None:
    row, path = rows[1], rows.data.parent / "1-0.png"
    prompt = rows.encoder.prompt(row)
    rows.encoder.restore([prompt], {"uid-1": row})
    vision.picture(path, (24, 24), "blue")
    with pytest.raises(ValueError, match=rf"^data: image uid-1/0 \({path}\) has changed since its [^\n]*$"):
        rows.encoder.restore([prompt], {"uid-1": row})
    path.unlink()
    for call in (lambda: rows.encoder.prompt(row), lambda: rows.encoder.restore([prompt], {"uid-1": row})):
        with pytest.raises(ValueError, match=rf"^data: image uid-1/0 \({path}\) cannot be read: [^\n]*No such file"):
            call()
    path.write_bytes(b"no image")
    with pytest.raises(ValueError, match=rf"^data: image uid-1/0 \({path}\) cannot be read: cannot identify[^\n]*$"):
        rows.encoder.prompt(row)


def test_placeholders_that_do_not_fit_the_images_are_one_line(rows: Rows) -> None:
    image = {"type": "image", "image": str(rows.data.parent / "1-0.png")}
    text = {"type": "text", "text": "<|image_pad|>"}
    with pytest.raises(ValueError, match=r"^data: prompt it [^\n]*1 images[^\n]*$"):
        rows.encoder.prompt(content(image, text))
    with pytest.raises(ValueError, match=rf"^data: the text of prompt it has token {vision.PLACEHOLDER}, the [^\n]*$"):
        rows.encoder.prompt(content(text))
    with pytest.raises(ValueError, match=r"^data: prompt it [^\n]*0 images[^\n]*$"):
        rows.encoder.prompt(content({"type": "image_url", "image_url": image["image"]}))


def test_what_is_not_supported_is_named(rows: Rows, model: Path, tmp_path: Path) -> None:
    assert media_of([{"role": "user", "content": ["text", {"text": "more"}]}, {"role": "assistant"}]) == []
    assert media_of([{"role": "user", "content": ["text", {"image": "cat.png"}]}]) == ["image"]
    with pytest.raises(ValueError, match=r"^data.image_key = video in prompt it: april hands over images with vLLM"):
        rows.encoder.prompt(content({"type": "video", "video": "cat.mp4"}))
    image = {"type": "image", "image": str(rows.data.parent / "1-0.png")}
    rows.worker.processor.image_processor = SimpleNamespace(patch_size=14)
    with pytest.raises(ValueError, match=r"^data.image_key = image in prompt it, with SimpleNamespace: "):
        rows.encoder.prompt(content(image))
    sglang = Rows(model, tmp_path / "sglang", f"{ROLLOUT}.name=sglang")
    with pytest.raises(ValueError, match=r"in prompt it, with actor_rollout_ref.rollout.name=sglang: .*for SGLang"):
        sglang.encoder.prompt(content(image))
    short = Rows(model, tmp_path / "short", "data.max_prompt_length=16")
    with pytest.raises(ValueError, match=r"^data.max_prompt_length = 16: prompt uid-2 has \d+ tokens"):
        short.encoder.prompt(short[2])


async def test_a_request_of_an_agent_loop_has_the_first_images_of_its_prompt(model: Path, tmp_path: Path) -> None:
    rows = Rows(model, tmp_path, agent_loops=True)
    prompt = rows.encoder.start(rows[2]).result()
    assert prompt.token_ids == ()
    assert list(prompt.metadata) == ["uid", "images"]
    rows.encoder.restore([prompt], {"uid-2": rows[2]})
    worker = SimpleNamespace(
        tokenizer=rows.worker.tokenizer, model_config=SimpleNamespace(hf_config=None, generation_config=None)
    )
    loops = AgentLoops(worker, rows.encoder, {}, {}, 99)
    read = await rows.encoder._agent_loop.process_multi_modal_info(rows[2]["raw_prompt"])
    first, second = read["images"]
    settings = {"mm_processor_kwargs": {}}
    await loops.check_images("uid-2", [1, PAD, PAD, 1, PAD], {"image_data": [first, second], **settings})
    await loops.check_images("uid-2", [1, PAD], {"image_data": [first], **settings})
    await loops.check_images("uid-2", [1], {"image_data": None})
    for images, token_ids in (([second, first], [PAD, 1, PAD]), ([first], [PAD, 1, PAD]), (None, [PAD])):
        with pytest.raises(ObservationError, match="must be the first images of its prompt"):
            await loops.check_images("uid-2", token_ids, {"image_data": images, **settings})
    given = {"image_data": [first], "mm_processor_kwargs": {"max_pixels": 4}}
    with pytest.raises(ObservationError, match="mm_processor_kwargs"):
        await loops.check_images("uid-2", [1, PAD], given)
