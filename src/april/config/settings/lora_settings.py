"""Settings of low-rank adapters."""

from __future__ import annotations

from dataclasses import dataclass

from april.config.ranges import (
    NotNegative,
    Positive,
)


@dataclass(kw_only=True)
class LoraSettings:
    """Low-rank adapters in place of training all parameters (needs the extra `lora`).

    Args:
        rank: Rank of the adapters; 0 trains all parameters.
        alpha: Scale: the adapters' output is multiplied by alpha / rank; unset: twice the rank.
        target_modules: Names of the modules that get adapters; unset: every linear layer but the head and, with
            images, the vision tower. Names that the language model has adapt it alone; others may name the tower.
    """

    rank: NotNegative[int] = 0
    alpha: Positive[int] | None = None
    target_modules: tuple[str, ...] = ()

    @property
    def scale_alpha(self) -> int:
        """Alpha, with the default resolved."""
        return 2 * self.rank if self.alpha is None else self.alpha
