"""Tells what a value of `policy.tokenizer.chat_template` means, as NeMo-RL reads it."""

JOINED_CONTENTS = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""Template that null stands for: the messages' texts, one after the other."""


def is_default_template(value: str | None) -> bool:
    """Returns whether the tokenizer keeps its own template."""
    return value is not None and value.lower() == "default"


def is_template_file(value: str) -> bool:
    """Returns whether the value is the path of a file with the template."""
    return value.endswith(".jinja")
