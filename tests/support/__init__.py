"""Provides helpers that several test modules share."""
