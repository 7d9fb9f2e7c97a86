"""What benchmarks/colocated.py is made of: three settings of one GRPO run, and what is measured in them."""
