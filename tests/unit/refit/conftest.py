import pytest
import ray
from support import weight_loader


def _ended(receivers):
    for receiver in receivers:
        ray.kill(receiver.actor)


@pytest.fixture(scope="module")
def receivers(ray_cluster):
    receivers = [weight_loader.start(rank) for rank in range(2)]
    yield receivers
    _ended(receivers)


@pytest.fixture
def start(ray_cluster):
    """Starts receivers that end with the test."""
    made = []

    def start(rank, *kind, **arguments):
        made.append(weight_loader.start(rank, *kind, **arguments))
        return made[-1]

    yield start
    _ended(made)
