"""Refit: moving the policy's weights from the training worker to the generation engine."""

import pkgutil
from collections.abc import Sequence

from nemo_offload_rl.refit.interface import Receiver, RefitTransport

# Name of a transport -> "module:name" of what makes it from receivers and `verify`, imported where an engine takes it.
TRANSPORTS: dict[str, str] = {
    "broadcast": "nemo_offload_rl.refit.broadcast:BroadcastTransport",
    "cuda_ipc": "nemo_offload_rl.refit.cuda_ipc:CudaIpcTransport",
    "object_store": "nemo_offload_rl.refit.object_store:ObjectStoreTransport",
}


def make_transport(name: str, receivers: Sequence[Receiver], *, verify: bool) -> RefitTransport:
    """Make a transport to an engine's receivers.

    Args:
        name: A key of `TRANSPORTS`.
        receivers: Of all engines; each must get every weight.
        verify: Whether senders return checksums of what they have sent.

    Raises:
        ValueError: If there is no receiver.
    """
    if not receivers:
        raise ValueError("A weight transport has no receiver; pass the generation engine's `receivers`.")
    transport: RefitTransport = pkgutil.resolve_name(TRANSPORTS[name])(receivers, verify=verify)
    return transport
