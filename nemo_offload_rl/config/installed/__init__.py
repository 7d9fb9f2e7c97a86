"""Reads versions, fields and models of the installed libraries without importing any of them."""
