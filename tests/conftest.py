"""Fixtures that more than one test module uses."""

from collections.abc import Iterator

import pytest

from nemo_offload_rl.placement.cluster import Cluster


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Cluster]:
    """Ray on this machine with two bundles, started once: rank 0 and 1 of a test's worker group or generation."""
    with Cluster(num_nodes=1, gpus_per_node=2) as cluster:
        yield cluster
