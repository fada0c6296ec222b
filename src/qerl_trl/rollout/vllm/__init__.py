"""Code for vLLM's processes; no other package here imports vLLM."""
