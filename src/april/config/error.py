"""What a user set wrong."""

from __future__ import annotations


class ConfigError(Exception):
    """Settings that cannot be run, one line for each."""
