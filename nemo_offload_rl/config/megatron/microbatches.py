"""Defines what megatron-core requires of the micro-batches of a step, for the recipe and the worker alike."""


def num_interleaved(least: int, num_stages: int, group_size: int) -> int:
    """Returns the smallest number of micro-batches, from `least` on, that the schedule of virtual stages takes.

    They are scheduled in groups, and each group must keep all pipeline stages busy, the last one too
    (core pipeline_parallel/schedules.py, `forward_backward_pipelining_with_interleaving`).

    Args:
        least: micro-batches that a rank has.
        num_stages: the pipeline-parallel size.
        group_size: microbatch_group_size_per_vp_stage, at least `num_stages`.
    """
    number = max(least, group_size)
    in_last_group = number % group_size
    return number + num_stages - in_last_group if 0 < in_last_group < num_stages else number


def gathers_different_rows(tensor: int, expert: int, expert_tensor: int) -> bool:
    """Returns whether the ranks that share a layer's experts have different rows; tensor-parallel ranks have the same.

    Args:
        tensor: the tensor-parallel size.
        expert: the expert-parallel size.
        expert_tensor: the expert-tensor-parallel size.
    """
    return expert * expert_tensor > tensor
