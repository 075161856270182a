"""OpenRLHF with active partial rollouts: `python -m april.integrations.openrlhf` in place of
`python -m openrlhf.cli.train_ppo_ray`, with the same flags.
"""

from april.integrations.requirement import require

require("openrlhf", "0.11", extra="openrlhf")

from april.integrations.openrlhf.trainer import PPOTrainer, install, main  # noqa: E402
from april.integrations.settings import Settings  # noqa: E402

__all__ = ["PPOTrainer", "Settings", "install", "main"]
