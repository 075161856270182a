"""`april algorithms`: list the algorithms, corrections, router replays and rewards that a recipe can name."""

from __future__ import annotations

import inspect
from types import ModuleType

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from april.algorithms.catalogue import ALGORITHMS, CORRECTIONS, UNBOUNDED, Algorithm
from april.commands.help import help_asked_for, wrapped
from april.config.error import ConfigError
from april.rollout.trajectory.routes import RouterReplay
from april.tasks import format, length

USAGE = (
    "usage: april algorithms\n\nThe algorithms, corrections and rewards a recipe can name, with settings and sources."
)
OWN = {
    "task": "The data set's own scorer; for records math-verify.",
    "math-verify": "1 if the answer is the reference answer by its meaning, else 0.",
}
REPLAYS: dict[RouterReplay, str] = {
    "off": "The trainer's routers choose the experts of every token (the default).",
    "recorded": "Experts that the engine chose when it drew the next token (R3, arXiv 2510.11370).",
    "latest": "Experts that the engine chose when it last computed the token.",
}
PARTS = (format, length)
"""Module with ready-made reward terms."""


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
    """Print the lists: each entry with its settings and its source."""
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
    console.print(Text("\n[training] router_replay, for mixtures of experts\n", style="bold"))
    for name, meaning in REPLAYS.items():
        console.print(Text(name, style="bold cyan"))
        console.print(Padding(Text(meaning), (0, 0, 0, 4)))
    console.print(Text("\n[task] image_column names the column of images, for models of the Qwen-VL families"))
    console.print(Text("with the engines embedded, vllm and sglang."))
    console.print(Text("\n[task] reward, or [task.rewards] with a weight for each of several\n", style="bold"))
    for name, meaning in {**OWN, **{name: about for part in PARTS for name, about in _rewards(part)}}.items():
        console.print(Text(name, style="bold cyan"))
        console.print(Padding(Text(meaning), (0, 0, 0, 4)))
    console.print(
        Text("\nA function of your own is my_rewards.py:score, beside the recipe or in the current directory.")
    )


def _rewards(part: ModuleType) -> list[tuple[str, str]]:
    """Return a module's rewards by their paths in recipes, with the first paragraph of each docstring."""
    functions = inspect.getmembers(part, inspect.isfunction)
    return [
        (f"{part.__name__}:{name}", " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split()))
        for name, function in functions
        if function.__module__ == part.__name__
    ]


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
        f"correction {entry.correction}",
        f"value head: GAE with gamma {entry.gamma:g}, lambda {entry.lam:g}" if entry.value_head else "",
    ]
    return "; ".join(part for part in parts if part)
