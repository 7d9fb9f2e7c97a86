"""Generation engines: sampling from the policy's current weights."""
