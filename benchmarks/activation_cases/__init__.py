"""What benchmarks/activation_offload.py measures: a module a table, and what they share."""
