"""Two updates by a learner on Megatron, against the same updates in one process."""

from __future__ import annotations

import math
from typing import Any

from april.training.local import LocalLearner
from april.training.ranks import Ranks
from tests import tiny
from tests.integrations import megatron_on_cpu
from tests.ranks.updates import settings
from tests.training.steps import rollout


def compare(ranks: Ranks, cases: list[str], directory: str, tied: bool = False) -> None:
    """Metrics to 1e-4, gradients of the first update to 1e-5, of the second to 1e-4, and parameters to 1e-5."""
    megatron_on_cpu.install()
    from april.training.megatron_learner import MegatronLearner

    for case in cases:
        made: dict[str, Any] = {"sharpness": 1.0, "tie_word_embeddings": tied}
        ours = MegatronLearner(tiny.model(**made), settings(case), ranks, tiny.tokenizer())
        alone = LocalLearner(tiny.model(**made), settings(case), tiny.tokenizer())
        for number, gradients in ((1, 1e-5), (2, 1e-4)):
            found, expected = (learner.train(rollout(number), number) for learner in (ours, alone))
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert math.isclose(found[name], value, rel_tol=1e-4, abs_tol=1e-5), (case, name, found[name], value)
            parameter, gradient = ours.policy.translated(lambda own: own), ours.policy.translated(lambda own: own.grad)
            worst = [0.0, 0.0]
            for name, other in alone.model.named_parameters():
                worst[0] = max(worst[0], float((parameter(name) - other).detach().abs().max()))
                error = (gradient(name) - other.grad).norm() / (other.grad.norm() + 1e-4)
                worst[1] = max(worst[1], float(error))
            print(f"{case}: update {number}: parameters {worst[0]:.1e}, gradients {worst[1]:.1e}", flush=True)
            assert worst[0] <= 1e-5, (case, worst)
            assert worst[1] <= gradients, (case, worst)
        print(f"{case}: ok", flush=True)
