"""TRL's trainers with active partial rollouts.

`from april.integrations.trl import GRPOTrainer, PartialRollouts`; TRL's asynchronous trainer is
`april.integrations.trl.async_grpo.AsyncGRPOTrainer`, in a module named as TRL's own.
"""

from april.integrations.requirement import require

require("trl", "1.16", extra="trl")

from april.integrations.trl.settings import PartialRollouts  # noqa: E402
from april.integrations.trl.trainer import GRPOTrainer  # noqa: E402

__all__ = ["GRPOTrainer", "PartialRollouts"]
