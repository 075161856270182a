"""Problems that the check finds in a recipe."""

from __future__ import annotations

from typing import Any

from april.config.checking import check_recipe
from april.config.error import ConfigError
from april.config.recipe import recipe_from_dict


def problems(recipe: dict[str, Any]) -> list[str]:
    """Return the check's lines for a recipe whose other settings are sound."""
    try:
        check_recipe(recipe_from_dict({"model": {"path": "org/model"}, **recipe}))
    except ConfigError as error:
        return str(error).splitlines()
    return []
