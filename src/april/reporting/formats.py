"""Numbers as people read them."""

from __future__ import annotations

from collections.abc import Callable

Format = Callable[[float], str]


def compact(value: float) -> str:
    """A number in at most about five characters: 0.003, 1.25, 98, 1,234, 12.3k, 4.5M."""
    size = abs(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            scale = 1e3 if unit == "k" else limit
            return f"{_plain(value / scale)}{unit}"
    return whole(value) if size >= 100 else _plain(value)


def _plain(value: float) -> str:
    if 0 < abs(value) < 1e-3:
        digits, power = f"{value:.2e}".split("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{value:z.3g}" if abs(value) < 1000 else whole(value)


def whole(value: float) -> str:
    return f"{value:z,.0f}"


def tenths(value: float) -> str:
    return f"{value:z,.1f}"


def hundredths(value: float) -> str:
    return f"{value:z.2f}"


def thousandths(value: float) -> str:
    return f"{value:z.3f}"


def percent(value: float) -> str:
    return f"{100 * value:z.3g} %"


def seconds(value: float) -> str:
    return f"{value:.3g} s" if abs(value) < 100 else f"{value:,.0f} s"


def size(value: float) -> str:
    """Bytes, in units of a thousand: 12 MB."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= limit:
            return f"{value / limit:.3g} {unit}"
    return f"{value:.0f} B"


def clock(value: float) -> str:
    """Seconds as 0:42, 12:05 or 3:07:00."""
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
