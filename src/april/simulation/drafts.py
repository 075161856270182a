"""What drafts bring by the cost of verifying them: how many more tokens a second an engine samples.

A drafted token is drawn with the probability `acceptance` if all before it were, so a pass over d of them brings
1 + acceptance + ... + acceptance^d tokens of a sample that has a draft (speculative decoding: Leviathan et al.,
arXiv 2211.17192; the drafts are found, not computed, and cost nothing).
"""

from __future__ import annotations

from dataclasses import dataclass

from april.config.error import ConfigError
from april.config.settings import EngineSettings
from april.simulation.cost_model import CostModel

LONGEST = 8


def refuse_drafts(engine: EngineSettings) -> None:
    """Neither a simulated engine nor a measured cost model has drafts.

    Raises:
        ConfigError: this one has.
    """
    because = "how many drafts are accepted depends on the policy, and no cost model says it (docs/simulation.md)"
    if engine.draft_tokens:
        raise ConfigError(f"engine.draft_tokens = {engine.draft_tokens}: {because}; add --draft-tokens 0")
    if option := engine.speculative_option:
        raise ConfigError(f"engine.server_args names {option}: {because}; take a recipe without")


@dataclass(frozen=True, slots=True)
class Gain:
    """The best length of drafts, in tokens (0: none pays), and how many times the tokens/s it brings."""

    drafted: int
    times: float


def tokens_of_a_pass(drafted: int, acceptance: float) -> float:
    """Tokens that a pass over `drafted` drafted tokens brings a sample, on average."""
    return sum(acceptance**place for place in range(drafted + 1))


def best_draft(
    cost: CostModel, batch: int, kv_tokens: float, acceptance: float, coverage: float = 1.0, longest: int = LONGEST
) -> Gain:
    """The draft length that samples the most tokens a second.

    Args:
        batch: samples that decode together.
        kv_tokens: of KV cache that each holds on average.
        acceptance: chance of a drafted token to be drawn if all before it were.
        coverage: share of the passes of a sample for which there is a draft. All of a batch are counted as being
            computed for the draft's length, which is cautious.
    """
    plain = cost.verification(batch, 0, kv_tokens)
    gains = [Gain(0, 1.0)]
    for drafted in range(1, longest + 1):
        tokens = 1 + coverage * (tokens_of_a_pass(drafted, acceptance) - 1)
        gains.append(Gain(drafted, tokens * plain / cost.verification(batch, drafted, kv_tokens)))
    return max(gains, key=lambda gain: gain.times)


def crossover(
    cost: CostModel, kv_tokens: float, acceptance: float, times: float, coverage: float = 1.0, longest: int = LONGEST
) -> int:
    """The largest batch, of those that the engine holds, at which drafts bring `times` the tokens/s; 0 if none does."""
    held = int(min(cost.slots, cost.kv_tokens / max(kv_tokens, 1.0)))
    batches = range(held, 0, -1)
    enough = (b for b in batches if best_draft(cost, b, kv_tokens, acceptance, coverage, longest).times >= times)
    return next(enough, 0)
