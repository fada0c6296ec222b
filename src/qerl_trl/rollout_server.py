"""The trainer's side of a vLLM server that runs our plugin: adapter and noise go in, completions come out.

The data goes through `/collective_rpc` as text (see vllm_worker.py). Completions come through TRL's own client. vLLM's NCCL weight
transfer is not used: on the server it ends in `model.load_weights`, which knows the names of a checkpoint and neither adapter buffers
nor noise, and an adapter is small (rank 32 on 7B: 160 MB in bf16).
"""

import base64
import hashlib
import ipaddress
import json
import logging
import uuid
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

import requests
import torch
from trl.generation.vllm_client import VLLMClient

from .linear import NVFP4Linear, compute_dtype
from .norm_noise import NoiseDraw
from .norms import canonical_name
from .rollout_policy import adapter_room, rollout_layers
from .vllm_checksum import checksum

if TYPE_CHECKING:
    from .rollout import QeRLVLLMGeneration
    from .vllm_state import AdapterTensors

logger = logging.getLogger(__name__)

#: seconds that one message to the server may take
MESSAGE_TIMEOUT = 300


class ServerLink:
    """A connection to a running server, checked against the trainer's model.

    Raises:
        `ConnectionError`: no server answers.
        `RuntimeError`: it runs without our plugin, without room for this adapter, or with other weights.
    """

    def __init__(self, generation: "QeRLVLLMGeneration") -> None:
        url = generation.server_base_url or f"http://{generation.server_host}:{generation.server_port}"
        self.generation = generation
        self.client = VLLMClient(base_url=url, connection_timeout=generation.server_timeout)
        self.url = self.client.base_url
        # TRL's session retries answers of 500 for a minute; our calls have said what is wrong by then
        self.session = requests.Session()
        if not _is_loopback(self.url):
            logger.warning(
                "%s is not a loopback address. The endpoint that takes the adapter has no authentication: make sure that only "
                "this trainer can reach it.",
                self.url,
            )
        self._check()

    def _check(self) -> None:
        model = self.generation.model
        room = adapter_room(model)
        try:
            ranks = self.call("qerl_describe")
        except RuntimeError as error:
            raise RuntimeError(
                f"The server at {self.url} does not run the qerl-trl plugin ({error}). Start it with VLLM_SERVER_DEV_MODE=1 vllm "
                f"serve {model.name_or_path} --host 127.0.0.1 --quantization qerl_nvfp4 --worker-extension-cls "
                "qerl_trl.vllm_worker.QeRLWorkerExtension --logprobs-mode processed_logprobs --max-logprobs -1 "
                f'--additional-config \'{{"qerl": {{"adapter": {json.dumps(room)}}}}}\''
            ) from error
        missing = set(rollout_layers(model)) - set(ranks[0]["layers"])
        if missing or ranks[0]["adapter_rank"] < room["rank"]:
            raise RuntimeError(
                f"The server at {self.url} has adapter buffers of rank {ranks[0]['adapter_rank']} in {len(ranks[0]['layers'])} "
                f"layers, but the trainer's adapter has rank {room['rank']} and {len(missing)} layers beyond those "
                f'({sorted(missing)[:3]}). Restart it with --additional-config \'{{"qerl": {{"adapter": {json.dumps(room)}}}}}\'.'
            )
        self._compare_weights([rank["checksums"] for rank in ranks])

    def _compare_weights(self, ranks: list[dict[str, list[int]]]) -> None:
        """The packed bytes of every layer must be the trainer's: another scale rule would go unnoticed by the probe."""
        for name, module in self.generation.model.named_modules():
            name = canonical_name(name)
            if not isinstance(module, NVFP4Linear) or name not in ranks[0]:
                continue
            mine = checksum(module.weight_packed, module.weight_scale)
            theirs = [sum(rank[name][i] for rank in ranks) // ranks[0][name][2] for i in (0, 1)]
            if list(mine) != theirs:
                raise RuntimeError(
                    f"The server's weights of {name} differ from the trainer's. Give the server the same checkpoint, and the same "
                    f'scale rule if it quantizes at load: --additional-config \'{{"qerl": {{"scale_rule": '
                    f'"{self.generation.trainer.args.scale_rule}"}}}}\'.'
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

    def push_adapter(self, adapter: dict[str, "AdapterTensors"], norms: dict[str, torch.Tensor]) -> None:
        """Send an adapter and trained norms; the server holds all of it or what it had before."""
        from .vllm_worker import CHUNK, encode_update

        data = encode_update(adapter, norms, compute_dtype(self.generation.model))
        transfer = uuid.uuid4().hex
        for index, start in enumerate(range(0, len(data), CHUNK)):
            self.call("qerl_receive", transfer, index, base64.b64encode(data[start : start + CHUNK]).decode())
        answers = self.call("qerl_apply", transfer, hashlib.sha256(data).hexdigest())
        if any(answer["layers"] != len(adapter) for answer in answers):
            raise RuntimeError(f"The server wrote {answers} instead of {len(adapter)} adapter layers.")

    def remember_clean(self, names: tuple[str, ...]) -> None:
        """Declare which norms carry noise."""
        self.call("qerl_noisy_norms", " ".join(names))

    def set_noise(self, draw: NoiseDraw) -> float:
        """Take this draw; returns the rms of what landed in the norm weights."""
        answers = self.call("qerl_noise", repr(draw.sigma), draw.seed, draw.step, draw.generation)
        return float(answers[0]["sigma_effective"])

    def reset_prefix_cache(self) -> bool:
        """Whether the server forgot all cached prefixes."""
        response = self.session.post(f"{self.url}/reset_prefix_cache", timeout=MESSAGE_TIMEOUT)
        if response.status_code != 200:
            return False
        return bool(response.json().get("success", True)) if response.content else True  # empty before vLLM 0.26

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
