"""Upload of a run's newest checkpoint to the Hugging Face hub, with a model card.

Invariants:
- only the model directory and the card are uploaded: no optimizer, rollouts, journal or local paths;
- every figure on the card comes from the run's `metrics.jsonl`, from steps up to the checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from april import __version__
from april.algorithms.catalogue import algorithm
from april.config.error import ConfigError
from april.config.recipe import Recipe
from april.engines.pretrained import LEFT_OUT
from april.tasks.hub import HUB_NAME
from april.training.resume import newest_checkpoint, saved_recipe

KEPT = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
"""Patterns of a checkpoint's files that are uploaded,"""
OWN = ("april.json", "manifest.json", "training/*", "adapter/*")
"""except these."""
SECTIONS = ("model", "task", "rollout", "algorithm", "training", "lora")
"""Sections of the recipe on the card."""


def push_to_hub(run: Path, name: str, private: bool = True) -> str:
    """Upload the run's newest checkpoint to the model repository `name` ("owner/name") and return its URL.

    Raises:
        ConfigError: the run has no checkpoint, `name` is not valid, or the hub refuses.
    """
    if not HUB_NAME.fullmatch(name):
        raise ConfigError(f"{name!r}: name a repository of the hub, owner/name")
    checkpoint = newest_checkpoint(run)
    if checkpoint is None:
        raise ConfigError(f"{run}: there is no checkpoint yet")
    return _upload(checkpoint, model_card(run, checkpoint), name, private)


def _upload(checkpoint: Path, card: str, name: str, private: bool) -> str:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    api = huggingface_hub.HfApi()
    try:
        url = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=checkpoint, allow_patterns=list(KEPT), ignore_patterns=list(OWN))
        api.upload_file(repo_id=name, path_or_fileobj=card.encode(), path_in_repo="README.md")
    except (HfHubHTTPError, OSError) as error:
        raise ConfigError(f"the hub did not take {name}: {' '.join(str(error).split())}") from None
    return str(url)


def model_card(run: Path, checkpoint: Path) -> str:
    """Return the model card: Markdown with the hub's metadata."""
    from huggingface_hub import ModelCardData

    recipe, step = saved_recipe(run), int(checkpoint.name.rpartition("-")[2])
    base, data = recipe.model.path, recipe.task.path or ""
    head = ModelCardData(
        base_model=base if _on_hub(base) else None,
        datasets=[data] if _on_hub(data) else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["reinforcement-learning", "april", recipe.algorithm.algorithm],
    )
    lines = [*_story(recipe, step), *_lacks(checkpoint), *_figures(_metrics(run, step)), *_settings(recipe)]
    return f"---\n{head.to_yaml()}\n---\n\n" + "\n".join(lines) + "\n"


def _story(recipe: Recipe, step: int) -> Iterator[str]:
    chosen, rollout = algorithm(recipe.algorithm.algorithm), recipe.rollout
    task = recipe.task.name or recipe.task.path or ""
    yield f"# {_bare(recipe.model.path)}, trained on {_bare(task)}"
    yield ""
    yield (
        f"{step} steps of reinforcement learning with {chosen.title} ({', '.join(chosen.sources)}) by april "
        f"{__version__}, active partial rollouts (arXiv 2509.18521). A step trained on {rollout.rollout_batch_size} "
        f"prompts with {rollout.n_samples_per_prompt} responses each{_bound(recipe)}. Tokens of older policies were "
        f"corrected for by `{recipe.algorithm.correction_in_use}`."
    )
    yield ""


def _lacks(checkpoint: Path) -> Iterator[str]:
    lacking = json.loads((checkpoint / "config.json").read_text()).get(LEFT_OUT)
    if lacking:
        yield f"Tensors of the base model that this model lacks: {', '.join(f'`{name}`' for name in lacking)}."
        yield ""


def _bound(recipe: Recipe) -> str:
    bound = recipe.rollout_params().max_staleness
    return f", begun at most {bound} weight updates before it" if bound is not None else ""


def _figures(metrics: list[Mapping[str, Any]]) -> Iterator[str]:
    def column(name: str) -> list[float]:
        return [line[name] for line in metrics if line.get(name) is not None]

    shown = [
        (f"{label} {when}", f"{values[at]:.3f}")
        for name, label in (("eval_reward", "held-out reward"), ("accuracy", "held-out accuracy"))
        for at, when in ((0, "before"), (-1, "after"))
        if (values := column(name))
    ]
    if stale := column("staleness_mean"):
        off = column("off_policy_token_share")
        shown += [
            ("staleness, mean, in weight updates", f"{sum(stale) / len(stale):.2f}"),
            ("staleness, largest", f"{max(column('staleness_max')):.0f}"),
            ("tokens sampled by an older policy", f"{100 * sum(off) / len(off):.1f} %"),
        ]
    yield from ("| | |", "|---|---|", *(f"| {label} | {value} |" for label, value in shown), "")


def _settings(recipe: Recipe) -> Iterator[str]:
    settings = recipe.redacted()
    yield from ("## Recipe", "", "```json")
    yield json.dumps({section: _without_paths(settings[section]) for section in SECTIONS}, indent=2)
    yield "```"


def _metrics(run: Path, step: int) -> list[Mapping[str, Any]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line.get("step", 0) <= step]


def _on_hub(path: str) -> bool:
    return HUB_NAME.fullmatch(path) is not None and not os.path.exists(path)


def _bare(path: str) -> str:
    return path if _on_hub(path) else Path(path).name


def _without_paths(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_paths(item) for name, item in value.items()}
    return _bare(value) if isinstance(value, str) and os.path.isabs(value) else value
