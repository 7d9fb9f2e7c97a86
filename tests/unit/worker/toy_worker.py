"""Provides a small worker with the interface that the group expects; it reports what it received."""

import gc
import logging
import os
import signal
import time

import torch

from nemo_offload_rl.data.batch import BatchedData
from nemo_offload_rl.refit.export import WeightExport
from nemo_offload_rl.storage.disk import DiskFullError


class CannotTravelError(Exception):
    """Cannot be unpickled: its constructor needs more arguments than it stores."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


class ToyWorker:
    def __init__(
        self, config, *, plan, rank, world_size, local_rank, master_addr, master_port, seed, init_reference_model,
        init_optimizer=True,
    ):  # fmt: skip
        if config["toy"].get("fails_to_build") == rank:
            raise ValueError(f"rank {rank} has a bad recipe")
        self.config = config
        self.num_returned = 0
        self.rank = rank
        self.world_size = world_size
        self.weights = [(f"w{index}", torch.full((2, 2), float(index))) for index in range(5)]
        self.weight_export = WeightExport(lambda: self.weights, rank=rank, bucket_bytes=32)
        self.seen = {
            "rank": rank, "world_size": world_size, "seed": seed, "init_reference_model": init_reference_model,
            "address": f"{master_addr}:{master_port}", "environment": dict(os.environ),
        }  # fmt: skip

    def parallel_ranks(self):
        tp_size = self.config["megatron_cfg"]["tensor_model_parallel_size"]
        ranks = {"dp_rank": self.rank // tp_size, "tp_rank": self.rank % tp_size, "pp_rank": 0}
        return ranks | {"dp_size": self.world_size // tp_size, "tp_size": tp_size, "pp_size": 1}

    def start_return(self, logprobs):
        if self.config["toy"].get("fails_to_return") == self.rank:
            raise ValueError(f"no memory for the params of rank {self.rank}")
        self.num_returned += 1

    def train(self, data, loss_fn, gbs, mbs):
        return {"rows": data["row"].tolist(), "loss": loss_fn(1.0), "gbs": gbs, "mbs": mbs, "rank": self.rank}

    def evaluate(self, data, loss_fn, mbs):
        return {"samples": int(data["sample_mask"].sum()), "rows": data["row"].tolist(), "mbs": mbs}

    def get_logprobs(self, data, mbs):
        assert data.size % mbs == 0
        return BatchedData(logprobs=data["input_ids"].float(), rank=[self.rank] * data.size)

    def get_reference_policy_logprobs(self, data, mbs):
        return BatchedData(reference_logprobs=data["input_ids"].float())

    def prepare_refit_info(self, transport):
        return self.weight_export.connect(transport)

    def send_weights(self):
        return self.weight_export.send()

    def memory_stats(self):
        is_collected = any(tracked is self for tracked in gc.get_objects())  # exempt objects are not listed
        return {
            "host_rss_gib": float(self.rank), "pid": float(os.getpid()), "returned": self.num_returned,
            "is_collected": float(is_collected),
        }  # fmt: skip

    def residency_metrics(self):
        seconds = 1.0 + self.rank
        logging.getLogger("nemo_offload_rl.toy").warning("page-locking failed for %s", "params")
        return {"train/optimizer_state/copy_s": seconds, "train/optimizer_state/gb_per_s": 6.0 / seconds}

    # The folder's name chooses the failure, since this verb takes a string.
    def load_checkpoint(self, folder, num_skipped, num_train_calls):
        if folder == "fail on rank 1, wait on rank 0":
            if self.rank == 0:
                time.sleep(600)
            raise ValueError("the checkpoint is of another model")
        if folder == "die on rank 1, fail on rank 0":
            if self.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ConnectionError("connection closed by peer")
        if folder == "fail with what cannot travel":
            raise CannotTravelError("this", "that")
        if folder == "fail on rank 1 for lack of GPU memory":
            if self.rank == 0:
                return
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation.")
        raise AssertionError(folder)

    def save_checkpoint(self, folder, save_optimizer):
        if folder == "a full disk":
            raise DiskFullError(folder, "No space left on device", 20, 10)
        with open(f"{folder}/{self.rank}", "w") as file:
            print(self.seen, save_optimizer, file=file)

    def start_checkpoint(self, folder, save_optimizer):
        self.under_way, self.num_asked = folder, 0

    def is_checkpoint_written(self):
        self.num_asked += 1
        return self.num_asked > self.rank  # the last rank finishes last

    def finish_checkpoint(self):
        if self.under_way == "a full disk":
            raise DiskFullError(self.under_way, "No space left on device", 20, 10)
        return {f"{self.under_way} of rank {self.rank}": None}

    def find_damage(self, folder, files):
        mine = files.of_rank(self.rank, self.world_size)
        return [f"{name} of {folder}, as rank {self.rank} sees it" for name in mine]

    def shutdown(self):
        if self.config["toy"].get("hangs_in_shutdown"):
            raise RuntimeError("will not go quietly")
