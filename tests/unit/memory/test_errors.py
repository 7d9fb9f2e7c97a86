"""Tests what is raised if the cleanup after an error also fails."""

from contextlib import ExitStack

import pytest

from nemo_offload_rl.memory.errors import preserve_first_error


def raise_error(error: BaseException) -> None:
    raise error


def close(*errors: BaseException) -> None:
    with preserve_first_error(), ExitStack() as stack:
        for error in errors:
            stack.callback(raise_error, error)


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


def test_a_cleanups_own_error_is_raised_without_another_and_if_it_is_an_interrupt():
    with pytest.raises(ValueError, match="alone"):
        close(ValueError("alone"))
    with pytest.raises(KeyboardInterrupt):
        use_and_close(KeyError("first"), KeyboardInterrupt())
