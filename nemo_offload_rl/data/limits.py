"""Limits the size of lines and text files, far above what fits into a model's context."""

# Characters of a line of a JSONL file; a long context of a million tokens has some 4 million.
MAX_LINE_CHARS = 2**24

# Bytes of a prompt template, a system prompt.
MAX_TEXT_FILE_BYTES = 2**20
