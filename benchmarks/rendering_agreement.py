"""The template reader and the package `renderers`, compared token by token on the chat templates that both know.

For each chat template that the package trl ships, with a tokenizer trained here: whether the reader extends its
conversations and parses its calls, which families of the package agree with the template, and on random turns and
messages whether both give the same suffix. Nothing is downloaded.

    .frameworks/clients/bin/python benchmarks/rendering_agreement.py
"""

from __future__ import annotations

import random
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from record import save, version

sys.path.insert(0, str(Path(__file__).parents[1]))

from april.rendering.conversation import TemplateError
from april.rendering.model_family import ASKED, MORE, PROBE_TOOL, RESULT, ModelFamily, families
from april.rendering.template_reader import TemplateReader
from tests.rendering.tokenizers import TEMPLATES, tokenizer

WORDS = ["x", " is", "\n", "\n\n", "中文", " 12", ".", "<", "|", "{", '"', "é", " ", "</", "im_end"]
TURNS = 200


def compared(name: str) -> dict[str, Any]:
    tokens = tokenizer(name)
    stops = [tokens.eos_token_id]
    found: dict[str, Any] = {"reader": True, "reader refuses": "", "families": {}, "families with tools": {}}
    reader: TemplateReader | None = None
    try:
        reader = TemplateReader(tokens, stops)
        found["reader with tools"] = True
        reader.check_tools([PROBE_TOOL])
    except TemplateError as error:
        found["reader" if reader is None else "reader with tools"] = False
        found["reader refuses"] = str(error).split(":")[0]
    for tools, key in ((False, "families"), (True, "families with tools")):
        for family in families():
            with suppress(Exception):
                other = ModelFamily(family, tokens, stops, None, tools)
                found[key][family] = _equal(reader, other, tools) if reader is not None else None
    return found


def _equal(reader: TemplateReader, other: ModelFamily, tools: bool) -> dict[str, int]:
    """Count the random turns after which both give the same suffix."""
    rng, counts = random.Random(0), {"same": 0, "different": 0, "only the reader": 0, "only the family": 0}
    offered = [PROBE_TOOL] if tools else []
    prompt = reader.render([ASKED], offered)
    for _ in range(TURNS):
        turn = reader._tokenizer("".join(rng.choices(WORDS, k=rng.randint(1, 12))), add_special_tokens=False).input_ids
        if reader._opens_thinking:
            turn = [*reader._tokenizer("So.\n</think>\n\n", add_special_tokens=False).input_ids, *turn]
        if rng.random() < 0.8:
            turn = [*turn, reader._tokenizer.eos_token_id]
        messages = rng.choice([[RESULT], [RESULT, RESULT], [RESULT, MORE], [MORE]] if tools else [[MORE], [MORE, MORE]])
        ours = reader.extend(prompt, turn, messages, offered)
        theirs = other.extend(prompt, turn, messages, offered)
        if ours is not None and theirs is not None:
            counts["same" if list(ours) == list(theirs) else "different"] += 1
        else:
            counts["only the reader"] += ours is not None
            counts["only the family"] += theirs is not None
    return counts


def main() -> None:
    results = {}
    began = time.perf_counter()
    for path in sorted(TEMPLATES.glob("*.jinja")):
        if not path.stem.endswith("_training"):
            results[path.stem] = compared(path.stem)
            print(path.stem, results[path.stem])
    save(
        __file__,
        {
            "renderers": version("renderers"),
            "trl": version("trl"),
            "turns each": TURNS,
            "seconds": round(time.perf_counter() - began, 1),
            "templates": results,
        },
    )


if __name__ == "__main__":
    main()
