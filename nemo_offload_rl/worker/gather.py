"""Waits for the results of all ranks, and only for a limited time once one of them has failed."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from nemo_offload_rl.placement.cluster import Cluster
from nemo_offload_rl.storage.disk import DiskFullError
from nemo_offload_rl.worker.errors import cause_of, is_death

# Once a rank has failed, the others, which may wait for it in a collective, get this long to fail or finish, too.
FAILURE_GRACE_S = 5.0
# The same for an error on which all ranks agree to fail, such as a full disk.
AGREED_GRACE_S = 60.0


def gather(refs: Sequence[Any], cluster: Cluster) -> tuple[dict[int, Any], dict[int, RayError]]:
    """Waits for each rank's result.

    Args:
        refs: Ray's references to them, in rank order.
        cluster: Knows which nodes still answer.

    Returns:
        The results by rank, and the failures by rank in the order in which they came. After a failure a rank may be in
        neither.
    """
    rank_of = {ref: rank for rank, ref in enumerate(refs)}
    pending = list(refs)
    results: dict[int, Any] = {}
    failures: dict[int, RayError] = {}
    deadline = float("inf")
    while pending and time.monotonic() < deadline:
        timeout = None if not failures else max(0.0, deadline - time.monotonic())
        done, pending = cluster.wait(pending, timeout)
        for ref, result in _results_or_errors(done):
            if not isinstance(result, _Failed):
                results[rank_of[ref]] = result
            else:
                error = failures[rank_of[ref]] = result.error
                grace_s = AGREED_GRACE_S if is_disk_full(error) else FAILURE_GRACE_S
                deadline = min(deadline, time.monotonic() + grace_s)
        for ref in pending:
            if (loss := cluster.loss_of(rank_of[ref])) is not None:
                failures.setdefault(rank_of[ref], loss)
                deadline = min(deadline, time.monotonic() + FAILURE_GRACE_S)
    if failures:  # other ranks notice a lost node before Ray does
        silent = [rank_of[ref] for ref in pending] + [rank for rank, error in failures.items() if is_death(error)]
        lost = {rank: cluster.loss_of(rank, ask=True) for rank in silent}
        failures |= {rank: loss for rank, loss in lost.items() if loss is not None}
    return results, failures


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
