"""A module with mutants of every fate; ``check_clamp.py`` are its tests, on purpose too weak."""


def twice(value: int) -> int:
    return value + value


LIMIT = twice(4)


def clamp(value: int, low: int = 0, high: int = LIMIT) -> int:
    """``value``, or the bound that it exceeds; ValueError for bounds that cross."""
    if low > high:
        raise ValueError("low above high")
    if value < low:
        return low
    while value > high:
        value -= 1
    return value


def forgotten(value: int) -> bool:
    return value > LIMIT
