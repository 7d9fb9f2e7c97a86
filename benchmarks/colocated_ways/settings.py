"""Defines the settings of a run: ours as it is, ours with an engine that sleeps, and `upstream_way`.

`upstream_way` replaces the calls around refit and generation.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

from colocated_ways import engines
from colocated_ways.upstream_refit import UpstreamTransport, UpstreamWeightSync
from nemo_offload_rl.generation import make_generation
from nemo_offload_rl.worker.group import PolicyWorkerGroup

OURS, OURS_ASLEEP, UPSTREAM = "ours", "ours_asleep", "upstream_way"
SETTINGS = (OURS, OURS_ASLEEP, UPSTREAM)
# By name: only ranks import them, and with them Megatron, as in a run.
_WORKER, _WORKER_LIKE_UPSTREAM = "colocated_ways.policy:MarkedWorker", "colocated_ways.policy:UpstreamWorker"


@contextlib.contextmanager
def built_as(setting: str, backend: str) -> Iterator[None]:
    """Makes what is built in the context record its moments, and for `upstream_way` do what NeMo-RL does.

    Args:
        setting: one of `SETTINGS`.
        backend: `policy.generation.backend`.
    """
    like_upstream = setting == UPSTREAM
    worker = _WORKER_LIKE_UPSTREAM if like_upstream else _WORKER
    vllm_actor = engines.UpstreamVllmActor if like_upstream else engines.MarkedVllmActor
    replaced: dict[str, Any] = {
        "nemo_offload_rl.worker.group.PolicyWorkerGroup": partial(PolicyWorkerGroup, worker_cls=worker),
        "nemo_offload_rl.generation.vllm_backend.VllmActor": vllm_actor,
    }
    if backend == "transformers":
        from colocated_ways.transformers_engine import MarkedGeneratorActor

        replaced["nemo_offload_rl.generation.transformers_backend.GeneratorActor"] = MarkedGeneratorActor
    if like_upstream:
        replaced |= {
            "nemo_offload_rl.refit.make_transport": lambda _, receivers, verify: UpstreamTransport(receivers),
            "nemo_offload_rl.algorithms.grpo.WeightSync": UpstreamWeightSync,
            "nemo_offload_rl.generation.make_generation": _make_generation_like_upstream,
        }
    with contextlib.ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(mock.patch(name, value))
        yield


def _make_generation_like_upstream(*arguments: Any) -> Any:
    """Creates generation whose `finish_generation` does the whole release, as in NeMo-RL."""
    generation: Any = make_generation(*arguments)
    generation.start_finish_generation = list
    return generation
