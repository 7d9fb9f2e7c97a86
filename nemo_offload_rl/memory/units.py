"""Sizes of memory as people read them."""

MIB, GIB = 1 << 20, 1 << 30


def show_gib(nbytes: int) -> str:
    """A size in GiB, without the unit: two decimals, or three significant digits below 1 GiB."""
    size = nbytes / GIB
    return f"{size:.2f}" if size >= 1 else f"{size:.3g}"
