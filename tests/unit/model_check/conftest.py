import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Twins are cycles, and each holds 50 threads of gloo's until it is collected."""
    yield
    gc.collect()
