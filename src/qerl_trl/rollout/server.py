"""The engine on a server: `vllm serve` with our plugin, reached from the trainer's main process.

Adapter and noise go through `/collective_rpc` as text (see vllm/worker.py). Completions come through TRL's own client. vLLM's NCCL
weight transfer is not used: on the server it ends in `model.load_weights`, which knows the names of a checkpoint and neither adapter
buffers nor noise, and an adapter is small (rank 32 on 7B: 160 MB in bf16).
"""

import base64
import hashlib
import ipaddress
import logging
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlparse

import requests
import torch
from accelerate.utils import broadcast_object_list
from torch import nn
from trl.generation.vllm_client import VLLMClient

from ..noise.hooks import NoiseDraw
from .engine import Completion, Engine, RolloutError, Sampling, gather_prompts
from .handshake import differences
from .spec import EngineSpec
from .wire import CHUNK, AdapterTensors, encode_update

logger = logging.getLogger(__name__)

#: seconds that one message to the server may take
MESSAGE_TIMEOUT = 300
#: requests at a time where each prompt has a seed of its own
CONCURRENCY = 64


class ServerEngine(Engine):
    """A connection to a running server, checked against the trainer's model.

    Args:
        url: base URL of the server.
        spec: what the server has to run.
        model: the trainer's PEFT model.
        timeout: seconds to wait for the server to answer at all.

    Raises:
        `ConnectionError`: no server answers.
        `RuntimeError`: it runs without our plugin, without buffers for this adapter, or with other weights.
    """

    def __init__(self, url: str, spec: EngineSpec, model: nn.Module, timeout: float) -> None:
        self.spec = spec
        self.client = VLLMClient(base_url=url, connection_timeout=timeout)
        self.url = self.client.base_url
        # TRL's session retries answers of 500 for a minute; our calls have said what is wrong by then
        self.session = requests.Session()
        self._noisy: tuple[str, ...] = ()
        if not _is_loopback(self.url):
            logger.warning(
                "%s is not a loopback address. The endpoint that takes the adapter has no authentication: make sure that only "
                "this trainer can reach it.",
                self.url,
            )
        self.check(model)

    def check(self, model: nn.Module) -> None:
        """Compare what the server runs with the trainer's model.

        Raises:
            `RuntimeError`: they differ; says where, and gives the command that starts the right server.
        """
        try:
            ranks = self.call("qerl_describe")
        except RuntimeError as error:
            raise RuntimeError(
                f"The server at {self.url} does not run the qerl-trl plugin ({error}). Start it with\n{self.spec.serve_command()}"
            ) from error
        found = differences(self.spec, model, ranks)
        if found:
            listed = "".join(f"\n  - {difference}" for difference in found)
            raise RuntimeError(
                f"The server at {self.url} does not run the trainer's model:{listed}\nRestart it with\n{self.spec.serve_command()}"
            )

    def call(self, method: str, *args: Any) -> list[dict]:
        """One method of the worker extension on every rank.

        Raises:
            `RuntimeError`: the server refused, with its words.
        """
        body = {"method": method, "args": [str(arg) for arg in args], "timeout": MESSAGE_TIMEOUT}
        response = self.session.post(f"{self.url}/collective_rpc", json=body, timeout=MESSAGE_TIMEOUT)
        if response.status_code != 200:
            raise RuntimeError(f"vLLM answered {method} with {response.status_code}: {response.text[:500]}")
        answers = response.json()["results"]
        refusals = [answer["error"] for answer in answers if "error" in answer]
        if refusals:
            raise RuntimeError(f"vLLM refused {method}: {refusals[0]}")
        return answers

    def put_adapter(self, adapter: Mapping[str, AdapterTensors]) -> None:
        self._send(adapter, {})

    def put_norms(self, norms: Mapping[str, torch.Tensor]) -> None:
        self._send({}, norms)

    def _send(self, adapter: Mapping[str, AdapterTensors], norms: Mapping[str, torch.Tensor]) -> None:
        data = encode_update(adapter, norms, getattr(torch, self.spec.dtype))
        transfer = uuid.uuid4().hex
        for index, start in enumerate(range(0, len(data), CHUNK)):
            self.call("qerl_receive", transfer, index, base64.b64encode(data[start : start + CHUNK]).decode())
        answers = self.call("qerl_apply", transfer, hashlib.sha256(data).hexdigest())
        expected = {"layers": len(adapter), "norms": len(norms)}
        if any(answer != expected for answer in answers):
            raise RuntimeError(f"The server was sent {expected} and wrote {answers}.")

    def set_noise(self, norms: Sequence[str], draw: NoiseDraw) -> float | None:
        if tuple(norms) != self._noisy:
            self.call("qerl_noisy_norms", " ".join(norms))
            self._noisy = tuple(norms)
        answers = self.call("qerl_noise", repr(draw.sigma), draw.seed, draw.step, draw.generation)
        return float(answers[0]["sigma_effective"])

    def sampled_under(self, draw: NoiseDraw) -> bool | None:
        key = [repr(draw.sigma), *draw[1:]]
        return all(answer["sampled"] == key for answer in self.call("qerl_sampled"))

    def reset_prefix_cache(self) -> None:
        response = self.session.post(f"{self.url}/reset_prefix_cache", timeout=MESSAGE_TIMEOUT)
        done = response.status_code == 200
        if done and response.content:  # empty before vLLM 0.26
            done = bool(response.json().get("success", True))
        if not done:
            raise RolloutError(
                f"The server at {self.url} refused to reset its prefix cache (requests are still running), so the next rollout would "
                "mix the new adapter with attention states of the old one. Let nobody else use this server."
            )

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
        if sampling.seed is None or sampling.temperature == 0:
            return self._request(prompts, sampling, None)
        # a request has one seed for all of its prompts
        with ThreadPoolExecutor(max_workers=CONCURRENCY) as pool:
            jobs = [pool.submit(self._request, [p], sampling, sampling.seed + i) for i, p in enumerate(prompts)]
            return [job.result()[0] for job in jobs]

    def _request(self, prompts: list[list[int]], sampling: Sampling, seed: int | None) -> list[Completion]:
        further = {"ignore_eos": sampling.ignore_eos} | ({} if seed is None else {"seed": seed})
        # TRL declares token ids only
        output: dict[str, Any] = self.client.generate(
            prompts,
            n=1,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
            logprobs=0,
            generation_kwargs=further,
        )
        return [
            Completion(list(tokens), [step[0] for step in logps])
            for tokens, logps in zip(output["completion_ids"], output["logprobs"], strict=True)
        ]

    def trl_attributes(self) -> dict[str, Any]:
        return {"vllm_client": self.client}

    def close(self) -> None:
        """Close the connections; the server keeps running."""
        self.session.close()
        self.client.session.close()


def _is_loopback(url: str) -> bool:
    host = urlparse(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
