"""Implements the algorithms, one module per recipe section, with `prepare(config) -> run.setup.Preparation`."""
