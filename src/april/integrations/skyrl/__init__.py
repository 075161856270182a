"""SkyRL with active partial rollouts: `trainer.override_entrypoint=april.integrations.skyrl` behind
`python -m skyrl.train.entrypoints.main_base`, with the same settings.
"""

from april.integrations.requirement import require

require("skyrl", "0.4", extra="skyrl-train")

from april.integrations.settings import Settings  # noqa: E402
from april.integrations.skyrl.trainer import Experiment, Trainer, main  # noqa: E402

__all__ = ["Experiment", "Settings", "Trainer", "main"]
