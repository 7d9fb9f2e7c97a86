"""Warns once if training steps that replay CUDA graphs are slower than eager ones."""

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from nemo_offload_rl.config.megatron import GRAPH_IMPL_KEY, GRAPH_MODULES_KEY
from nemo_offload_rl.memory.streams import Event

logger = logging.getLogger(__name__)

SLOWER_LIMIT = 0.10
"""Share of an eager step's time by which a replayed step may be slower without a warning."""
_NUM_COMPARED = 3


@dataclass(frozen=True)
class _Timed:
    shape: Hashable
    is_eager: bool
    begin: Event
    end: Event


class GraphSpeedCheck:
    """Compares replayed training steps with eager ones of the same shape, as timed on the caller's stream.

    The fastest eager step is compared with the fastest of the first three replayed steps that have an eager step of
    their shape. The very first step and the first after each capture are left out, since they compile kernels and
    allocate memory. Without such a pair, as after a single eager step, nothing is logged.

    Args:
        modules: the captured modules, `policy.megatron_cfg.cuda_graph_modules`.
        copies_inside: whether activations are offloaded inside of the graphs.
        mark: records an event on the current stream.
    """

    def __init__(self, modules: Sequence[str], *, copies_inside: bool, mark: Callable[[], Event]) -> None:
        self._modules = list(modules)
        self._copies_inside = copies_inside
        self._mark = mark
        self._num_captures: int | None = None  # of the last step
        self._unread: _Timed | None = None
        self._eager_seconds: dict[Hashable, float] = {}
        self._compared: list[tuple[float, float]] = []  # seconds of a replayed step, and of the eager one

    @contextmanager
    def step(self, shape: Hashable, num_captures: int) -> Iterator[None]:
        """Time a training step that runs inside; once three steps have been compared, no events are recorded any more.

        Args:
            shape: shape of the step and its micro-batches; steps of one shape do the same work.
            num_captures: how often graphs have been captured; 0 in an eager step.
        """
        if len(self._compared) == _NUM_COMPARED:
            yield
            return
        is_first = num_captures != self._num_captures
        self._num_captures = num_captures
        is_timed = not is_first and (num_captures == 0 or shape in self._eager_seconds)
        begin = self._mark() if is_timed else None
        yield
        timed = None if begin is None else _Timed(shape, num_captures == 0, begin, self._mark())
        if self._unread is not None:
            # Read the previous step only now: this step's gradient norm has waited for all of it, its update included.
            self._read(self._unread)
        self._unread = timed

    def _read(self, timed: _Timed) -> None:
        timed.end.wait()
        seconds = timed.end.seconds_since(timed.begin)
        if timed.is_eager:
            known = self._eager_seconds.setdefault(timed.shape, seconds)
            self._eager_seconds[timed.shape] = min(known, seconds)
            return
        self._compared.append((seconds, self._eager_seconds[timed.shape]))
        if len(self._compared) == _NUM_COMPARED:
            replayed, eager = min(self._compared, key=lambda pair: pair[0] / pair[1])
            if replayed > (1 + SLOWER_LIMIT) * eager:
                logger.warning(
                    "%s", slower_than_eager(replayed, eager, self._modules, copies_inside=self._copies_inside)
                )


def slower_than_eager(replayed_s: float, eager_s: float, modules: Sequence[str], *, copies_inside: bool) -> str:
    """Returns the warning that steps from graphs are slower: by how much, and what to change.

    Args:
        replayed_s: seconds of a training step from graphs.
        eager_s: seconds of an eager one.
        modules: the captured modules.
        copies_inside: whether activations are offloaded inside of the graphs.
    """
    remedy = f"set {GRAPH_IMPL_KEY} to none"
    if len(modules) > 1:  # an empty list is refused
        what = "'mlp'" if "mlp" in modules else "modules"
        remedy = f"remove {what} from it, or {remedy}"
    why = " (a graph ends only after the copies of activations inside it)" if copies_inside else ""
    return (
        f"a training step from CUDA graphs takes {1e3 * replayed_s:,.1f} ms, {100 * (replayed_s / eager_s - 1):.0f}% "
        f"longer than the {1e3 * eager_s:,.1f} ms of an eager one of the same shape{why}; capturing "
        f"{GRAPH_MODULES_KEY} {list(modules)} may make it at most {SLOWER_LIMIT:.0%} slower: {remedy}."
    )
