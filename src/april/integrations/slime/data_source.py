"""slime's rollout function and data source."""

from __future__ import annotations

import logging
from argparse import Namespace
from pathlib import Path
from typing import Any

from slime.rollout import sglang_rollout
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.utils.async_utils import run

from april.integrations.slime.functions import for_evaluation
from april.integrations.slime.rollouts import SlimeRollouts
from april.integrations.slime.settings import check_settings
from april.rollout.state_files import read_state, write_state

log = logging.getLogger(__name__)


def rollout(
    args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Generate a rollout for slime. Without `DataSource` as the data source, checkpoints do not include the buffer.

    With `--partial-rollout`, `--over-sampling-batch-size` is the number of groups in flight (N'); without it, rollouts
    are synchronous and on-policy. Two settings belong in the file of `--custom-config-path`: `april_max_staleness`
    (default 5), the maximum number of weight updates between a group's first token and the rollout that
    returns it, and `april_over_sampling_batch_size`, which may be `auto`.

    Raises:
        ValueError: a setting is not supported, or a prompt is too long for the servers.
        EngineError: no server answers, or requests keep failing. No sampled token is lost; call again.
        RewardError: a reward model failed.
        StalenessError: the weights were updated more often than the bound allows.
    """
    if evaluation:
        return sglang_rollout.generate_rollout(for_evaluation(args), rollout_id, data_source, evaluation=True)
    rollouts = getattr(data_source, "rollouts", None)
    if rollouts is None:
        if not isinstance(data_source, DataSource):
            log.warning("checkpoints lack unfinished samples: use --data-source-path %s.DataSource", __package__)
        rollouts = data_source.rollouts = SlimeRollouts(args, data_source)
    return run(rollouts.collect(rollout_id))


class DataSource(RolloutDataSourceWithBuffer):
    """slime's data source. Its checkpoint includes the rollout buffer: `<save>/rollout/april_<rollout_id>.json`.

    Groups that `add_samples` returns to it are started again from their prompts.
    """

    def __init__(self, args: Namespace) -> None:
        check_settings(args)
        super().__init__(args)
        self.rollouts: SlimeRollouts | None = None

    def save(self, rollout_id: int) -> None:
        super().save(rollout_id)
        if self.rollouts is not None:
            path = state_path(self.args.save, rollout_id)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_state(path, run(self.rollouts.state_dict(rollout_id)))

    def load(self, rollout_id: int | None = None) -> None:
        super().load(rollout_id)
        if self.args.load is None or rollout_id is None:
            return
        path = state_path(self.args.load, rollout_id)
        if path.exists():
            self.rollouts = SlimeRollouts(self.args, self, read_state(path))
        else:
            log.info("%s does not exist: there are no unfinished samples to resume", path)


def state_path(checkpoint: str, rollout_id: int) -> Path:
    return Path(checkpoint) / "rollout" / f"april_{rollout_id}.json"
