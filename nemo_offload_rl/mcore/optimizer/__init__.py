"""Makes optimizer state on the GPU and the CPU, and checks that steps change parameters."""
