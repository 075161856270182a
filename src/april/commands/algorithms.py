"""`april algorithms`: the algorithms and corrections that a recipe can name, for people to read."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from april.algorithms.catalogue import ALGORITHMS, CORRECTIONS, UNBOUNDED, Algorithm
from april.commands.help import help_asked_for, wrapped
from april.config.error import ConfigError

USAGE = "usage: april algorithms\n\nThe algorithms and corrections a recipe can name, with settings and sources."


def run(args: list[str]) -> int:
    """`april algorithms`."""
    if help_asked_for(args):
        print(wrapped(USAGE))
        return 0
    if args:
        raise ConfigError(f"april algorithms takes no arguments, and {args[0]} is one")
    print_algorithms()
    return 0


def print_algorithms(console: Console | None = None) -> None:
    """Print both lists, each entry with what it sets and where that was published."""
    console = console or Console(highlight=False)
    console.print(Text("[algorithm] algorithm\n", style="bold"))
    for entry in ALGORITHMS.values():
        sources = ", ".join(f"arXiv {source}" for source in entry.sources)
        console.print(Text.assemble((entry.name, "bold cyan"), f"  {entry.title} ({sources})"))
        for line in (_settings(entry), entry.note):
            if line:
                console.print(Padding(Text(line), (0, 0, 0, 4)))
    console.print(Text("\n[algorithm] correction, for tokens that an older policy sampled\n", style="bold"))
    for name, rule in CORRECTIONS.items():
        console.print(Text(name, style="bold cyan"))
        console.print(Padding(Text(rule.summary), (0, 0, 0, 4)))
        bounds = ", ".join(
            f"correction_{bound} {'none' if value == UNBOUNDED else f'{value:g}'}"
            for bound, value in rule.bounds.items()
        )
        if bounds:
            console.print(Padding(Text(bounds), (0, 0, 0, 4)))
    console.print(Text("\ncorrection_max_age goes with each: older tokens carry no gradient."))


def _settings(entry: Algorithm) -> str:
    low, high = ("none" if eps == UNBOUNDED else f"{eps:g}" for eps in (entry.eps_low, entry.eps_high))
    kl = f"KL {entry.kl_coefficient:g} ({entry.kl_estimator}, in the {entry.kl_place})"
    parts = [
        f"advantage {entry.advantage}",
        f"loss {entry.loss}",
        f"eps_low {low}, eps_high {high}",
        f"mean: {entry.aggregation}",
        kl if entry.kl_coefficient else "",
        "dynamic sampling" if entry.dynamic_sampling else "",
        "overlong filter" if entry.overlong_filter else "",
        "soft overlong penalty" if entry.soft_overlong_penalty else "",
        f"value head: GAE with gamma {entry.gamma:g}, lambda {entry.lam:g}" if entry.value_head else "",
    ]
    return "; ".join(part for part in parts if part)
