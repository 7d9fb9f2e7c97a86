"""Keeps files from being lost: whole or not there, locked by one run, checked by their sums, on disks that fill up."""
