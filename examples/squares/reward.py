"""The reward of a count."""


def score(response: str, answer: str) -> float:
    """Return 1 if the number behind the equals sign is the number of squares."""
    return float(response.rpartition("=")[2] == answer)
