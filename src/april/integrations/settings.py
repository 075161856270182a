"""april's settings in a framework's configuration.

Invariant: an error message is one line with the setting as the user writes it, its value, and the remedy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from april.rollout.params import MAX_STALENESS, RolloutParams


def at(config: Any, path: str, default: Any = None) -> Any:
    """Return the value at a dotted path of attributes and keys, or `default` if one of them is missing."""
    for part in path.split("."):
        if isinstance(config, Mapping) and part in config:
            config = config[part]
        elif hasattr(config, part):
            config = getattr(config, part)
        else:
            return default
    return config


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Number of groups in flight, and their staleness bound.

    Args:
        over_sampling_batch_size: number of groups in flight (N'), or "auto" to choose it from measurements.
        max_staleness: maximum number of weight updates between a group's first token and the step that trains on it.
    """

    over_sampling_batch_size: Any = "auto"
    max_staleness: int = MAX_STALENESS

    @classmethod
    def read(cls, given: Mapping[str, Any], spelling: str = "april.{}") -> Self:
        """Read settings from a configuration file or, as text, from a command line.

        Raises:
            ValueError: a name is unknown, or a value is neither a number nor "auto".
        """
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                there_are = " and ".join(map(spelling.format, known))
                raise ValueError(f"{spelling.format(name)}: april has no such setting, only {there_are}")
        return cls(**{name: number(value, spelling.format(name)) for name, value in given.items()})

    def params(
        self,
        rollout_batch_size: int,
        n_samples_per_prompt: int,
        names: Mapping[str, str],
        spelling: str = "april.{}",
        **more: Any,
    ) -> RolloutParams:
        """Return the rollout parameters, checked against the framework's batch size and group size.

        Args:
            names: the framework's names of `rollout_batch_size` and `n_samples_per_prompt`, for error messages; also
                names of april's settings that are not spelled by `spelling`.
            more: further fields of `RolloutParams`.

        Raises:
            ValueError: a setting is out of range.
        """
        return RolloutParams(
            rollout_batch_size=rollout_batch_size,
            n_samples_per_prompt=n_samples_per_prompt,
            over_sampling_batch_size=self.over_sampling_batch_size,
            max_staleness=self.max_staleness,
            fill_routes=True,
            names={field.name: spelling.format(field.name) for field in fields(self)} | dict(names),
            **more,
        )


def number(value: Any, name: str) -> Any:
    """Convert a number written as text; return numbers and "auto" unchanged.

    Raises:
        ValueError: the text is not a whole number; the message contains `name`.
    """
    if not isinstance(value, str) or value == "auto":
        return value
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{name} = {value}: give a number, or auto") from None
