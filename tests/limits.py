"""The one time limit of tests."""

HANG = 600.0
"""Seconds that only something that hangs takes, however busy the machine is."""
