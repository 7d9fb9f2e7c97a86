"""Records an engine's loads of weights once, and replays them in later refits."""

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from nemo_offload_rl.refit.fixed_buckets import FixedTensors
from nemo_offload_rl.refit.recorder import CaptureError, Recorder, Replay, addresses_of, why_not_recorded

logger = logging.getLogger(__name__)

Loaded = frozenset[str] | None
"""The parameters that a load has filled; None if the model does not report them."""


@dataclass(frozen=True)
class _Recorded:
    replay: Replay
    loaded: Loaded


class RecordedLoads:
    """Loads buckets at fixed addresses: the first time with the model's own code, later by replays of a recording.

    Args:
        parameters: all tensors that loads write to, the same objects each time.
        make_recorder: makes the recorder.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], make_recorder: Callable[[], Recorder]) -> None:
        self._parameters = list(parameters)
        self._recorded: weakref.WeakKeyDictionary[FixedTensors, _Recorded] = weakref.WeakKeyDictionary()
        self._addresses: tuple[int, ...] = ()
        self._make_recorder = make_recorder
        self._recorder: Recorder | None = None  # until the first recording
        self._why_not = ""

    @property
    def memory_stats(self) -> dict[str, float]:
        """Returns the number of replayed loads, and the GiB of their temporaries; empty if there are none."""
        if not self._recorded or self._recorder is None:
            return {}
        return {"refit_graphs": float(len(self._recorded)), "refit_graph_pool_gib": self._recorder.pool_bytes / 2**30}

    def load(self, tensors: FixedTensors, load: Callable[[], Loaded]) -> Loaded:
        """Loads a bucket.

        Args:
            tensors: the bucket's tensors.
            load: loads them with the model's own methods.

        Returns:
            The result of the first call of `load` for this bucket.
        """
        addresses = addresses_of(self._parameters)
        if addresses != self._addresses:
            self._forget()
            self._addresses = addresses
        if (recorded := self._recorded.get(tensors)) is not None:
            recorded.replay()
            return recorded.loaded
        loaded = load()
        if not self._why_not:
            self._record(tensors, load, loaded)
        return loaded

    def _record(self, tensors: FixedTensors, load: Callable[[], Loaded], loaded: Loaded) -> None:
        self._why_not = why_not_recorded(self._parameters)
        try:
            if not self._why_not:
                if self._recorder is None:
                    self._recorder = self._make_recorder()
                self._recorded[tensors] = _Recorded(self._recorder.record(load), loaded)
        except CaptureError as error:
            self._why_not = str(error)
        if self._why_not:
            self._forget()
            logger.warning("The engine loads weights without CUDA graphs: %s.", self._why_not)

    def _forget(self) -> None:
        if self._recorded:
            self._recorded.clear()
        if self._recorder is not None:
            self._recorder.forget()
