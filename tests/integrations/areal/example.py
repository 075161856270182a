"""Run one of AReaL's example scripts on a CPU: `python example.py SCRIPT --config FILE`.

The script is AReaL's, with april's `PPOTrainer` in the place of AReaL's. What stands in: SGLang's servers
(`controller.py`). Facts about the steps go to the file that APRIL_RECORD names.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import areal
from areal.infra.data_service import DataController
from areal.infra.rpc.rtensor import RTensor

import tests.integrations.areal.controller  # noqa: F401 - puts the stand-ins in place
from april.integrations.areal import PPOTrainer

OVER = 7
# The data service starts slowly, on a busy machine.
DataController._WORKERS_READY_TIMEOUT = 600.0


def difference(trajectory: dict[str, Any]) -> float:
    """The largest difference between the log-probabilities of drawing and those that the actor computes."""
    computed = RTensor.localize(trajectory["prox_logp"])[:, :-1]  # of each next token
    place = slice(1, 1 + computed.shape[1])
    drawn, mask = trajectory["logprobs"][:, place], trajectory["loss_mask"][:, place].bool()
    return float((drawn - computed)[mask].abs().max())


class RecordingTrainer(PPOTrainer):
    def __init__(self, config: Any, **more: Any) -> None:
        super().__init__(config, over_sampling_batch_size=OVER, **more)
        self.steps: list[dict[str, Any]] = []
        compute = self.actor.compute_advantages

        def recorded(batch: Any) -> Any:
            self.steps.append(self._facts(batch))
            Path(os.environ["APRIL_RECORD"]).write_text(json.dumps(self.steps))
            return compute(batch)

        self.actor.compute_advantages = recorded

    def _facts(self, batch: list[dict[str, Any]]) -> dict[str, Any]:
        taken = self.rollouts.latest
        assert taken is not None
        return {
            "version": taken.version,
            "groups": [len(group.outcomes) for group in taken.groups],
            "turns": [sample.turns for group in taken.groups for sample in group.outcomes],
            "difference": max(map(difference, batch)),
            "rewards": [float(reward) for one in batch for reward in one["rewards"]],
            "rows": sum(len(trajectory["rewards"]) for trajectory in batch),
            "staleness": taken.metrics()["staleness_max"],
            "versions": sorted({int(v) for one in batch for v in one["versions"][one["loss_mask"].bool()]}),
            "quarantined": [left_out.error for left_out in taken.quarantined],
        }


if __name__ == "__main__":
    areal.PPOTrainer = RecordingTrainer
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
