"""Waits for the results of all actors, and only for a limited time once one of them has failed."""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError, RayTaskError

from nemo_offload_rl.placement.cluster import Cluster
from nemo_offload_rl.placement.nodes import NodeLostError
from nemo_offload_rl.placement.relay import ActorCalls, concat, each_alone
from nemo_offload_rl.storage.disk import DiskFullError

# Once an actor has failed, the others, which may wait for it in a collective, get this long to fail or finish, too.
FAILURE_GRACE_S = 5.0
# The same for an error on which all actors agree to fail, such as a full disk.
AGREED_GRACE_S = 60.0

_COLOUR_CODE = re.compile(r"\x1b\[\d+m")


def gather(calls: Mapping[Any, Sequence[int]], cluster: Cluster) -> tuple[list[Any], dict[int, RayError]]:
    """Waits for the results of calls.

    Args:
        calls: Ray's reference to each call's result, and the bundles of its actors: one, or all of a relay.
        cluster: Knows which nodes still answer.

    Returns:
        The results, in the order of the calls, and the failures by bundle in the order in which they came. After a
        failure there are no results, and an actor may not have ended.
    """
    bundles_of = dict(calls)
    of_actors: dict[Any, list[Any]] = {}  # references to the results of single actors, by that of their relay's call
    pending = list(calls)
    results: dict[Any, Any] = {}
    failures: dict[int, RayError] = {}
    deadline = float("inf")
    while pending and time.monotonic() < deadline:
        timeout = None if not failures else max(0.0, deadline - time.monotonic())
        done, pending = cluster.wait(pending, timeout)
        for ref, result in _results_or_errors(done):
            if isinstance(result, ActorCalls):
                bundles_of |= each_alone(result.refs, bundles_of[ref])
                of_actors[ref] = result.refs
                pending += result.refs
            elif isinstance(result, _Failed):
                failures |= dict.fromkeys(bundles_of[ref], result.error)
                grace_s = AGREED_GRACE_S if is_disk_full(result.error) else FAILURE_GRACE_S
                deadline = min(deadline, time.monotonic() + grace_s)
            else:
                results[ref] = result
        for bundle in _bundles(pending, bundles_of):
            if (loss := cluster.loss_of(bundle)) is not None:
                failures.setdefault(bundle, loss)
                deadline = min(deadline, time.monotonic() + FAILURE_GRACE_S)
    if not failures:
        # A relay may fail to get a result that the driver gets: then nothing has combined those of its actors.
        return [
            concat([results[one] for one in of_actors[ref]]) if ref in of_actors else results[ref] for ref in calls
        ], {}
    # Other actors notice a lost node before Ray does.
    silent = [*_bundles(pending, bundles_of), *(bundle for bundle, error in failures.items() if is_death(error))]
    lost = {bundle: cluster.loss_of(bundle, ask=True) for bundle in silent}
    return [], failures | {bundle: loss for bundle, loss in lost.items() if loss is not None}


def _bundles(refs: Sequence[Any], bundles_of: Mapping[Any, Sequence[int]]) -> list[int]:
    return [bundle for ref in refs for bundle in bundles_of[ref]]


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


def cause_of(error: RayError) -> BaseException:
    """Returns the error that an actor has raised, or Ray's own error if its process died."""
    return error.cause if isinstance(error, RayTaskError) else error


def text_of(error: RayError) -> str:
    """Returns an error's text, with the actor's traceback if it has one, as a log that knows no colours can show it."""
    return _COLOUR_CODE.sub("", str(error))


def is_death(error: RayError) -> bool:
    """Returns whether the actor's process has ended, or its node is lost."""
    return isinstance(error, (ActorDiedError, ActorUnavailableError, NodeLostError))


def first_to_name(failures: Mapping[int, RayError]) -> int:
    """Returns the bundle of the actor that died, or else of the first that failed, given all failures by bundle."""
    return next((bundle for bundle, error in failures.items() if is_death(error)), next(iter(failures)))
