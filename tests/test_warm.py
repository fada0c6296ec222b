"""Scripts that a warm server runs end, fail and are killed as processes do; with a server that has imported next to nothing."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.warm import Warm, run_cold


@pytest.fixture(scope="module")
def warm():
    server = Warm(["decimal"], dict(os.environ, OF_THE_SERVER="1"))
    yield server
    server.close()


def script(folder, code: str) -> str:
    (folder / "beside.py").write_text("WORD = 'beside'\n")
    (folder / "script.py").write_text(code)
    return str(folder / "script.py")


def test_a_script_has_what_a_process_has(warm, tmp_path):
    code = (
        "import atexit, json, os, pickle, sys\n"
        "import beside\n"
        "class Own: ...\n"
        "atexit.register(print, 'the end')\n"
        "print(json.dumps([__name__, sys.argv, os.getcwd(), dict(os.environ), 'decimal' in sys.modules, os.getsid(0) == os.getpid(),\n"
        "  type(pickle.loads(pickle.dumps(Own()))).__module__]))\n"
        "print('said', file=sys.stderr)\n"
        "sys.exit(3)\n"
    )
    path = script(tmp_path, code)
    done = warm.run([path, "--word", "a b"], tmp_path, {"HOME": "/", "WORD": "x"})
    first, last = done.stdout.splitlines()
    assert json.loads(first) == ["__main__", [path, "--word", "a b"], str(tmp_path), {"HOME": "/", "WORD": "x"}, True, True, "__main__"]  # fmt: skip
    assert (last, done.stderr, done.returncode) == ("the end", "said\n", 3)
    again = warm.run([script(tmp_path, "import os; print('OF_THE_SERVER' in os.environ)")], tmp_path, {})
    assert (again.stdout, again.returncode) == ("False\n", 0)


def test_an_error_is_a_traceback_and_a_code(warm, tmp_path):
    done = warm.run([script(tmp_path, "raise ValueError('why')")], tmp_path, {})
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == "ValueError: why"


@pytest.mark.parametrize("cold", [False, True], ids=["warm", "cold"])
def test_what_takes_too_long_is_killed(warm, tmp_path, cold):
    path = script(tmp_path, "import time; time.sleep(600)")
    done = run_cold([sys.executable, path], tmp_path, {}, 0.5) if cold else warm.run([path], tmp_path, {}, 0.5)
    assert done.returncode == -9 and "killed after 0.5 s" in done.stderr


@pytest.mark.timeout(120)
def test_it_is_killed_with_its_children(warm, tmp_path):
    path = script(tmp_path, "import os, time; print(os.fork(), flush=True); time.sleep(600)")
    reading, writing = os.pipe()
    with open(reading) as said, open(writing, "w") as out:
        process = warm.start([path], tmp_path, {}, out, out)
        said.readline()
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait(60) == -9
        out.close()
        said.read()  # ends, because nobody has the other end of the pipe


def test_several_run_at_a_time_and_can_be_waited_for(warm, tmp_path):
    path = script(
        tmp_path,
        "import os, sys, time; os.write(1, (sys.argv[1] + chr(10)).encode()); time.sleep(600 * (sys.argv[1] == 'slow'))",
    )
    with open(tmp_path / "out", "w+") as out:
        slow = warm.start([path, "slow"], tmp_path, {}, out, out)
        quick = warm.start([path, "quick"], tmp_path, {}, out, out)
        assert quick.wait(60) == quick.poll() == 0
        assert slow.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            slow.wait(0.01)
        os.killpg(slow.pid, signal.SIGKILL)
        assert slow.wait(60) == -9
        out.seek(0)
        assert sorted(out.read().split()) == ["quick", "slow"]


def test_a_server_that_cannot_import_says_why(tmp_path):
    with pytest.raises(RuntimeError, match="No module named 'nowhere'"):
        Warm(["nowhere"], dict(os.environ)).run([script(tmp_path, "")], tmp_path, {})
