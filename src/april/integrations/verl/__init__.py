"""verl's V1 trainer with active partial rollouts: `trainer.v1.trainer_mode=april`, with
`VERL_USE_EXTERNAL_MODULES=april.integrations.verl`.

Three classes, registered from outside: the trainer mode, which brings the other two along, a sampler, and an agent-loop
manager.
"""

from april.integrations.requirement import require

require("verl", "0.9.1", extra="verl")
require("TransferQueue", "0.1", extra="verl")

from april.integrations.verl.manager import AprilRolloutManager  # noqa: E402
from april.integrations.verl.replay_buffer import AprilReplayBuffer  # noqa: E402
from april.integrations.verl.trainer import AprilTrainer  # noqa: E402

__all__ = ["AprilReplayBuffer", "AprilRolloutManager", "AprilTrainer"]
