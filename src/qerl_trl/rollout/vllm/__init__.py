"""Code running inside vLLM; no other package here imports vLLM."""
