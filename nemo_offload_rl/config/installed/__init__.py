"""Reads what the installed libraries declare, their versions, fields and models, without importing any of them."""
