"""Process groups of a rank, and what all of its ranks do together."""
