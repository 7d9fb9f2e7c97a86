"""Provides batches, datasets, tokenizers and the data loader."""
