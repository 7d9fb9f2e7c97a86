"""Provides values that often break programs."""

from typing import Any

EXTREMES: tuple[Any, ...] = (
    float("nan"), float("inf"), float("-inf"), -0.0, 1e-320, 1e308, 0, -1, 1, 2**31, 2**62, 2**63, 2**64, -(2**63),
    10**30, 10**4000, True, False, None, "", " ", "null", "true", "1", "1e5", "0x10", "1:30", "~", "???", "é", "\u2028",
    "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"), "\x00", "\x07", "a\nb", "x" * 5000, "[", "{",
    "${",
    "$", "\\", "\\${a}", "%", "*", "&a", "!x", "../..", "/dev/zero", "/", "a.b", [], {}, [[]], [None], [{}], {"a": {}},
    {"": 1}, {"a.b": 1}, {"_override_": True}, {"_override_": False}, list(range(300)),
)  # fmt: skip
