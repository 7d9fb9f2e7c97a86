"""Limits on the size of a recipe: far above what any run needs, and low enough for a check within seconds.

Without them, a few lines of YAML that refer to each other could expand to more values than fit in memory.
"""

# Bytes of one file. The largest example has 6 KB; a chat template or a long list of layers adds a few more.
MAX_FILE_BYTES = 1_048_576

# Files that a recipe inherits from, including itself, and names in all of their `defaults`. The examples have 3 and 4,
# a sweep over models, data and clusters a dozen.
MAX_FILES = 50
MAX_DEFAULTS = 200

# Nesting depth of sections and lists in a file or in an override's value. The schema has 6 levels, and a field of the
# model's Hugging Face config a few more. Reading takes several Python frames per level, out of the interpreter's 1,000.
MAX_DEPTH = 32

# Values, sections and lists of all files together, each alias (`*name`) counted with everything it expands to. The
# exemplars have some 200; a model's config with lists that have one item per layer or frequency has 1,000.
MAX_VALUES = 10_000

# The libraries that read a recipe's values take 64-bit integers, signed or unsigned.
MIN_INTEGER = -(2**63)
MAX_INTEGER = 2**64 - 1

# Characters of one `${...}`, and of all together. Parsing takes 50 us per character; the exemplars have 700 in all.
MAX_INTERPOLATION_CHARS = 1_000
MAX_ALL_INTERPOLATION_CHARS = 20_000
# Nesting depth of brackets in one `${...}`, and length of a chain of values that refer to one another. Both take a
# dozen Python frames per level.
MAX_INTERPOLATION_NESTING = 10
MAX_REFERENCES = 20
# Values that `${section}` copies, and characters of the text that it produces, over the whole recipe.
MAX_COPIED_VALUES = MAX_VALUES
MAX_COPIED_CHARS = MAX_FILE_BYTES

# Characters of one override, and of all overrides of a command line. A whole `policy.hf_config` has 500. Parsing takes
# 100 us per character.
MAX_OVERRIDE_CHARS = 10_000
MAX_ALL_OVERRIDE_CHARS = 40_000

# Number of problems that a message lists. Finding the nearest valid key takes some milliseconds for each.
MAX_PROBLEMS = 100
