"""Corrects what Megatron-Bridge 0.6.2 with megatron-core 0.19.2 computes differently from transformers 5.12.

Each file has one correction and says what goes wrong without it:

- `rotary`: scaled rotary embeddings (linear, llama3, YaRN);
- `windows`: sliding windows of attention;
- `biases`: biases of linear layers;
- `dense_layers`: dense layers among layers of experts;
- `bridges`: adds them to Megatron-Bridge's classes of the tested families, with weight names that these lack.

The families are llama, mistral, qwen2, qwen3 and qwen3_moe. Others are left as Megatron-Bridge has them: the check by a
small twin finds out whether they are right.
"""
