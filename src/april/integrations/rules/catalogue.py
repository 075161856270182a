"""The rules of every framework, and how its users write a setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from april.integrations.rules import areal_rules, openrlhf_rules, skyrl_rules, slime_rules, verl_rules
from april.integrations.rules.rule import Rule


@dataclass(frozen=True)
class FrameworkRules:
    """Rules for a framework's settings.

    Args:
        rules: in the order of the page.
        name: format of a setting's name, as the user writes it.
    """

    rules: Sequence[Rule]
    name: str = "{}"


FRAMEWORKS = {
    "slime": FrameworkRules(slime_rules.RULES, "--{}"),
    "verl": FrameworkRules(verl_rules.RULES),
    "openrlhf": FrameworkRules(openrlhf_rules.RULES, "--{}"),
    "skyrl": FrameworkRules(skyrl_rules.RULES),
    "areal": FrameworkRules(areal_rules.RULES),
}
"""Rules by the name of the framework."""
