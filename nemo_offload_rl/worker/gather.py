"""Waits for the results of all ranks, and only for a limited time once one of them has failed."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from nemo_offload_rl.placement.cluster import Cluster
from nemo_offload_rl.storage.disk import DiskFullError
from nemo_offload_rl.worker.errors import cause_of, is_death
from nemo_offload_rl.worker.relay import RankCalls, concat

# Once a rank has failed, the others, which may wait for it in a collective, get this long to fail or finish, too.
FAILURE_GRACE_S = 5.0
# The same for an error on which all ranks agree to fail, such as a full disk.
AGREED_GRACE_S = 60.0


def gather(calls: Mapping[Any, Sequence[int]], cluster: Cluster) -> tuple[list[Any], dict[int, RayError]]:
    """Waits for the results of calls.

    Args:
        calls: Ray's reference to each call's result, and the ranks that it is of: one, or all of a node.
        cluster: Knows which nodes still answer.

    Returns:
        The results, in the order of the calls, and the failures by rank in the order in which they came. After a
        failure there are no results, and a rank may not have ended.
    """
    ranks_of = dict(calls)
    of_ranks: dict[Any, list[Any]] = {}  # references to the results of single ranks, by that of their node's call
    pending = list(calls)
    results: dict[Any, Any] = {}
    failures: dict[int, RayError] = {}
    deadline = float("inf")
    while pending and time.monotonic() < deadline:
        timeout = None if not failures else max(0.0, deadline - time.monotonic())
        done, pending = cluster.wait(pending, timeout)
        for ref, result in _results_or_errors(done):
            if isinstance(result, RankCalls):
                ranks_of |= {ref: (rank,) for rank, ref in zip(ranks_of[ref], result.refs, strict=True)}
                of_ranks[ref] = result.refs
                pending += result.refs
            elif isinstance(result, _Failed):
                failures |= dict.fromkeys(ranks_of[ref], result.error)
                grace_s = AGREED_GRACE_S if is_disk_full(result.error) else FAILURE_GRACE_S
                deadline = min(deadline, time.monotonic() + grace_s)
            else:
                results[ref] = result
        for rank in _ranks(pending, ranks_of):
            if (loss := cluster.loss_of(rank)) is not None:
                failures.setdefault(rank, loss)
                deadline = min(deadline, time.monotonic() + FAILURE_GRACE_S)
    if not failures:
        # A relay may fail to get a result that the driver gets: then nothing has combined those of its ranks.
        return [
            concat([results[one] for one in of_ranks[ref]]) if ref in of_ranks else results[ref] for ref in calls
        ], {}
    # Other ranks notice a lost node before Ray does.
    silent = [*_ranks(pending, ranks_of), *(rank for rank, error in failures.items() if is_death(error))]
    lost = {rank: cluster.loss_of(rank, ask=True) for rank in silent}
    return [], failures | {rank: loss for rank, loss in lost.items() if loss is not None}


def _ranks(refs: Sequence[Any], ranks_of: Mapping[Any, Sequence[int]]) -> list[int]:
    return [rank for ref in refs for rank in ranks_of[ref]]


@dataclass(frozen=True)
class _Failed:
    error: RayError


def _results_or_errors(refs: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Returns each reference with its result, or `_Failed`; together, results take a tenth of the time."""
    try:
        return list(zip(refs, ray.get(list(refs)), strict=True))
    except RayError:
        return [(ref, _result_or_error(ref)) for ref in refs]


def _result_or_error(ref: Any) -> Any:
    try:
        return ray.get(ref)
    except RayError as error:
        return _Failed(error)


def is_disk_full(error: RayError) -> bool:
    """Returns whether the error is a full disk, on which all ranks agree to fail."""
    return isinstance(cause_of(error), DiskFullError)
