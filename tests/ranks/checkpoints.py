"""What ranks do in the tests of checkpoints."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from april.training.learner_settings import LearnerSettings
from april.training.local import LocalLearner
from april.training.ranks import Ranks
from april.training.sharded import ShardedLearner, whole
from april.training.stored_names import cut
from tests import tiny
from tests.ranks.updates import settings
from tests.training.steps import rollout


def fingerprint(learner: LocalLearner) -> dict[str, int]:
    """Of every tensor that training changes, to the bit."""
    tensors = {**dict(learner.model.named_parameters()), **learner.state()}
    return {name: zlib.crc32(whole(tensor).detach().numpy().tobytes()) for name, tensor in tensors.items()}


def save(ranks: Ranks, case: str, directory: str, kind: str = "model") -> None:
    """After an update, the engines get the weights that are in the files."""
    learner = ShardedLearner(
        getattr(tiny, kind)(sharpness=1.0), LearnerSettings.of(settings(case)), ranks, tiny.tokenizer()
    )
    learner.train(rollout(1), 1)
    Path(directory).mkdir(exist_ok=True)
    ranks.wait()
    learner.save(Path(directory))
    found = fingerprint(learner)
    sent = dict(cut((pair for names in learner.buckets() for pair in learner.gather(names)), learner.parts))
    with safe_open(Path(directory) / "model.safetensors", "pt") as file:
        assert sent.keys() == set(file.keys())
        assert all(torch.equal(tensor, file.get_tensor(name)) for name, tensor in sent.items())
    if ranks.leads:
        (Path(directory) / "fingerprint.json").write_text(json.dumps(found))


def load(ranks: Ranks, case: str, directory: str, kind: str = "model") -> None:
    """The state equals the saved one bit for bit, and training continues."""
    learner = ShardedLearner(policy(case, directory, kind), LearnerSettings.of(settings(case)), ranks, tiny.tokenizer())
    learner.load(Path(directory))
    assert fingerprint(learner) == json.loads((Path(directory) / "fingerprint.json").read_text())
    learner.train(rollout(2), 2)


def policy(case: str, directory: str, kind: str = "model") -> Any:
    """As a run that is resumed loads it."""
    made = getattr(tiny, kind)(sharpness=1.0)
    return made if case == "lora" else type(made).from_pretrained(directory)
