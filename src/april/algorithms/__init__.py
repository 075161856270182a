"""Advantages, losses and off-policy corrections: pure functions on tensors.

`advantages` and `losses` contain the published formulas, `corrections` the off-policy corrections, `logprobs` the
computation of log-probabilities, `dapo` the sample filters and length penalty of DAPO, `turn_rewards` the rewards by
turn, and `catalogue` the named algorithms with their settings. Import the modules themselves: this package does not
import torch.
"""

from april.algorithms.catalogue import ALGORITHMS, Algorithm, algorithm

__all__ = ["ALGORITHMS", "Algorithm", "algorithm"]
