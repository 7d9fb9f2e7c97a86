"""What benchmarks/cpu_optimizer.py compares."""
