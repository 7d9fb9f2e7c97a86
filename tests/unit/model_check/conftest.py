import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Collects twins after a test: they are reference cycles, and each holds 50 gloo threads until collected."""
    yield
    gc.collect()
