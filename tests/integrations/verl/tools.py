"""A tool of verl's, for its agent loops."""

from __future__ import annotations

from verl.tools.function_tool import function_tool


@function_tool
def add(a: int, b: int) -> tuple[str, float, dict]:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return str(a + b), float(b), {}
