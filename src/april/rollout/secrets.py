"""Which environment variables a process that runs somebody's function does not see."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

SECRET = re.compile(r"KEY|TOKEN(?!IZER)|SECRET|PASSW|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
"""Names of variables that workers do not see."""
SECRET_VALUE = re.compile(r"://[^/@\s]+:[^/@\s]+@")
"""Values that workers do not see: addresses with a password in them."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def secrets(environment: Mapping[str, str]) -> list[str]:
    """The variables of an environment that look like secrets."""
    return [name for name, value in environment.items() if SECRET.search(name) or SECRET_VALUE.search(value)]


def forget_secrets(keep: Sequence[str]) -> None:
    """Make this process a worker: without variables that look like secrets, and with one thread for its numbers."""
    for name in secrets(os.environ):
        if name not in keep:
            del os.environ[name]
    os.environ.update(dict.fromkeys(THREADS, "1"))
