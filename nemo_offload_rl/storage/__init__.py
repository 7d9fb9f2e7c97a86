"""Protects files against loss: atomic writes, locks, checksums, and errors of full disks."""
