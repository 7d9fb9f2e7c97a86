"""What benchmarks/colocated.py is made of: two settings of one GRPO run, and what is measured in them."""
