"""Refit: sends the policy's weights from the training workers to the generation engines."""

import pkgutil
from collections.abc import Sequence

from nemo_offload_rl.refit.interface import Receiver, RefitTransport

# Name of a transport -> "module:name" of its factory (receivers, `verify`); imported if an engine uses it.
TRANSPORTS: dict[str, str] = {
    "broadcast": "nemo_offload_rl.refit.broadcast:BroadcastTransport",
    "cuda_ipc": "nemo_offload_rl.refit.cuda_ipc:CudaIpcTransport",
    "object_store": "nemo_offload_rl.refit.object_store:ObjectStoreTransport",
}


def make_transport(name: str, receivers: Sequence[Receiver], *, verify: bool) -> RefitTransport:
    """Makes a transport to the receivers of the engines.

    Args:
        name: A key of `TRANSPORTS`.
        receivers: The receivers of all engines; each must get every weight.
        verify: Whether senders return checksums of the weights they have sent.

    Raises:
        ValueError: If there is no receiver.
    """
    if not receivers:
        raise ValueError("A weight transport has no receiver; pass the generation engine's `receivers`.")
    transport: RefitTransport = pkgutil.resolve_name(TRANSPORTS[name])(receivers, verify=verify)
    return transport
