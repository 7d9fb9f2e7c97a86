"""The one table of what a key may be: rows about NeMo-RL's keys and about Megatron's fields, and their reader."""
