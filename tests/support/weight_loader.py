"""Provides an engine's actor as refit transports see it: it loads buckets and reports what it has loaded."""

import os
import sys
import time

import psutil
import ray

from nemo_offload_rl.refit.interface import Receiver

# The actors cannot import this module, so Ray pickles its classes by value.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class WeightLoader:
    """Keeps a copy of each weight; refuses `unwanted`, takes a minute for `late`, and ends its process at `deadly`."""

    def __init__(self, seconds=0.0):
        """Sets how many `seconds` each load is delayed."""
        self.seconds = seconds
        self.take()

    def process(self):
        return ray.util.get_node_ip_address(), os.getpid()

    def addresses(self):
        connections = psutil.Process().net_connections("tcp")
        return {connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN}

    def load_weights(self, bucket):
        time.sleep(self.seconds)
        with bucket.opened() as named_tensors:
            if named_tensors:  # other messages register buckets, or unregister them
                self.num_loads += 1
                self.origins.add(getattr(bucket, "origin", None))
            for name, tensor in named_tensors:
                if name == "unwanted":
                    raise ValueError("there is no such weight here")
                if name == "late":
                    time.sleep(60)
                if name == "deadly":
                    time.sleep(0.5)  # an answer that Ray has not yet sent would be lost with the process
                    os._exit(1)
                self.weights[name] = tensor.clone()
        self.finished.append(time.monotonic())
        return self.seconds

    def take(self):
        """Returns the weights, `num_loads`, buckets' `origins` and when loads `finished`, all since the last call."""
        taken = self.__dict__.copy()
        self.weights, self.num_loads, self.origins, self.finished = {}, 0, set(), []
        return taken


def take(receiver):
    """Returns what the receiver's actor has loaded since the last call."""
    return ray.get(receiver.actor.take.remote())


def start(rank, kind=WeightLoader, **arguments):
    """Starts an actor, as the engine of a rank."""
    return Receiver(ray.remote(kind).options(num_cpus=0).remote(**arguments), (rank,), f"engine {rank}")
