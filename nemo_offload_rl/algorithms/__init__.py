"""Algorithms, a module each, named as the section of its recipes: `prepare(config) -> run.setup.Preparation`."""
