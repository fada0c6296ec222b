"""vLLM's copy of the weights goes to host memory. In a process of its own: see check_sleep."""

import pytest

from tests.e2e.engine.engines import check_sleep


@pytest.mark.gpu
def test_sleep_frees_a_copy_of_the_weights_too(tmp_path):
    check_sleep(tmp_path, share=False)
