"""What a rank is to offload."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ActivationOptions:
    """What to offload.

    Attributes:
        modules: as in `policy.megatron_cfg.offload_modules`.
        fraction: of a micro-batch's eligible bytes, from 0 to 1; what stays is spread over the layers.
        min_elements: smaller storages stay.
        resident_bytes: stay on this rank's GPU at any time (`delta_offload_bytes_across_pp_ranks` times its pipeline
            rank).
        max_inflight: groups whose GPU memory may wait for its copy before the compute stream does; None for as many as
            a layer has, or two where layers differ (`Profile.lead`): fewer would make it wait for copies that are fast
            enough, more would only take memory. With a number each group makes a request of its own, so that each can
            be waited for.
        margin_stage: the model chunk whose backward pass follows its forward pass at once, on the pipeline's last rank;
            None elsewhere. There the last group of each module stays.
    """

    modules: tuple[str, ...]
    fraction: float = 1.0
    min_elements: int = 1024 * 1024
    resident_bytes: int = 0
    max_inflight: int | None = None
    margin_stage: int | None = 0
