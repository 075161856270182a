"""Draw the images of this example, and make its policy: a small Qwen3-VL that can count, but often guesses instead.

An image shows up to two squares in each of four rows. The policy counts row by row, `1,0,2,1=4`, or guesses the sum at
once, `=3`. The warm start is supervised on both habits, and reinforcement learning has to find out which of them pays.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import re
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow
import torch
from PIL import Image, ImageDraw
from pyarrow import parquet
from reward import score
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from april import Group, SamplingParams
from april.algorithms.batch import Batch
from april.engines.embedded import EmbeddedEngine
from april.engines.pretrained import load_model, load_tokenizer
from april.images.store import ImageStore
from april.images.support import load_images
from april.rollout.evaluation import evaluate
from april.rollout.generation.in_flight import SharedEngine
from april.rollout.params import FaultSettings
from april.rollout.trajectory.prompt import Prompt
from april.tasks.encoding import Encoder
from april.tasks.records import read_records
from april.tasks.task import TaskSpec
from april.training.forward import PolicyModel

HERE = Path(__file__).parent
ROWS, COLUMNS, CELL = 4, 4, 8
"""Cells of an image, and their size in pixels: one embedding each."""
MOST = 2
"""Squares in a row."""
HELD_OUT, IMAGES = 64, 512
GUESSES = 0.6
"""How often the demonstrations guess."""
STEPS, BATCH_SIZE, LEARNING_RATE = 600, 32, 3e-3

PAD, UNK, END = "<pad>", "<unk>", "<|im_end|>"
SPECIAL = (PAD, UNK, END, "<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PIECES = ["user\n", "assistant\n", "\n", "How many squares?", ",", "=", *map(str, range(ROWS * MOST + 1))]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def draw(rng: random.Random) -> tuple[bytes, list[int]]:
    """Return an image as PNG, and the number of squares in each of its rows."""
    image = Image.new("RGB", (COLUMNS * CELL, ROWS * CELL), "white")
    pen, counts = ImageDraw.Draw(image), []
    for row in range(ROWS):
        columns = rng.sample(range(COLUMNS), rng.randint(0, MOST))
        counts.append(len(columns))
        for column in columns:
            left, top, size = column * CELL + rng.randint(0, 2), row * CELL + rng.randint(0, 2), rng.randint(3, 5)
            colour = rng.choice(["red", "green", "blue", "black"])
            pen.rectangle((left, top, left + size, top + size), fill=colour)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue(), counts


def write_records(folder: Path, seed: int = 0) -> None:
    """Write the records to train on, and the held-out ones: images are stored in the tables."""
    rng = random.Random(seed)
    drawn = [draw(rng) for _ in range(IMAGES + HELD_OUT)]
    for name, part in (("train", drawn[:IMAGES]), ("held_out", drawn[IMAGES:])):
        table = {
            "prompt": ["How many squares?"] * len(part),
            "image": [{"bytes": content, "path": None} for content, _ in part],
            "answer": [str(sum(counts)) for _, counts in part],
            "counts": [counts for _, counts in part],
        }
        parquet.write_table(pyarrow.table(table), folder / f"{name}.parquet")


def demonstration(rng: random.Random, counts: list[int]) -> str:
    if rng.random() < GUESSES:
        return f"={rng.randint(0, ROWS * MOST)}"
    return f"{','.join(map(str, counts))}={sum(counts)}"


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {piece: id for id, piece in enumerate([*SPECIAL, *PIECES])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=UNK))
    pattern = "|".join([*map(re.escape, ["user\n", "assistant\n", "How many squares?"]), r"[\s\S]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    own = {"pad_token": PAD, "eos_token": END, "unk_token": UNK, "chat_template": TEMPLATE}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **own)


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLForConditionalGeneration:
    token = tokenizer.convert_tokens_to_ids
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [4, 2, 2]},
        "bos_token_id": None,
        "eos_token_id": token(END),
        "pad_token_id": token(PAD),
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": CELL // 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }
    ids = {
        "image_token_id": token("<|image_pad|>"),
        "video_token_id": token("<|video_pad|>"),
        "vision_start_token_id": token("<|vision_start|>"),
        "vision_end_token_id": token("<|vision_end|>"),
    }
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)
    )


def prompts_of(name: str, tokenizer: Any, store: ImageStore) -> list[Prompt]:
    """The prompts of a table, as a run encodes them."""
    spec = TaskSpec(kind="records", path=str(HERE / f"{name}.parquet"), image_column="image")
    encoder = Encoder(tokenizer, images=store)
    return [encoder(problem) for problem in read_records(spec.path or "", spec).problems]


def warm_start(model: Any, tokenizer: Any, store: ImageStore, steps: int, seed: int) -> None:
    """Supervised training on demonstrations, of which only the response is learnt."""
    rng, prompts = random.Random(seed), prompts_of("train", tokenizer, store)
    policy, limit = PolicyModel(model.train()), SamplingParams(32)
    policy.take_images(store)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        samples = []
        for prompt in rng.sample(prompts, BATCH_SIZE):
            [sample] = Group.start(0, prompt, 1, limit, 0).samples
            text = demonstration(rng, prompt.metadata["metadata"]["counts"]) + END
            ids = tokenizer(text, add_special_tokens=False).input_ids
            sample.extend(ids, [0.0] * len(ids), 0)
            samples.append(sample)
        batch = Batch.of(samples, 0)
        loss = -policy(batch)[0].sum() / batch.mask.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step}: {loss.item():.3f} nats a token", flush=True)
    model.eval()


def measure(directory: Path) -> dict[str, Any]:
    """How often the policy in `directory` is right on held-out images, and how often it guesses."""
    import asyncio

    store = load_images(str(directory))
    assert isinstance(store, ImageStore)
    model, tokenizer = load_model(str(directory), torch.float32), load_tokenizer(str(directory))
    prompts = prompts_of("held_out", tokenizer, store)
    engine = EmbeddedEngine(model, images=store)
    sampling = SamplingParams(16, stop_token_ids=(tokenizer.eos_token_id,))

    async def rewards() -> list[tuple[float, bool]]:
        groups = await evaluate(SharedEngine(engine), prompts, 8, sampling, 7, 0, FaultSettings())
        return [
            (score(text, group.prompt.metadata["answer"]), "," not in text)
            for group in groups
            for sample in group.samples
            for text in [tokenizer.decode(sample.response_ids, skip_special_tokens=True)]
        ]

    found = asyncio.run(rewards())
    return {
        "accuracy": sum(right for right, _ in found) / len(found),
        "guesses": sum(guessed for _, guessed in found) / len(found),
        "accuracy_where_counted": sum(r for r, guessed in found if not guessed) / sum(not g for _, g in found),
        "responses": len(found),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers", "pillow")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the images and make the warm-started policy of this example.")
    parser.add_argument("--output", type=Path, default=HERE / "model", help="directory for the policy")
    parser.add_argument("--seed", type=int, default=0, help="for the weights and the demonstrations")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimiser steps")
    parser.add_argument("--figures", type=Path, default=HERE / "checkpoint.json", help="file for what was measured")
    parser.add_argument("--measure", action="store_true", help="only measure the policy that is there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    settings = {"seed": arguments.seed, "steps": arguments.steps, "batch_size": BATCH_SIZE, "peak_lr": LEARNING_RATE}
    if not arguments.measure:
        make(arguments)
    figures = {"settings": settings, **measure(arguments.output)}
    arguments.figures.write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures, indent=2))


def make(arguments: argparse.Namespace) -> None:
    """Write the records, teach a policy, and save it."""
    write_records(HERE)
    torch.manual_seed(arguments.seed)
    started = time.process_time()
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    sizes = {"shortest_edge": CELL * CELL, "longest_edge": (ROWS * CELL) * (COLUMNS * CELL)}
    processor = Qwen2VLImageProcessorPil(patch_size=CELL // 2, merge_size=2, size=sizes)
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters", flush=True)
    store = ImageStore(processor, model.config.image_token_id)
    warm_start(model, tokenizer, store, arguments.steps, arguments.seed)
    model.generation_config = GenerationConfig(eos_token_id=model.config.text_config.eos_token_id)
    model.to(torch.bfloat16).save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)
    processor.save_pretrained(arguments.output)
    print(f"{time.process_time() - started:.0f} CPU s")


if __name__ == "__main__":
    main()
