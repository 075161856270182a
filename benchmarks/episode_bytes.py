"""Bytes of an episode whose client leaves out the policy's thinking, so that each turn begins a sequence of its own.

Without sharing, each sequence holds the whole conversation before it. The policy is scripted; a message of the client
has 100 words, which are tokens of the test's template. Reported per number of turns: bytes of the journal, of the
buffer's state in a checkpoint, and of memory (tracemalloc), each with beginnings shared and stored whole.

    OMP_NUM_THREADS=1 python benchmarks/episode_bytes.py
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any
from unittest.mock import patch

from record import save

sys.path.insert(0, str(Path(__file__).parents[1]))

from april import SamplingParams
from april.rollout.episodes import turn_places
from april.rollout.episodes.conversation_tree import ConversationTree
from april.rollout.episodes.turns import TurnRequest
from april.rollout.journal.journal import Journal
from tests.branching import Client, Programs
from tests.rollout.test_agent_episodes import build
from tests.talking import STOP

WORDS = " ".join(str(number % 50) for number in range(100))
CONTEXT = 1_000_000


async def measure(turns: int) -> dict[str, int]:
    asked = asyncio.get_running_loop().create_future()

    async def forgetful(client: Client) -> float:
        messages: list[Any] = [{"role": "user", "content": WORDS}]
        for turn in range(turns):
            own = json.loads(json.dumps(messages))  # objects of its own, as those of a request over HTTP
            await client.world.episodes.reply(client.start.key, TurnRequest(own))
            messages += [{"role": "assistant", "content": str(turn)}, {"role": "user", "content": WORDS}]
        asked.set_result(None)
        await asyncio.Event().wait()
        return 0.0

    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "journal", flush_seconds=0)
        journal.seek(None)
        sampling = SamplingParams(max_tokens=100_000, max_turns=turns + 1, stop_token_ids=(STOP,))
        alone = {"rollout_batch_size": 1, "over_sampling_batch_size": 1, "n_samples_per_prompt": 1}
        tracemalloc.start()
        rollouts = build(Programs(forgetful), journal=journal, sampling=sampling, context=CONTEXT, **alone)
        async with rollouts:
            batch = asyncio.create_task(rollouts.next_batch())
            await asked
            rollouts.engine.seen.clear()  # type: ignore[attr-defined]
            gc.collect()
            memory = tracemalloc.get_traced_memory()[0]
            tracemalloc.stop()
            journal.flush()
            written = sum(file.stat().st_size for file in (Path(folder) / "journal").rglob("*") if file.is_file())
            saved = len(json.dumps(rollouts.buffer.state_dict()))
            batch.cancel()
            await asyncio.gather(batch, return_exceptions=True)
        journal.close()
    return {"journal": written, "checkpoint": saved, "memory": memory}


def main() -> None:
    results = []
    for turns in (25, 50, 100):
        shared = asyncio.run(measure(turns))
        with (
            patch.object(turn_places, "LEAST_SHARED", CONTEXT),
            patch.object(ConversationTree, "beginning", lambda self, match: None),
        ):
            whole = asyncio.run(measure(turns))
        results.append({"turns": turns, "shared": shared, "whole": whole})
        print(results[-1])
    save(__file__, {"episodes": results})


if __name__ == "__main__":
    main()
