"""Adaptive quantization noise: schedules, norms, hooks and the callback."""
