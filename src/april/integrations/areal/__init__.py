"""AReaL with active partial rollouts: `from april.integrations.areal import PPOTrainer` in place of AReaL's, in a
script that AReaL's launcher starts.
"""

from april.integrations.requirement import require

require("areal", "1.0", extra="areal")

from april.integrations.areal.trainer import PPOTrainer  # noqa: E402

__all__ = ["PPOTrainer"]
