import pytest
from support.examples import SHORT_GRPO, Finished, run_example


@pytest.fixture(scope="session")
def grpo_run(tmp_path_factory) -> Finished:
    """Runs four steps of GRPO without interruption."""
    done = run_example("run_grpo.py", tmp_path_factory.mktemp("grpo"), [*SHORT_GRPO, "grpo.max_num_steps=4"])
    assert done.status == 0, done.output
    return done
