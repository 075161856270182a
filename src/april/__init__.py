"""april: active partial rollouts for reinforcement learning of language models (APRIL, arXiv 2509.18521)."""

from april.admission import Admission, FixedAdmission
from april.buffer import Rejection
from april.engine import Capacity, Chunk, Engine, EngineError, StreamEngine
from april.reward import RewardError
from april.scheduler import RejectionError, RolloutScheduler
from april.staleness import StalenessError
from april.step import Step
from april.trajectory import ENVIRONMENT, FinishReason, Group, Prompt, Sample, SamplingParams, Segment

__version__ = "0.1.0"

__all__ = [
    "ENVIRONMENT",
    "Admission",
    "Capacity",
    "Chunk",
    "Engine",
    "EngineError",
    "FinishReason",
    "FixedAdmission",
    "Group",
    "Prompt",
    "Rejection",
    "RejectionError",
    "RewardError",
    "RolloutScheduler",
    "Sample",
    "SamplingParams",
    "Segment",
    "StalenessError",
    "Step",
    "StreamEngine",
]
