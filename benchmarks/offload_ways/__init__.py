"""What benchmarks/optimizer_offload.py is made of: ways to move tensors, cases to move, bars to reach."""
