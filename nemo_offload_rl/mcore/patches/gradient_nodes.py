"""Replaces the autograd nodes by which megatron-core's DistributedDataParallel learns of gradients."""

from typing import Any

from torch.utils.hooks import RemovableHandle


def add_gradients_on_this_stream(chunks: list[Any]) -> list[RemovableHandle]:
    """Recreate autograd's gradient-accumulation nodes of DistributedDataParallel on the current stream.

    A node runs on the stream that it was created on, and megatron-core creates these on one that nothing else uses, so
    that each gradient takes an event there and one back. In one arrangement of streams the additions that waited there
    made an H200's copies to the host 8% slower (docs/decisions/activation-manager.md).

    Args:
        chunks: the model's chunks, in DistributedDataParallel.

    Returns:
        The new nodes' hooks, which have to live as long as the model.
    """
    hooks: list[RemovableHandle] = []
    for ddp in chunks:
        parameters = [parameter for parameter in ddp.module.parameters() if parameter.requires_grad]
        assert len(ddp.grad_accs) == len(parameters), "each parameter with a gradient must have one node"
        ddp.grad_accs.clear()  # drops the last references to the old nodes
        for parameter in parameters:
            node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            hooks.append(node.register_hook(ddp._make_backward_post_hook(parameter)))
            ddp.grad_accs.append(node)
    return hooks
