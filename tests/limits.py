"""The time limits of tests."""

HANG = 600.0
"""Seconds that only something that hangs takes, however busy the machine is."""

NEVER = 10 * HANG
"""Seconds of a time limit of april's own that must not help a test to pass."""
