"""Run a script of NeMo-RL, from its checkout, with policy workers that move their state in ranges.

`python nemo_rl_launcher.py examples/run_grpo.py --config ... ++policy.worker_extension_cls_fqn=WORKER`, where WORKER is
nemo_offload_rl.adapters.nemo_rl.MegatronPolicyWorker; see docs/adopt.md.
"""

import runpy
import sys

from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY as ENVIRONMENTS

THEIRS = "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker"
ENVIRONMENTS["nemo_offload_rl.adapters.nemo_rl.MegatronPolicyWorker"] = ENVIRONMENTS[THEIRS]
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
