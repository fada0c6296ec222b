"""Shared weights stay where they are while the engine sleeps: only the KV cache is freed."""

import pytest

from tests.e2e.engine.engines import check_sleep


@pytest.mark.gpu
def test_sleep_frees_the_cache_and_keeps_shared_weights(tmp_path):
    check_sleep(tmp_path, share=True)
