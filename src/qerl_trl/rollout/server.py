"""The engine on a server: `vllm serve` with our plugin, reached from the trainer's main process.

Adapter and noise go to methods of its workers (vllm/worker.py), through an endpoint of our own that knows the trainer by a shared secret
(vllm/endpoint.py): the noise as four numbers, the adapter as bytes. On one host these travel through memory that both have in common
(shared_memory.py), between hosts over connections of their own (channel.py), and where neither can be had as parts in requests (transfers.py).
Completions come through TRL's client, whose requests are signed too (client.py). vLLM's NCCL weight transfer is not used: on the server it ends
in `model.load_weights`, which knows the names of a checkpoint and neither adapter buffers nor noise, and an adapter is small (rank 32 on 7B:
160 MB in bf16).
"""

import contextlib
import ipaddress
import logging
import math
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlparse

import torch
from accelerate.utils import broadcast_object_list
from torch import nn

from ..noise.hooks import NoiseDraw
from .channel import PORT, Channel
from .client import Client, odd, understood
from .engine import Completion, Contents, Engine, RolloutError, Sampling, gather_prompts
from .handshake import check_form, differences
from .layout import UpdateLayout, mark
from .shared_memory import SharedMemory
from .signature import SECRET, secret
from .spec import EngineSpec
from .wire import CALL, CHUNK, AdapterTensors, Update

logger = logging.getLogger(__name__)

#: parts of an update at a time
PARTS = 4
#: of a server whose address is this host's
_CONTAINED = (
    " A server in a container listens inside it where the trainer asks by a loopback address: give another address of this host as "
    "vllm_server_base_url, or start the container with --ipc=host, so that memory is shared."
)


