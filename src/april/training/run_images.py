"""Images of a run's prompts."""

from __future__ import annotations

from pathlib import Path

from april.config.error import ConfigError
from april.config.image_rules import image_problem
from april.config.recipe import Recipe
from april.engines.pretrained import ModelFolderError, check_configuration
from april.images.source import kept_folder
from april.images.store import ImageStore, NoImages
from april.images.support import load_images


def run_images(recipe: Recipe, checkpoint: Path | None = None) -> ImageStore | NoImages:
    """Return the images of the recipe's policy, or the reason why its prompts may have none.

    Args:
        checkpoint: checkpoint to resume from, with the image processor of the policy.

    Raises:
        ConfigError: the recipe names a column of images, and the policy takes none.
    """
    if (problem := image_problem(recipe)) is not None:
        images: ImageStore | NoImages = NoImages(problem)
    else:
        path = str(checkpoint or Path(recipe.model.path).expanduser())
        try:
            check_configuration(path)
        except ModelFolderError as error:
            raise ConfigError(str(error) if checkpoint else f"model.path = {path!r}: {error}") from None
        images = load_images(path, kept_images(recipe))
    if isinstance(images, NoImages) and recipe.task.image_column is not None:
        raise ConfigError(f"task.image_column = {recipe.task.image_column!r}: {images.reason}")
    return images


def kept_images(recipe: Recipe) -> Path:
    """Return the folder of the images that a run of the recipe keeps."""
    return kept_folder(Path(recipe.reporting.output))
