"""Records what the driver waits for in a switch."""

from typing import Any

from colocated_ways.marks import Marks, with_tags


def watch_driver(algorithm: Any, marks: Marks) -> None:
    """Makes a run's handles on engine, policy and weights record each call.

    Args:
        algorithm: a `GRPO` that is built.
        marks: of the driver.
    """
    marks.watch(
        algorithm._generation,
        {
            **{verb: verb for verb in ("generate", "start_finish_generation", "finish_generation")},
            "prepare_for_generation": lambda tags: with_tags("prepare_for_generation", tags),
        },
    )
    verbs = ("start_return", "train", "offload_before_refit", "send_weights", "offload_after_refit")
    marks.watch(algorithm._policy, {verb: verb for verb in verbs})
    marks.watch(algorithm._weights, {"refresh": "refresh"})
