"""A worker that says when it has moved everything to the host, and then waits to be killed."""

import sys
import time

from support.ranks import free_port, worker_of_rank
from support.tiny import tiny_policy

from nemo_offload_rl.memory.pinned import PinnedArena

if __name__ == "__main__":
    policy = tiny_policy(precision="bfloat16") | {
        "use_pinned_optimizer_offload": True,
        "residency": {"verify": False, "huge_pages": False, "host_memory_limit_gib": None, "table": None},
    }
    worker = worker_of_rank(policy, 0, 1, free_port(), init_reference_model=True)
    worker.offload_before_refit()
    if sys.argv[1] == "offloaded":
        worker.offload_after_refit()
    sys.stdout.write(f"holds {PinnedArena.live_bytes()} bytes\n")
    sys.stdout.flush()
    time.sleep(600)
