"""Host memory, GPU ranges, copy streams: what moving tensors between GPU and host is made of."""
