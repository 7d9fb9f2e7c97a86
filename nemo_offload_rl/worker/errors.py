"""Makes the error that the driver raises when a rank fails."""

from collections.abc import Callable, Mapping

from ray.exceptions import RayError, RayTaskError

from nemo_offload_rl.placement.gather import cause_of, first_to_name, text_of


class WorkerError(RuntimeError):
    """Says that a rank failed; the message has its traceback.

    Attributes:
        rank: The rank that failed first; one whose process died counts as first.
        verb: The name of the method that failed.
        cause: The exception that it raised, or Ray's error if its process died.
        node: The rank's node; None where all ranks are on one.
    """

    def __init__(self, rank: int, verb: str, cause: BaseException, detail: str, node: str | None = None) -> None:
        where = "" if node is None else f" on node {node}"
        super().__init__(f"Rank {rank}{where} failed in {verb}: {type(cause).__name__}: {cause}\n{detail}".rstrip())
        self.rank = rank
        self.verb = verb
        self.cause = cause
        self.node = node


def worker_error(verb: str, failures: Mapping[int, RayError], node_name: Callable[[int], str | None]) -> WorkerError:
    """Returns the error of the rank that died, or else of the first that failed, with a line for each other failure.

    Args:
        verb: What the ranks were doing.
        failures: Ray's error of each failed rank, in the order in which they failed.
        node_name: Returns the node of a rank.
    """
    first = first_to_name(failures)
    error = failures[first]
    detail = [text_of(error)] if isinstance(error, RayTaskError) else []
    detail += [
        f"Rank {rank} failed too: {str(other).strip().splitlines()[-1]}"
        for rank, other in failures.items()
        if rank != first
    ]
    return WorkerError(first, verb, cause_of(error), "\n".join(detail), node_name(first))
