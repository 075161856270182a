"""What ranks do in the tests of checkpoints."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

from april.training.local import LocalLearner
from april.training.ranks import Ranks
from april.training.sharded import ShardedLearner, whole
from tests import tiny
from tests.ranks.updates import settings
from tests.training.steps import rollout


def fingerprint(learner: LocalLearner) -> dict[str, int]:
    """Of every tensor that training changes, to the bit."""
    tensors = {**dict(learner.model.named_parameters()), **learner.state()}
    return {name: zlib.crc32(whole(tensor).detach().numpy().tobytes()) for name, tensor in tensors.items()}


def save(ranks: Ranks, case: str, directory: str) -> None:
    learner = ShardedLearner(tiny.model(sharpness=1.0), settings(case), ranks, tiny.tokenizer())
    learner.train(rollout(1), 1)
    Path(directory).mkdir(exist_ok=True)
    ranks.wait()
    learner.save(Path(directory))
    found = fingerprint(learner)
    if ranks.leads:
        (Path(directory) / "fingerprint.json").write_text(json.dumps(found))


def load(ranks: Ranks, case: str, directory: str) -> None:
    """Bit for bit what was saved, and it trains on."""
    learner = ShardedLearner(policy(case, directory), settings(case), ranks, tiny.tokenizer())
    learner.load(Path(directory))
    assert fingerprint(learner) == json.loads((Path(directory) / "fingerprint.json").read_text())
    learner.train(rollout(2), 2)


def policy(case: str, directory: str) -> Any:
    """As a run that is resumed loads it."""
    if case == "lora":
        return tiny.model(sharpness=1.0)
    return type(tiny.model()).from_pretrained(directory)
