"""Cuts a rank's batch into micro-batches and packs sequences into rows."""
