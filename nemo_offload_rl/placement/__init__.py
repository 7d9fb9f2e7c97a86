"""Places processes on nodes and GPUs with Ray, and reads the machine's topology."""
