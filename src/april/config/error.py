"""Errors in a user's settings."""

from __future__ import annotations


class ConfigError(Exception):
    """Invalid settings, one line for each."""
