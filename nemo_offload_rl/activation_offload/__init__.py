"""Offloads activations of training passes to host memory; usable with any megatron-core model."""
