import json

import pytest
import yaml

from nemo_offload_rl.storage.manifest import DamagedCheckpointError, write_manifest
from nemo_offload_rl.worker.export import export_checkpoint


def test_a_damaged_checkpoint_is_not_exported(tmp_path):
    checkpoint = tmp_path / "step_1"
    (checkpoint / "policy" / "hf_config").mkdir(parents=True)
    (checkpoint / "tokenizer").mkdir()
    (checkpoint / "policy" / "metadata.json").write_text("{}")
    (checkpoint / "policy" / "hf_config" / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (checkpoint / "recipe.yaml").write_text(yaml.safe_dump({"policy": {}}))
    weights = checkpoint / "policy" / "__0_0.distcp"
    weights.write_bytes(b"weights")
    write_manifest(checkpoint, {})
    weights.write_bytes(b"weighty")
    with pytest.raises(DamagedCheckpointError, match=r"step_1 is damaged: policy/__0_0\.distcp has changed"):
        export_checkpoint(checkpoint, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
