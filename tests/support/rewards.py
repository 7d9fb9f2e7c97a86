"""A reward that a model with random weights can get, so that a short run has something to learn from."""


def starts_low(response: str, answer: str) -> float:
    """1 if the response begins with a digit below five, whatever was asked."""
    return float(response[:1] in ("0", "1", "2", "3", "4"))


def not_a_number(response: str, answer: str) -> float:
    """NaN, as a division of nothing by nothing would give."""
    return float("nan")
