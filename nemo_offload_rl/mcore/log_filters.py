"""Silences messages of other libraries that mean nothing to our users: each is listed with the reason."""

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator

# Regular expressions for the beginnings of messages, with the reason in a comment.
_WARNINGS = (
    r"Transformer Engine and Apex are not installed",  # the CPU path, chosen and announced by cpu_device
    r"Apex is not installed",  # likewise
    r".*GPTModel.*(deprecated|HybridModel)",  # Megatron-Bridge 0.6.2 still builds GPTModel for Qwen and Llama
    r"ModelProviderMixin-based model configuration is deprecated",  # so does Megatron-Bridge's whole provider interface
    r".*torch_dtype.*deprecated",
    r".*is_fully_shard.*",
    r".*TypedStorage is deprecated",
    r".*No device id is provided via `init_process_group`",  # `parallel.initialize` has chosen the device
    r"barrier\(\): using the device under current context",  # likewise
    r"This will (return|not).*torch\.distributed",
    # Of torch's distributed checkpoints, which megatron-core reads and writes: in one process, as in an export, nothing
    # is distributed; the order of arguments and ShardedTensor are megatron-core's choice.
    r"torch\.distributed is disabled, unavailable or uninitialized, assuming the intent is to (load|save) in a single",
    r"The argument order of (load|save).* has been changed",
    r"Please use DTensor instead and we are deprecating ShardedTensor",
)
_LOGGERS = (
    "megatron",
    "torch.utils.cpp_extension",  # "No CUDA runtime is found", on a machine without CUDA
    "torch.distributed",
    "nvidia_resiliency_ext",
)


def install() -> None:
    """Install the filters; warnings outside the list, and errors of these loggers, still show."""
    for pattern in _WARNINGS:
        warnings.filterwarnings("ignore", message=pattern)
    warnings.filterwarnings("ignore", module=r"megatron\..*")
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if "transformers" in sys.modules:  # it reads the variable when it is imported
        level = logging.getLevelNamesMapping().get(os.environ["TRANSFORMERS_VERBOSITY"].upper(), logging.WARNING)
        logging.getLogger("transformers").setLevel(level)


@contextlib.contextmanager
def while_importing() -> Iterator[None]:
    """Keep an import from logging records below WARNING, and from configuring the root logger.

    Importing Megatron-Bridge reports each optional import that fails with its traceback, and runs
    `logging.basicConfig`.
    """
    root = logging.getLogger()
    handlers, level, disabled = root.handlers[:], root.level, root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        logging.disable(disabled)