class ServerEngine(Engine):
    """A connection to a running server, checked against the trainer's model.

    Args:
        url: base URL of the server.
        spec: what the server has to run.
        model: the trainer's PEFT model.
        timeout: seconds to wait for the server to answer at all.

    Raises:
        `ConnectionError`: no server answers.
        `RuntimeError`: there is no secret, or another one; it runs without our plugin, without buffers for this adapter, or with other
            weights.
    """

    def __init__(self, url: str, spec: EngineSpec, model: nn.Module, timeout: float) -> None:
        self.spec, self.url = spec, url
        try:
            self.client = Client(url, secret(), timeout)
        except (OSError, RuntimeError) as error:
            kind = ConnectionError if isinstance(error, OSError) else RuntimeError
            raise kind(f"{error}\n{self._advice()}") from error
        self.url = self.client.base_url
        self._noisy: tuple[str, ...] = ()
        self._sent: tuple[str | None, str | None] = (None, None)  # mark of the latest update, and its fingerprint
        self._layout, self._flat = UpdateLayout(()), torch.empty(0, dtype=torch.uint8)
        self._shared: SharedMemory | None = None
        self._channel: Channel | None = None
        self._host: torch.Tensor | None = None
        if urlparse(self.url).scheme != "https" and not _is_loopback(self.url):
            logger.warning(
                "%s is neither a loopback address nor https. Requests are signed, but adapter, prompts and completions travel as they "
                "are: use vLLM's --ssl-certfile and --ssl-keyfile, or a tunnel, where others can listen.",
                self.url,
            )
        self.check(model)

    def _advice(self) -> str:
        asked = urlparse(self.url)
        host, where = ("127.0.0.1", "") if _is_loopback(self.url) else ("0.0.0.0", f" on {asked.hostname}")
        command = self.spec.serve_command(host, asked.port)
        return f"With the trainer's {SECRET} in its environment, the server is started{where} by\n{command}"

    def check(self, model: nn.Module) -> None:
        """Compare what the server runs with the trainer's model.

        Raises:
            `RuntimeError`: they differ; says where, and gives the command that starts the right server.
        """
        try:
            ranks = self.client.call("qerl_describe")
            check_form(ranks)
        except ValueError as error:
            raise RuntimeError(
                f"The server at {self.url} describes its model in another form than this qerl-trl reads: {error}.\n{self._advice()}"
            ) from error
        except (OSError, RuntimeError) as error:
            raise RuntimeError(
                f"The server at {self.url} does not serve this trainer: {error}\n{self._advice()}"
            ) from error
        self._ranks = len(ranks)
        found = differences(self.spec, model, ranks)
        self.client.description = ranks[0]
        if found:
            listed = "".join(f"\n  - {difference}" for difference in found)
            raise RuntimeError(f"The server at {self.url} does not run the trainer's model:{listed}\n{self._advice()}")

    def call(self, method: str, *args: Any, part: bytes | memoryview = b"", reset: bool = False) -> list[dict]:
        """One method of the worker extension on every rank, as `Client.call`.

        Raises:
            [`RolloutError`]: the server refused, with its words, or its answer makes no sense.
        """
        answers = self.client.call(method, *args, part=part, reset=reset)
        if len(answers) != self._ranks:
            raise odd(self.url + CALL, f"one result of {method} from each of {self._ranks} ranks", f"{answers}")
        return answers

    def put_adapter(self, adapter: Mapping[str, AdapterTensors], norms: Mapping[str, torch.Tensor]) -> None:
        self._apply(Update(adapter, norms))

    def put(self, update: Update | None, noisy: Sequence[str] = (), draw: NoiseDraw | None = None) -> float | None:
        if draw is not None:
            self._declare(noisy)
        if update is not None:
            answers = self._apply(update, draw, reset=True)
        elif draw is not None:
            answers = self.call("qerl_noise", *_numbers(draw), reset=True)
        else:
            self.reset_prefix_cache()
        return None if draw is None else self._effective(answers)

    def _apply(self, update: Update, draw: NoiseDraw | None = None, reset: bool = False) -> list[dict]:
        """Send an update, and the draw that is to lie on it; the answers."""
        layout = UpdateLayout.of(update.adapter, update.norms, getattr(torch, self.spec.dtype))
        if layout != self._layout:
            device = next((t.a.device for t in update.adapter.values()), torch.device("cpu"))
            self._announce(layout, device)
        self._layout.pack(update.adapter, update.norms, self._flat)
        if self._shared is not None:
            self._shared.data.copy_(self._flat, non_blocking=self._shared.pinned)
        expected = mark(self._flat)  # waits for the device, and so for the copy
        transfer = "shared" if self._shared is not None else self.transfer()
        noise = () if draw is None else _numbers(draw)
        with ThreadPoolExecutor(max_workers=1) as pool:
            asked = pool.submit(self.call, "qerl_apply", transfer, expected, *noise, reset=reset)
            fingerprint = update.fingerprint  # while the server is busy
            answers = asked.result()
        written = {"layers": len(update.adapter), "norms": len(update.norms)}
        if any({key: answer.get(key) for key in written} != written for answer in answers):
            raise odd(self.url + CALL, f"{written} written on each rank", f"{answers}")
        self._sent = expected, fingerprint
        return answers

    def _announce(self, layout: UpdateLayout, device: torch.device) -> None:
        """Agree on what updates consist of, and on the way they take: shared memory where the server can open it, else the network."""
        self.call("qerl_layout", layout.text())
        self._layout, self._flat = layout, torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)
        self._leave()
        if not self._share(device):
            self._connect()

    def _share(self, device: torch.device) -> bool:
        """Whether the server can open memory of this host."""
        try:
            shared = SharedMemory.create(self._layout.nbytes, device)
        except (OSError, ValueError) as error:
            logger.info("Updates go to the server over the network: no memory could be shared (%s).", error)
            return False
        try:
            answers = self.call("qerl_open", shared.name)
        except RolloutError as error:
            logger.info("Updates go to the server over the network: it cannot open memory of this host (%s).", error)
            answers = [{}]
        if all(answer.get("proof") == shared.proof() for answer in answers):
            shared.forget_name()
            self._shared = shared
        else:
            shared.close()
        return self._shared is not None

    def _connect(self) -> None:
        """Open connections for updates, or say why they go as requests."""
        parts = urlparse(self.url)
        if parts.scheme == "https":
            logger.info("Updates go to %s as requests: connections of their own would not be encrypted.", self.url)
            return
        host, channel = parts.hostname or "", None
        address = "" if not _is_loopback(self.url) else _HERE.get(host, host)
        try:
            listening = self.call("qerl_listen", address)[0]
            with understood(self.url + CALL, "a port and a name"):
                port, name = int(listening["port"]), str(listening["name"])
            channel = Channel(host, port, secret(), name)
            proofs = [answer.get("proof") for answer in self.call("qerl_open", name)]
            if None in proofs or len(set(proofs)) != 1:
                raise odd(self.url + CALL, f"one proof from {len(proofs)} ranks that see the same memory", f"{proofs}")
        except (OSError, RolloutError) as error:
            if channel is not None:
                channel.close()
            logger.warning(
                "Updates go to %s as requests, which takes longer: a connection for them alone cannot be made (%s). The "
                "port where a server awaits it is any free one, or %s in its environment: let the trainer reach it.%s",
                self.url, error, PORT, _CONTAINED if address else "",
            )  # fmt: skip
            return
        logger.info("Updates go to %s over connections of their own, port %d.", self.url, port)
        self._channel = channel

    def transfer(self) -> str:
        """Send the update over the network; the name under which the server keeps it until it is applied."""
        data = self._on_host()
        broken = 0
        while self._channel is not None:
            try:
                self._channel.send(data)
                return "shared"
            except OSError as error:
                broken += 1
                remedy = (
                    "they are made anew" if broken == 1 else "from now on updates go as requests, which take longer"
                )
                logger.warning("The connections for updates to %s broke (%s): %s.", self.url, error, remedy)
                self._leave()
            if broken == 1:
                self._connect()
        return self._request_parts(data)

    def _on_host(self) -> memoryview:
        """The update's bytes, copied from the GPU where it is on one."""
        if self._flat.device.type == "cpu":
            return self._flat.numpy().data
        if self._host is None:
            self._host = torch.empty(self._flat.shape, dtype=torch.uint8)
            if self._flat.device.type == "cuda":
                with contextlib.suppress(RuntimeError):  # a limit on locked memory: the copy takes longer
                    self._host = self._host.pin_memory()
        return self._host.copy_(self._flat).numpy().data

    def _request_parts(self, data: memoryview) -> str:
        """Send the update in requests, a few at a time."""
        transfer = uuid.uuid4().hex

        def send(index: int) -> None:
            self.call("qerl_receive", transfer, index, part=data[index * CHUNK : (index + 1) * CHUNK])

        with ThreadPoolExecutor(max_workers=PARTS) as pool:
            list(pool.map(send, range(-(-len(data) // CHUNK))))
        return transfer

    def set_noise(self, norms: Sequence[str], draw: NoiseDraw) -> float | None:
        self._declare(norms)
        return self._effective(self.call("qerl_noise", *_numbers(draw)))

    def _declare(self, norms: Sequence[str]) -> None:
        """Which norms carry noise."""
        if tuple(norms) != self._noisy:
            self.call("qerl_noisy_norms", " ".join(norms))
            self._noisy = tuple(norms)

    def _effective(self, answers: list[dict]) -> float:
        effective = answers[0].get("sigma_effective")
        if not isinstance(effective, float | int):
            raise odd(self.url + CALL, 'a number "sigma_effective"', f"{answers[0]}")
        return float(effective)

    def contents(self) -> Contents:
        answers = self.call("qerl_contents")
        try:
            ranks = [Contents(a["received"], list(a["damaged"]), _draw(a["draw"])) for a in answers]
        except (KeyError, TypeError) as error:
            raise odd(self.url + CALL, "what each rank holds", f"{answers}") from error
        first, damaged = ranks[0], sorted({name for rank in ranks for name in rank.damaged})
        if any(rank._replace(damaged=[]) != first._replace(damaged=[]) for rank in ranks):
            damaged.append(f"another update or noise on some of the {len(ranks)} ranks")
        digest, fingerprint = self._sent
        return first._replace(received=fingerprint if first.received == digest else first.received, damaged=damaged)

    def reset_prefix_cache(self) -> None:
        self.client.reset_prefix_cache()

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        counts, everyone = gather_prompts(prompts)
        payload: list[list[Completion] | None] = [None]
        try:
            payload[0] = self._complete(everyone, sampling)
        finally:  # the other processes wait for it, also where this one has failed
            broadcast_object_list(payload, from_process=0)
        assert payload[0] is not None
        return payload[0][: counts[0]]

    def _complete(self, prompts: list[list[int]], sampling: Sampling) -> list[Completion]:
        if not prompts:
            return []
        further: dict[str, Any] = {"ignore_eos": sampling.ignore_eos, "stop_token_ids": list(sampling.stop_token_ids)}
        if sampling.seed is not None and sampling.temperature > 0:
            further["seed"] = [sampling.seed + i for i in range(len(prompts))]
        output = self.client.generate(
            prompts,
            n=1,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
            logprobs=0,
            generation_kwargs=further,
        )
        tokens, logps = output["completion_ids"], output["logprobs"]
        with understood(self.client.base_url, "one log-probability for each token"):
            return [
                Completion(list(ids), [math.nan if step[0] is None else step[0] for step in steps])
                for ids, steps in zip(tokens, logps, strict=True)
            ]

    def trl_attributes(self) -> dict[str, Any]:
        return {"vllm_client": self.client}

    def close(self) -> None:
        """Close the connections; the server keeps running."""
        self._leave()
        self.client.close()

    def _leave(self) -> None:
        """Shared memory and connections for updates."""
        for way in (self._shared, self._channel):
            if way is not None:
                way.close()
        self._shared = self._channel = self._host = None


def _numbers(draw: NoiseDraw) -> tuple[str, int, int, int]:
    """As the worker takes them."""
    return repr(draw.sigma), draw.seed, draw.step, draw.generation


def _draw(key: Sequence[Any] | None) -> NoiseDraw | None:
    return None if key is None else NoiseDraw(*key)


#: other ways to write the address of this machine's own interface; 0.0.0.0 is TRL's default
_HERE = {"localhost": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}


def _is_loopback(url: str) -> bool:
    host = urlparse(url).hostname or ""
    try:
        return ipaddress.ip_address(_HERE.get(host, host)).is_loopback
    except ValueError:  # a name
        return False
