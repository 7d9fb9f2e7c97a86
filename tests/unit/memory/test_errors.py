"""Tests what is raised if the cleanup after an error also fails."""

from contextlib import ExitStack

import pytest

from nemo_offload_rl.memory.errors import preserve_first_error


def fail(error: BaseException) -> None:
    raise error


def close(*errors: BaseException) -> None:
    with preserve_first_error(), ExitStack() as stack:
        for error in errors:
            stack.callback(fail, error)


def use_and_close(error: BaseException, *errors: BaseException) -> None:
    try:
        with ExitStack() as stack:
            stack.callback(close, *errors)
            raise error
    finally:
        close(*errors)


def test_the_first_error_is_raised_through_nested_stacks(caplog):
    with pytest.raises(KeyError, match="first") as caught:
        use_and_close(KeyError("first"), ValueError("third"), ValueError("second"))
    assert caught.value.__notes__ == ["Cleanup after this error failed, too: ValueError: third"] * 2
    assert caplog.text.count("cleanup after an error (KeyError) failed, too") == 2
    assert "second" in caplog.text


def test_without_one_the_cleanups_own_error_is_raised():
    with pytest.raises(ValueError, match="alone"):
        close(ValueError("alone"))


def test_an_interrupt_of_the_cleanup_is_raised():
    with pytest.raises(KeyboardInterrupt):
        use_and_close(KeyError("first"), KeyboardInterrupt())
