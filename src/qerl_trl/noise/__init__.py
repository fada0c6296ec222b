"""Adaptive quantization noise: schedules, the norms that carry it, the hooks that put it there, the callback that drives it."""
