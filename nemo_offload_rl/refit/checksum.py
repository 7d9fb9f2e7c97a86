"""Checksums of weights: the same on CPU and GPU, and different for other bits or another order of elements."""

from collections.abc import Iterable, Iterator, Mapping

import torch

# Elements hashed at a time: three int64 temporaries of this length are 48 MiB.
CHUNK_ELEMENTS = 1 << 21

_WORD_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def _as_int64(unsigned: int) -> int:
    return unsigned - (1 << 64) if unsigned >= 1 << 63 else unsigned


# The increment and multipliers of splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators).
_INDEX_STEP = _as_int64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = _as_int64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = _as_int64(0x94D049BB133111EB)


@torch.no_grad()
def tensor_checksum(tensor: torch.Tensor) -> int:
    """Hashes a tensor's bit pattern, including the order of its elements, on the device it is on.

    Each element's bits and its row-major index are mixed in int64 arithmetic that wraps around, then summed: addition
    commutes, so the result does not depend on how a device orders the sum. Temporary memory stays below 64 MiB (or one
    slice along the first dimension, where that is larger and the tensor is not contiguous).

    Args:
        tensor: Any shape and dtype, contiguous or not.

    Returns:
        A signed 64-bit integer; 0 for a tensor without elements.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    start = 0
    for chunk in _flat_chunks(tensor.detach()):
        words = chunk.view(_WORD_DTYPES[chunk.element_size()])
        mixed = torch.arange(start, start + words.numel(), dtype=torch.int64, device=tensor.device)
        start += words.numel()
        mixed.add_(1).mul_(_INDEX_STEP).add_(words)
        mixed.bitwise_xor_(mixed >> 30).mul_(_MULTIPLIER_1)
        mixed.bitwise_xor_(mixed >> 27).mul_(_MULTIPLIER_2)
        mixed.bitwise_xor_(mixed >> 31)
        total += mixed.sum()
    return int(total.item())


def merge_checksums(of_ranks: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Merges the checksums of what each rank of the policy has sent.

    Raises:
        RuntimeError: If two ranks have sent different tensors under one name.
    """
    merged: dict[str, int] = {}
    for sent in of_ranks:
        for name, checksum in sent.items():
            if merged.setdefault(name, checksum) != checksum:
                raise RuntimeError(f"Two ranks of the policy sent different weights under the name {name}.")
    return merged


def require_equal_checksums(sent: Mapping[str, int], received: Mapping[str, int]) -> None:
    """Compares the checksums of the two sides of a refit.

    Raises:
        RuntimeError: If a tensor is on one side only or differs; the message names the first few.
    """
    missing = sorted(set(sent) - set(received))
    unexpected = sorted(set(received) - set(sent))
    different = sorted(name for name in set(sent) & set(received) if sent[name] != received[name])
    problems = [
        f"{len(names)} {what} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        for what, names in (("missing", missing), ("not sent", unexpected), ("different", different))
        if names
    ]
    if problems:
        raise RuntimeError(
            f"The generation engine's weights do not agree with the {len(sent)} tensors sent: {'; '.join(problems)}."
        )


def _flat_chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the tensor's elements in row-major order as contiguous 1-D pieces."""
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous():
        yield from tensor.view(-1).split(CHUNK_ELEMENTS)
        return
    rows_per_chunk = max(1, CHUNK_ELEMENTS * tensor.shape[0] // tensor.numel())
    for rows in tensor.split(rows_per_chunk):
        yield rows.reshape(-1)
