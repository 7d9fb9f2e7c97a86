"""Provides weights that a transport could change: several dtypes, a scalar, an empty one, an odd size, strides."""

import torch

MIXED = [
    ("a", torch.randn(3, 5)),
    ("b", torch.randn(7, 3).bfloat16()),
    ("scalar", torch.tensor(2.5)),
    ("empty", torch.empty(0, 4)),
    ("odd", torch.arange(5, dtype=torch.uint8)),
    ("transposed", torch.randn(4, 6).T),
]
