"""How long an update of 160 MB takes to a server's process, without a model: through `/dev/shm`, and as an HTTP body over loopback.

    python examples/benchmarks/server_transport.py

From a filled buffer to the checked update in another process; packing it and loading it into the engine come on top. Best of `--repeats`.
"""

import argparse
import http.client
import json
import subprocess
import sys
import time

import torch

from qerl_trl.rollout.engine import bearer
from qerl_trl.rollout.vllm.worker import Receiver
from qerl_trl.rollout.weights import SharedMemory, checksum_of

CPU, SECRET = torch.device("cpu"), "of this measurement"


def serve() -> None:
    receiver, known = Receiver("127.0.0.1", SECRET), {}
    print(receiver.server_port, flush=True)
    for line in sys.stdin:
        name, size = line.split()
        memory = known.setdefault(name, None) or SharedMemory(int(size), CPU, name)
        known[name] = memory
        print(checksum_of(memory.data), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--bytes", type=int, default=160 * 10**6 // 2**16 * 2**16)
    parser.add_argument("--serve", action="store_true")
    options = parser.parse_args()
    if options.serve:
        return serve()
    server = subprocess.Popen(
        [sys.executable, __file__, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    port = int(server.stdout.readline())
    flat = torch.randint(0, 256, (options.bytes,), dtype=torch.uint8)
    memory = SharedMemory(options.bytes, CPU)

    def checked(name: str) -> None:
        expected = checksum_of(flat)
        server.stdin.write(f"{name} {options.bytes}\n")
        server.stdin.flush()
        assert server.stdout.readline().strip() == expected

    def shared() -> None:
        memory.data.copy_(flat)
        checked(memory.name)

    def network() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("PUT", "/", flat.numpy().data, {"Authorization": bearer(SECRET)})
        checked(connection.getresponse().read().decode())

    results = {"bytes": options.bytes, "threads": torch.get_num_threads()}
    for name, way in {"/dev/shm": shared, "TCP on loopback": network}.items():
        seconds = []
        for _ in range(options.repeats):
            started = time.perf_counter()
            way()
            seconds.append(time.perf_counter() - started)
        results[name] = {"best_ms": round(1e3 * min(seconds), 1), "all_ms": [round(1e3 * s, 1) for s in seconds]}
    print(json.dumps(results, indent=1))
    server.terminate()


if __name__ == "__main__":
    main()
