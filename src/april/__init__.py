"""april: active partial rollouts for reinforcement learning of language models (APRIL, arXiv 2509.18521)."""

from april.engines.stream_engine import StreamEngine
from april.rollout.admission.admission import Admission
from april.rollout.admission.fixed import FixedAdmission
from april.rollout.batch import RolloutBatch
from april.rollout.buffer import Rejection
from april.rollout.engine import Capacity, Chunk, ChunkError, Engine, EngineError, Fault
from april.rollout.episodes.environment import EnvironmentLost, EnvStep, TokenIds, Turn
from april.rollout.event_loop import EventLoop
from april.rollout.params import FaultSettings, RolloutParams
from april.rollout.rewards import RewardError
from april.rollout.sampling import FinishReason, SamplingParams
from april.rollout.scheduler import RolloutScheduler
from april.rollout.staleness import StalenessError
from april.rollout.step_stats import RejectionError
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.reward import Reward
from april.rollout.trajectory.sample import Sample
from april.rollout.trajectory.segment import ENVIRONMENT, Segment

__version__ = "0.1.0"

__all__ = [
    "ENVIRONMENT",
    "Admission",
    "Capacity",
    "Chunk",
    "ChunkError",
    "Engine",
    "EngineError",
    "EnvStep",
    "EnvironmentLost",
    "EventLoop",
    "Fault",
    "FaultSettings",
    "FinishReason",
    "FixedAdmission",
    "Group",
    "Prompt",
    "Rejection",
    "RejectionError",
    "Reward",
    "RewardError",
    "RolloutBatch",
    "RolloutParams",
    "RolloutScheduler",
    "Sample",
    "SamplingParams",
    "Segment",
    "StalenessError",
    "StreamEngine",
    "TokenIds",
    "Turn",
]
