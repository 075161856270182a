"""Check of the installed version of the framework that an integration is written for."""

from __future__ import annotations

import importlib.metadata
import os
import warnings

from april.extras import install_command

ANY_VERSION = "APRIL_ANY_VERSION"
"""Environment variable that allows versions that the integration was not tested with."""


def require(package: str, *series: str, extra: str) -> None:
    """Require `package` in one of the given version series, as in `require("trl", "1.16", ...)`.

    Raises:
        ModuleNotFoundError: the package is not installed.
        ImportError: another version is installed, and `APRIL_ANY_VERSION` is not set. Both messages contain the
            command that installs the right version.
    """
    wanted = " or ".join(f"{version}.*" for version in series)
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise ModuleNotFoundError(
            f"april's integration needs {package} {wanted}, which is not installed: {install_command(extra)}",
            name=package,
        ) from None
    if any(f"{found}.".startswith(f"{version}.") for version in series):
        return
    if os.environ.get(ANY_VERSION):
        warnings.warn(f"april's integration was written for {package} {wanted}, and {found} is installed", stacklevel=2)
    else:
        raise ImportError(
            f"april's integration was written for {package} {wanted}, and {found} is installed: "
            f"pip install '{package}=={series[-1]}.*'",
            name=package,
        )
