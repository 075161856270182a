"""Advantages, losses and off-policy corrections: pure functions on tensors.

`advantages` and `losses` hold the published formulas, `corrections` what makes stale tokens harmless, `logprobs` the
log-probabilities they start from, `dapo` the sample filters and length penalty of DAPO, and `catalogue` the named
algorithms with their settings. Import the modules themselves: this package alone imports no torch.
"""

from april.algorithms.catalogue import ALGORITHMS, Algorithm, algorithm

__all__ = ["ALGORITHMS", "Algorithm", "algorithm"]
