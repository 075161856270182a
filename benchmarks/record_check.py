"""Cost of reading and trying every record before the first step: 17,000 records, the size of DAPO-Math-17k.

Processor time of the process with all its threads, since other work may share the machine.

python benchmarks/record_check.py
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

from benchmarks.record import save, spread

from april.tasks.build import build_task
from april.tasks.encoding import Encoder
from april.tasks.prompts import PromptStream
from april.tasks.task import TaskSpec
from tests.tasks.conftest import CHAT_TEMPLATE, make_tokenizer

RECORDS, ROUNDS = 17_000, 5
QUESTION = "A train leaves at {} and arrives {} hours later. How far has it gone at 80 km/h? Think step by step. " * 3


def write(path: Path) -> None:
    """Conversations of 300 bytes; of the answers, every tenth is no plain number."""
    with path.open("w") as file:
        for i in range(RECORDS):
            answer = rf"\frac{{{i}}}{{7}}" if i % 10 == 0 else str(80 * i)
            content = QUESTION.format(*[i] * 6)
            file.write(json.dumps({"prompt": [{"role": "user", "content": content}], "answer": answer}) + "\n")


def measured(path: Path) -> tuple[float, float]:
    """Processor seconds of reading with the check of answers, and of encoding."""
    began = time.process_time()
    task = build_task(TaskSpec("records", path=str(path)))
    read = time.process_time()
    # A token per byte: a real tokenizer makes fewer tokens of the same text.
    PromptStream(task, Encoder(make_tokenizer(chat_template=CHAT_TEMPLATE)), max_prompt_length=4096).inspect()
    return read - began, time.process_time() - read


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "data.jsonl"
        write(path)
        size = path.stat().st_size
        rounds = [measured(path) for _ in range(ROUNDS)]
    columns = zip(("read_cpu_seconds", "encode_cpu_seconds"), zip(*rounds, strict=True), strict=True)
    save(__file__, {"records": RECORDS, "bytes": size, **{name: spread(values) for name, values in columns}})


if __name__ == "__main__":
    main()
