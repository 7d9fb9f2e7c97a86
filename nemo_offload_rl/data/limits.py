"""Limits the size of lines and text files, far above any model's context length, and the time of checks."""

# The most characters of a line of a JSONL file; a long context of a million tokens has some 4 million.
MAX_LINE_CHARS = 2**24

# The most bytes of a prompt template or a system prompt.
MAX_TEXT_FILE_BYTES = 2**20

# Seconds for which the rows of a dataset are checked before a run: enough for some 100,000 conversations.
CHECK_LIMIT_S = 10.0
