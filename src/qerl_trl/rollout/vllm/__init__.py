"""Code that runs inside vLLM; no other package here imports vLLM."""
