"""Limits the size of a recipe, far above what any run needs, and low enough to be checked within seconds.

Without them, a few lines of YAML that refer to each other stand for more values than there is memory.
"""

# Bytes of one file. The largest of the examples has 6 KB; a chat template or a long list of layers a few more.
MAX_FILE_BYTES = 1_048_576

# Files that a recipe inherits from, itself included, and names in all of their `defaults`. The examples have 3 and 4; a
# sweep over models, data and clusters a dozen.
MAX_FILES = 50
MAX_DEFAULTS = 200

# Sections in sections, or lists in lists, of a file, of an override's value. The schema has 6, and a field of the
# model's Hugging Face config a few more. Reading takes some Python frames a level, of the interpreter's 1,000.
MAX_DEPTH = 32

# Values, sections and lists of all files together, each alias (`*name`) counted with all that it stands for. The
# exemplars have some 200; a model's config with lists that have an item a layer or a frequency, 1,000.
MAX_VALUES = 10_000

# Integers are of 64 bits, with a sign or without, in everything that a recipe goes to.
MIN_INTEGER = -(2**63)
MAX_INTEGER = 2**64 - 1

# Characters of one `${...}`, and of all together. Parsing takes 50 us a character; the exemplars have 700 in all.
MAX_INTERPOLATION_CHARS = 1_000
MAX_ALL_INTERPOLATION_CHARS = 20_000
# Brackets in brackets of one `${...}`, and values that refer to one another in a row. Both take a dozen Python frames
# a level.
MAX_INTERPOLATION_NESTING = 10
MAX_REFERENCES = 20
# Values that `${section}` copies, and characters of the text that it makes, over the whole recipe.
MAX_COPIED_VALUES = MAX_VALUES
MAX_COPIED_CHARS = MAX_FILE_BYTES

# Characters of one override, and of all of a command line. A whole `policy.hf_config` has 500. Parsing takes 100 us a
# character.
MAX_OVERRIDE_CHARS = 10_000
MAX_ALL_OVERRIDE_CHARS = 40_000

# Problems that are listed. Naming the nearest valid key takes some milliseconds for each.
MAX_PROBLEMS = 100
