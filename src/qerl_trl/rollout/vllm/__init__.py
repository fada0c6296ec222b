"""Everything that runs inside vLLM; the only package here that imports it."""
