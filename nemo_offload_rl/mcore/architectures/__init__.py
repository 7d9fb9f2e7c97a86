"""Corrects what Megatron-Bridge 0.6.2 with megatron-core 0.19.2 computes otherwise than transformers 5.12.

One file a correction, each saying what goes wrong without it:

- `rotary`: scaled rotary embeddings (linear, llama3, YaRN);
- `windows`: sliding windows of attention;
- `biases`: biases of linear layers;
- `dense_layers`: dense layers among layers of experts;
- `bridges`: puts them into Megatron-Bridge's classes of the families that tests hold, and adds names of weights.

The families are llama, mistral, qwen2, qwen3 and qwen3_moe. Others are left as Megatron-Bridge has them: whether they
are right is for the check by a small twin to say.
"""
