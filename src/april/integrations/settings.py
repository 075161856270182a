"""What an integration is told beside its framework's own settings, and what of the framework's it refuses.

Invariant: a refusal is one line that names the setting as its user writes it, the value, and what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from april.rollout.params import MAX_STALENESS, RolloutParams

Unsupported = Mapping[str, tuple[Any, str]]
"""Settings under which the framework would do something else: the value each may have, and what to do about another."""


def refuse(unsupported: Unsupported, value_of: Callable[[str, Any], Any], spelling: str = "{} = {}") -> None:
    """Go through a table of what is not supported.

    Args:
        value_of: a setting's value, given its name and the value to assume where the framework has no such setting.
        spelling: how the user writes a setting and its value.

    Raises:
        ValueError: names the setting and the remedy.
    """
    for name, (only, remedy) in unsupported.items():
        value = value_of(name, only)
        if value != only:
            raise ValueError(f"{spelling.format(name, value)}: {remedy}")


def at(config: Any, path: str, default: Any = None) -> Any:
    """The value at a dotted path of attributes, or `default` where one of them is missing."""
    for part in path.split("."):
        if not hasattr(config, part):
            return default
        config = getattr(config, part)
    return config


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How many groups are under way, and how old they may be.

    Args:
        over_sampling_batch_size: groups under way (N'), or "auto": chosen from what is observed.
        max_staleness: the most weight updates between a group's first token and the step that trains on it.
    """

    over_sampling_batch_size: Any = "auto"
    max_staleness: int = MAX_STALENESS

    @classmethod
    def read(cls, given: Mapping[str, Any], spelling: str = "april.{}") -> Self:
        """Of settings as they come from a file or, as text, from a command line.

        Raises:
            ValueError: april has no setting of that name, or its value is no number.
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
        """Both, checked against the framework's own sizes.

        Args:
            names: what errors call `rollout_batch_size` and `n_samples_per_prompt`, and april's own where they are not
                of this `spelling`.
            more: of `RolloutParams`.

        Raises:
            ValueError: names the setting.
        """
        return RolloutParams(
            rollout_batch_size=rollout_batch_size,
            n_samples_per_prompt=n_samples_per_prompt,
            over_sampling_batch_size=self.over_sampling_batch_size,
            max_staleness=self.max_staleness,
            names={field.name: spelling.format(field.name) for field in fields(self)} | dict(names),
            **more,
        )


def number(value: Any, name: str) -> Any:
    """A whole number that may be written as text, or "auto".

    Raises:
        ValueError: it is neither; the message says `name`.
    """
    if not isinstance(value, str) or value == "auto":
        return value
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{name} = {value}: give a number, or auto") from None
