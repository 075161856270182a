"""Reference answers: JSON values as text, and as the LaTeX that math-verify reads.

math-verify reads LaTeX. Answers in data are JSON values and plain text: `true`, `1e-05`, `[3, 4]`, `3 1/4`,
`18 dollars`. Read as LaTeX, these mean products of letters, intervals, or their first number alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, NamedTuple

LARGEST_EXPONENT = 400
"""Largest power of ten that is written out: float64 ends at 308."""
SCIENTIFIC = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
MIXED = r"[-+]?\d+ \d+/\d+"
"""A mixed number: `3 1/4`."""
GROUPED = r"\d{1,3}(?:,\d{3})+|\d{1,3}(?:[ \u00a0\u202f]\d{3})+"
"""A number with commas or spaces between its thousands."""
NUMBER = rf"{MIXED}|[-+]?(?:{GROUPED}|\d+)(?:\.\d+)?(?:/\d+)?|[-+]?\.\d+"
CURRENCY = r"(?:[A-Z]{0,3}[$€£¥₹])"
UNIT = r"[A-Za-z]{2,}|[A-Za-z]+/[A-Za-z]+(?:\^?[23]|[²³])?|[A-Za-z]{2,}(?:\^?[23]|[²³])"
"""A word of a unit: `dollars`, `km/h`, `m/s^2`, `cm²`. A single letter is more often a variable than a unit."""
QUANTITY = re.compile(rf"{CURRENCY}?({NUMBER})(?: ?{CURRENCY})?((?: ?°[CF]?)?(?: (?:{UNIT}))*)\.?")
SYMBOLS = str.maketrans(
    {
        "⁄": "/",
        "√": r"\sqrt ",
        "∞": r"\infty ",
        "−": "-",
        "½": " 1/2",
        "⅓": " 1/3",
        "⅔": " 2/3",
        "¼": " 1/4",
        "¾": " 3/4",
    }
)
"""Characters that math-verify does not read, or reads only alone."""
PI = re.compile(r"\bpi\b")
POWER = re.compile(r"\^(-?\d+)")
FACTORS = {
    "hundred": r"\cdot 100",
    "thousand": r"\cdot 10^{3}",
    "million": r"\cdot 10^{6}",
    "billion": r"\cdot 10^{9}",
    "trillion": r"\cdot 10^{12}",
    "dozen": r"\cdot 12",
    "percent": r"\%",
}
NO_UNITS = re.compile(
    "and|or|to|of|plus|minus|times|divided|over|by|mod|modulo|base|more|less|than|half|halves|thirds?|quarters?|"
    "squared|cubed|pi|sqrt|root|sin|cos|tan|cot|sec|csc|log|ln|exp|lim|max|min|gcd|lcm|infinity"
)
"""Words that make something else than a quantity of what stands before them."""
PLAIN = re.compile(r"[-+]?(\d{1,3}(,\d{3})+|\d+)(\.\d+)?(/\d+)?%?|[-+]?\.\d+")
"""Numbers that math-verify is known to read."""
COMMANDS = re.compile(r"\\[A-Za-z]+(\s*\{[A-Za-z\s]*\})?")
WORD = re.compile(r"[^\W\d_]{4,}")


class Reading(NamedTuple):
    """What stands for an answer: any of `latex`, or a box that holds any of `texts`."""

    latex: tuple[str, ...]
    texts: tuple[str, ...] = ()


def text_of(answer: Any) -> str | None:
    """An answer as text: text unchanged, a float in positional notation, anything else as JSON; None stays None."""
    if answer is None or isinstance(answer, str):
        return answer
    return _positional(answer) if isinstance(answer, float) else json.dumps(answer, ensure_ascii=False)


def is_missing(answer: Any) -> bool:
    """Whether there is nothing to compare a response with."""
    return answer is None or (isinstance(answer, str) and not solution(answer))


def solution(answer: str) -> str:
    """The answer at the end of a worked solution in GSM8K's form, or all of the text."""
    return answer.rpartition("####")[2].strip()


def reading(answer: Any) -> Reading:
    """The LaTeX of a bare answer, by its type."""
    if isinstance(answer, bool):
        return Reading((rf"\text{{{answer}}}",), (str(answer), str(answer).lower()))
    if isinstance(answer, list | tuple):
        items = ", ".join(map(_latex, answer))
        return Reading((f"({items})", f"[{items}]"))
    if isinstance(answer, Mapping):
        return Reading((", ".join(f"{key} = {_latex(value)}" for key, value in answer.items()),))
    if isinstance(answer, str):
        latex = _latex(answer)
        return Reading((latex,), (answer,) if latex != answer else ())
    return Reading((text_of(answer) or "",))


def _latex(value: Any) -> str:
    """One LaTeX expression for a value."""
    if not isinstance(value, str):
        return reading(value).latex[0]
    if SCIENTIFIC.fullmatch(value):
        return _positional(value)
    # A backslash means LaTeX, which the rules below would damage.
    if "\\" in value:
        return value
    value = value.translate(SYMBOLS).strip()
    found = QUANTITY.fullmatch(value)
    if found is None:
        # LaTeX takes only one character behind ^ as the exponent.
        return POWER.sub(r"^{\1}", PI.sub(r"\\pi ", value))
    number, words = found[1], found[2].split()
    if any(NO_UNITS.fullmatch(word.lower()) for word in words):
        return PI.sub(r"\\pi ", value)
    factor = FACTORS.get(words[0].lower(), "") if words else ""
    unit = " ".join(words[1:] if factor else words)
    return _number(number) + factor + (rf"\text{{ {unit}}}" if unit else "")


def _number(text: str) -> str:
    whole, _, fraction = text.partition(" ")
    above, _, below = fraction.partition("/")
    return rf"{whole}\frac{{{above}}}{{{below}}}" if below else "".join(text.split())


def _positional(number: float | str) -> str:
    """`1e-05` as 0.00001: math-verify takes the `e` for Euler's number."""
    exact = Decimal(str(number))
    return format(exact, "f") if abs(exact.adjusted()) <= LARGEST_EXPONENT else str(number)


def is_plain_number(answer: Any) -> bool:
    """Whether math-verify is known to read an answer, so that trying is not needed."""
    if isinstance(answer, str):
        return PLAIN.fullmatch(solution(answer)) is not None
    return isinstance(answer, int | float)


def has_words(answer: Any) -> bool:
    """Whether words are left that math-verify takes for products of letters."""
    texts = reading(solution(answer)).latex if isinstance(answer, str) else reading(answer).latex
    return WORD.search(COMMANDS.sub(" ", texts[0])) is not None
