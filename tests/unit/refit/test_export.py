"""Tests the policy's side of a refit with senders that fail."""

import pytest
import torch

from nemo_offload_rl.refit.export import WeightExport
from nemo_offload_rl.refit.interface import RefitSender


class Sender(RefitSender):
    """Closes, or fails to, as a sender to an engine that has died does."""

    def __init__(self, *, closes=True):
        self.closes, self.is_closed = closes, False

    def send(self, weights):
        assert not self.is_closed
        return {name: 0 for name, _ in weights}

    def close(self):
        self.is_closed = True
        if not self.closes:
            raise RuntimeError("the engine is gone")


class Transport:
    """Connects the next of its senders; None stands for a failure."""

    def __init__(self, *senders):
        self.senders = list(senders)

    def connect(self, plan, *, rank, bucket_bytes):
        if (sender := self.senders.pop(0)) is None:
            raise RuntimeError("no engine answers")
        return sender


@pytest.mark.parametrize("closes", [True, False])
def test_a_connection_that_failed_sends_nothing_until_another_one_is_made(closes):
    export = WeightExport(lambda: [("a", torch.ones(1))], rank=0, bucket_bytes=8)
    transport = Transport(Sender(closes=closes), *([None] if closes else []), Sender())
    export.connect(transport)
    with pytest.raises(RuntimeError, match="no engine answers" if closes else "the engine is gone"):
        export.connect(transport)
    with pytest.raises(RuntimeError, match="No transport is connected"):
        export.send()
    export.connect(transport)
    assert export.send() == {"a": 0}
