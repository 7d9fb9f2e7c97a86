"""Provides values, keys and texts that often break programs."""

import random
from typing import Any

EXTREMES: tuple[Any, ...] = (
    float("nan"), float("inf"), float("-inf"), -0.0, 1e-320, 1e308, 0, -1, 1, 2**31, 2**62, 2**63, 2**64, -(2**63),
    10**30, 10**4000, True, False, None, "", " ", "null", "true", "1", "1e5", "0x10", "1:30", "~", "???", "é", "\u2028",
    "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"), "\x00", "\x07", "a\nb", "x" * 5000, "[", "{",
    "${",
    "$", "\\", "\\${a}", "%", "*", "&a", "!x", "../..", "/dev/zero", "/", "a.b", [], {}, [[]], [None], [{}], {"a": {}},
    {"": 1}, {"a.b": 1}, {"_override_": True}, {"_override_": False}, list(range(300)),
)  # fmt: skip

INTERPOLATIONS = (
    "${nope}", "${policy}", "${grpo}", "${.}", "${..}", "${.seed}", "${....x}", "${policy.model_name}",
    "${policy.train_micro_batch_size}", "${mul:${policy.train_micro_batch_size}, 2}", "${div:1,0}", "${mul:1}",
    "${mul:a,b}", "${add:1.5,2}", "${max:1,nan}", "${mul:9223372036854775807,9223372036854775807}", "${oc.env:HOME}",
    "${oc.env:NO_SUCH_VARIABLE}", "${oc.env:NO_SUCH_VARIABLE,3}", "${oc.select:policy}", "${nope:1}", "${", "${}",
    "${:}",
    "${a", "a}", "${[}", "${policy.${policy.precision}}", "${policy[model_name]}", "x${policy.precision}y",
    "${policy}${policy}", "\\${policy}", "${mul:[1,2],3}", "${mul:{a:1},3}", "${add:'a','b'}", "${cluster.num_nodes}",
    "${data.train}", "${policy.hf_config}", "${mul:1,2,}", "${ mul : 1 , 2 }", "${policy.hf_config.0}",
)  # fmt: skip


def value_like(rng: random.Random, value: Any) -> Any:
    """Returns a value of the same type, often a valid one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice([value + 1, value * 2, max(value // 2, 1), value, 1, 2, 3, 16, 10**6, 10**9, 10**12])
    if isinstance(value, float):
        return rng.choice([value * 2, value / 3, value + 1, 0.5, 1.0, 0.0])
    if isinstance(value, str):
        return rng.choice(
            [value, value.upper(), f"{value}_2", value[:-1], "gpu", "host", "keep", "bfloat16", "float32"]
        )
    if isinstance(value, list):
        return [*value, *rng.sample(value, min(len(value), 1))] if rng.random() < 0.5 else value[1:]
    return rng.choice([1, 2, 0.5, "text", [], None])


def any_value(rng: random.Random, value: Any) -> Any:
    """Returns a replacement for a value: similar, of another type, or extreme."""
    choice = rng.random()
    if choice < 0.4:
        return value_like(rng, value)
    if choice < 0.75:
        return rng.choice(EXTREMES)
    if choice < 0.9:
        return rng.choice(INTERPOLATIONS)
    return nested(rng, rng.choice([2, 5, 40]))


def nested(rng: random.Random, depth: int) -> Any:
    value: Any = rng.choice([1, "x", None])
    for _ in range(depth):
        value = rng.choice([[value], {"a": value}, [value, value]]) if depth < 10 else [value]
    return value


def misspelt(rng: random.Random, key: str) -> str:
    """Returns a key with one letter changed, doubled, dropped or swapped with the next; or in capitals."""
    place = rng.randrange(len(key)) if key else 0
    return rng.choice(
        [
            key[:place] + key[place + 1 :],
            key[:place] + rng.choice("abcdefghijklmnopqrstuvwxyz_0") + key[place + 1 :],
            key[: place + 1] + key[place:],
            key[:place] + key[place + 1 : place + 2] + key[place : place + 1] + key[place + 2 :],
            key.upper(),
            f" {key}",
            f"{key}s",
        ]
    )
