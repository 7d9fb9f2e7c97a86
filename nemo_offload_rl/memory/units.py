"""Units of memory: binary multiples, rounding up, and sizes in text."""

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`; for lengths in tokens as for bytes."""
    return -(-value // multiple) * multiple


def show_gib(nbytes: int) -> str:
    """Return a size in GiB as text without the unit: two decimals, or three significant digits below 1 GiB."""
    size = nbytes / GIB
    return f"{size:.2f}" if size >= 1 else f"{size:.3g}"
