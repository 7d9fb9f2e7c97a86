import pytest
from support.examples import SHORT_GRPO, Finished, run_example


@pytest.fixture(scope="session")
def grpo_run(tmp_path_factory) -> Finished:
    """Runs four steps of GRPO without interruption, and saves their rollouts."""
    folder = tmp_path_factory.mktemp("grpo")
    save = f"grpo.debug.save_rollouts={folder / 'rollouts'}"
    done = run_example("run_grpo.py", folder, [*SHORT_GRPO, "grpo.max_num_steps=4", save])
    return done
