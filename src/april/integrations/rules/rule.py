"""Rules for a framework's settings: the check at run time, the table on the integration's page, and the scan of launch
scripts are all made from them.

Invariant: an error message is one line with the setting as the user writes it, its value, and the remedy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

log = logging.getLogger(__name__)

ValueOf = Callable[[str, Any], Any]
"""Returns a setting's value, given its name and the default for frameworks without that setting."""


class Verdict(StrEnum):
    """How april treats unsupported values of a setting."""

    REFUSED = "refused"
    IGNORED = "ignored, with a warning"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The values of one setting that april supports, and its treatment of other values.

    Args:
        setting: name in the framework's configuration.
        supported: supported values, for the page.
        reason: why other values are not supported, and the remedy; or the effect of a setting without other values.
        verdict: treatment of other values; None if all values are supported.
        holds: whether the configuration is supported. None if all values are supported, or if the check needs more than
            the configuration: its code then raises `error`.
        default: value for frameworks without that setting.
    """

    setting: str
    supported: str
    reason: str
    verdict: Verdict | None = Verdict.REFUSED
    holds: Callable[[ValueOf], bool] | None = None
    default: Any = None

    def broken(self, value_of: ValueOf) -> bool:
        return self.holds is not None and not self.holds(value_of)

    def error(self, value: Any, spelling: str = "{} = {}") -> ValueError:
        """Return the error for an unsupported value."""
        return ValueError(f"{spelling.format(self.setting, value)}: {self.reason}")


def only(
    setting: str, value: Any, reason: str, *, verdict: Verdict = Verdict.REFUSED, supported: str | None = None
) -> Rule:
    """Return the rule that april supports one value of a setting.

    Args:
        supported: text of the page, if not the value.
    """

    def holds(value_of: ValueOf) -> bool:
        return bool(value_of(setting, value) == value)

    return Rule(
        setting=setting,
        supported=supported or written(value),
        reason=reason,
        verdict=verdict,
        holds=holds,
        default=value,
    )


def ignored(setting: str, default: Any, reason: str) -> Rule:
    """Return the rule that values of a setting other than the default have no effect."""
    return only(setting, default, reason, verdict=Verdict.IGNORED)


def supported(setting: str, effect: str) -> Rule:
    """Return the rule that april supports all values of a setting."""
    return Rule(setting=setting, supported="all", reason=effect, verdict=None)


def written(value: Any) -> str:
    """Return a value as the page writes it: `unset` for None, and names in backticks."""
    return "unset" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def broken(rules: Sequence[Rule], value_of: ValueOf) -> Iterator[tuple[Rule, Any]]:
    """Yield the rules that the configuration breaks, each with the setting's value."""
    for rule in rules:
        if rule.broken(value_of):
            yield rule, value_of(rule.setting, rule.default)


def check(rules: Sequence[Rule], value_of: ValueOf, spelling: str = "{} = {}") -> None:
    """Raise an error for the first refused setting, and warn of every ignored one.

    Args:
        spelling: format of a setting and its value, as the user writes them.

    Raises:
        ValueError: a setting is not supported.
    """
    for rule, value in broken(rules, value_of):
        if rule.verdict is Verdict.REFUSED:
            raise rule.error(value, spelling)
        log.warning("%s is ignored: %s", spelling.format(rule.setting, value), rule.reason)


def table(rules: Sequence[Rule], name: str = "{}") -> str:
    """Return the table of settings in Markdown.

    Args:
        name: format of a setting's name, as the user writes it.
    """
    lines = ["| setting | supported | other values | effect, or reason and remedy |", "|---|---|---|---|"]
    for rule in rules:
        others = rule.verdict.value if rule.verdict else "–"
        lines.append(f"| `{name.format(rule.setting)}` | {rule.supported} | {others} | {rule.reason} |")
    return "\n".join(lines) + "\n"
