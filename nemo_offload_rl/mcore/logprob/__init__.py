"""Computes next-token log-probs of a micro-batch, from logits or from hidden states."""
