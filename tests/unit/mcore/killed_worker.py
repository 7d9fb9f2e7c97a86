"""A worker that says when it has moved everything to the host, and then waits to be killed."""

import sys
import time

from support.ranks import free_port
from support.tiny import tiny_policy

from nemo_offload_rl.offload.pinned_arena import PinnedArena
from nemo_offload_rl.worker.worker import MegatronPolicyWorker

if __name__ == "__main__":
    worker = MegatronPolicyWorker(
        tiny_policy(precision="bfloat16")
        | {
            "use_pinned_optimizer_offload": True,
            "residency": {"verify": False, "huge_pages": False, "host_memory_limit_gib": None, "table": None},
        },
        rank=0,
        world_size=1,
        local_rank=0,
        master_addr="localhost",
        master_port=free_port(),
        seed=3,
        init_reference_model=True,
    )
    worker.offload_before_refit()
    if sys.argv[1] == "offloaded":
        worker.offload_after_refit()
    sys.stdout.write(f"holds {PinnedArena.live_bytes()} bytes\n")
    sys.stdout.flush()
    time.sleep(600)
