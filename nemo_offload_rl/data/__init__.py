"""Batches, datasets, tokenizers and the loader that walks them."""
