"""Tests that a rank imports its libraries while an engine is built, so that its own build need not."""

import subprocess
import sys
import textwrap


def test_all_that_a_worker_is_built_with_is_imported_before():
    program = """
        import sys
        from nemo_offload_rl.worker.actor import WorkerActor
        WorkerActor().import_worker("nemo_offload_rl.worker.worker:MegatronPolicyWorker")
        print("megatron.bridge" in sys.modules, "nemo_offload_rl.mcore.architectures" in sys.modules)
        import torch
        print(torch.cuda.is_initialized())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == ["True True", "False"]  # an engine that is being built may measure the GPU
