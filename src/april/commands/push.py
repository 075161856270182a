"""`april push DIR NAME`: upload a run's newest checkpoint to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from april.commands.help import help_asked_for, wrapped
from april.config.error import ConfigError

USAGE = """usage: april push DIR OWNER/NAME [--public]

Upload the newest checkpoint of the run in DIR to the Hugging Face hub, with a model card about its training.
A missing repository is created, private unless --public is given. Log in first: hf auth login."""


def run(args: list[str]) -> int:
    """`april push DIR NAME [--public]`."""
    if help_asked_for(args):
        print(wrapped(USAGE))
        return 0
    named = [argument for argument in args if argument != "--public"]
    if len(named) != 2 or any(argument.startswith("-") for argument in named):
        raise ConfigError("name a run and a repository: april push DIR OWNER/NAME [--public]")
    from april.training.checkpoint import CheckpointError
    from april.training.hub_upload import push_to_hub

    try:
        print(push_to_hub(Path(named[0]), named[1], private="--public" not in args))
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    return 0
