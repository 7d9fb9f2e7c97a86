"""Ends Ray actors as a test expects it."""

from contextlib import suppress

import ray
from ray.exceptions import RayActorError


def kill_and_wait(actor):
    """Kills an actor and waits until it is dead; after `ray.kill` alone it may still answer a call."""
    ray.kill(actor)
    with suppress(RayActorError):
        while True:
            ray.get(actor.__ray_ready__.remote())
