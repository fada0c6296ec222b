"""The engine on a server: `vllm serve` with our plugin, reached from the trainer's main process.

The server is first compared with the trainer's model: settings, and every linear layer, embedding and norm by name and
checksum ([`differences`]); checksums of tensor-parallel shards add up. An update goes through shared memory, or between
hosts in a request body (weights.py); noise goes as a `NoiseDraw`. The server's workers apply both (vllm/worker.py).
Completions come from vLLM's own routes, through TRL's client. vLLM's NCCL weight transfer is not used: it calls
`model.load_weights`, without adapter buffers and noise.
"""

import contextlib
import json
import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, cast
from urllib.parse import urlsplit

import numpy as np
import requests
import torch
from accelerate.utils import broadcast_object_list
from requests.adapters import HTTPAdapter
from torch import nn
from transformers import PreTrainedModel
from trl.generation.vllm_client import VLLMClient

from ..noise.hooks import NoiseDraw
from ..nvfp4.linear import NVFP4Linear
from ..support.names import canonical_name
from .engine import (
    CALL,
    MESSAGE_TIMEOUT,
    SECRET,
    Completion,
    Contents,
    Engine,
    RolloutError,
    Sampling,
    Seeds,
    Update,
    gather_prompts,
    secret,
)
from .spec import LOGPROBS_MODE, EngineSpec, active_adapter, linear_layers, rollout_layers, trained_norms
from .weights import DTYPES, SharedMemory, UpdateLayout, WeightSummary, checksum_of, summary

logger = logging.getLogger(__name__)

_REMEDIES = {
    200: "It is not JSON: another service or a proxy answers there. Check vllm_server_base_url",
    401: f"Start server and trainer with the same {SECRET}",
    404: "Start the server with the command that the trainer prints",
    413: "Lower generation_batch_size, or raise the limit of the proxy in between",
}
#: concurrent requests with one seed per prompt
CONCURRENCY = 256


class Client(VLLMClient):
    """TRL's vLLM client that also sends the server's secret, calls [`CALL`], and passes one seed per prompt."""

    def __init__(self, url: str, secret: str, timeout: float) -> None:
        self._secret = secret
        super().__init__(base_url=url.rstrip("/"), connection_timeout=timeout)

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 1.0) -> None:
        """Wait for the server as TRL does, but with a time limit for other services. The session is not used before."""
        self.session.auth = self._authorize  # a function, because ~/.netrc would replace a header
        retries = self.session.get_adapter(  # type: ignore[attr-defined]
            self.base_url
        ).max_retries.new(raise_on_status=False)
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, HTTPAdapter(max_retries=retries, pool_maxsize=CONCURRENCY))
        end = time.monotonic() + total_timeout
        while True:
            try:
                return requests.get(f"{self.base_url}/health", timeout=5).raise_for_status()
            except requests.RequestException as error:
                if time.monotonic() >= end:
                    raise ConnectionError(
                        f"No vLLM server answers at {self.base_url} within vllm_server_timeout={total_timeout:g} s "
                        f"({error}). Start one, or correct vllm_server_base_url."
                    ) from error
            time.sleep(retry_interval)

    def _authorize(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = f"Bearer {self._secret}"
        return request

    def call(self, method: str, *args: str) -> list[dict]:
        """Call a method of the worker extension on every rank; `qerl_put` also resets the prefix cache."""
        content = self._post(self.base_url + CALL, json={"method": method, "args": args}, timeout=MESSAGE_TIMEOUT)
        refused = [answer["error"] for answer in content["results"] if "error" in answer]
        if not (refused or content["reset"]):
            refused = ["it did not reset its prefix cache, because requests are running. Let no other client use it"]
        if refused:
            raise RolloutError(f"The server at {self.base_url} refused {method}: {refused[0]}")
        return content["results"]

    def upload(self, data: Any) -> str:
        """Send an update to the server's host. Returns the name of its shared memory there."""
        return _content(self.session.put(self.base_url + CALL, data=data, timeout=MESSAGE_TIMEOUT))["memory"]

    def _get(self, url: str, **kwargs: Any) -> dict:
        return _content(self.session.get(url, timeout=MESSAGE_TIMEOUT, **kwargs))

    def _post(self, url: str, **kwargs: Any) -> dict:
        asked = kwargs.get("json") or {}
        if not isinstance(asked.get("seed"), list):
            return _content(self.session.post(url, **kwargs))
        # vLLM takes one seed per request
        each = [asked | {"prompt": [p], "seed": seed} for p, seed in zip(asked["prompt"], asked["seed"], strict=True)]
        contents = _at_once(lambda one: self._post(url, json=one), each)
        return {"choices": [choice for content in contents for choice in content["choices"]]}

    def get_server_info(self) -> dict:
        """Return the vLLM settings that TRL's trainer reads; vLLM has a route for them in development mode only."""
        return {"model_config": {"logprobs_mode": LOGPROBS_MODE}}  # checked by `differences`

    def generate(self, prompts: list, features: list | None = None, *args: Any, **kwargs: Any) -> dict:
        """Generate as TRL does; `seed` in `generation_kwargs` may be a list, one per prompt, or [`Seeds`]. `logprobs`
        has only the sampled token, `logprob_token_ids` ids and log-probabilities of the most likely, if asked for."""
        further = dict(kwargs.pop("generation_kwargs", None) or {})
        if isinstance(seeds := further.get("seed"), Seeds):
            further["seed"] = seeds.of(len(prompts)) if features is None else None
        output: dict[str, Any] = super().generate(prompts, features, *args, **kwargs | {"generation_kwargs": further})
        if count := kwargs.get("logprobs"):
            for i, tokens in enumerate(output["completion_ids"]):
                ids, logps = output["logprob_token_ids"][i], output["logprobs"][i]
                sampled = [values[row.index(token)] for token, row, values in zip(tokens, ids, logps, strict=True)]
                top = [row[:count] for row in ids], np.array([values[:count] for values in logps], np.float32)
                output["logprobs"][i], output["logprob_token_ids"][i] = [[value] for value in sampled], top
        return output


def _content(response: requests.Response) -> dict:
    """Return the JSON of a response. Raises [`RolloutError`] if it has none."""
    with contextlib.suppress(ValueError):
        if response.status_code == 200:
            return response.json()
    remedy = _REMEDIES.get(response.status_code, "See the server's log")
    raise RolloutError(f"{response.url} answered {response.status_code}: {response.text[:300].strip()}. {remedy}.")


def _at_once(call: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """Call each item in a daemon thread: neither `rollout_timeout` nor exit waits for a hanging request."""
    gate, futures = threading.Semaphore(CONCURRENCY), [Future[Any]() for _ in items]

    def work(future: Future, item: Any) -> None:
        with gate:
            try:
                future.set_result(call(item))
            except BaseException as error:
                future.set_exception(error)

    for pair in zip(futures, items, strict=True):
        threading.Thread(target=work, args=pair, daemon=True).start()
    for future in wait(futures, return_when=FIRST_EXCEPTION).done:
        future.result()
    return [future.result() for future in futures]


class ServerEngine(Engine):
    """A connection to the server at `url`, checked against the trainer's PEFT model and its `spec`.
    Waits `timeout` seconds for an answer."""

    def __init__(self, url: str, spec: EngineSpec, model: nn.Module, timeout: float) -> None:
        self.spec, self.url = spec, url
        self._layout, self._flat = UpdateLayout(()), torch.empty(0, dtype=torch.uint8)
        self._memory: SharedMemory | None = None
        probe = None
        with contextlib.suppress(OSError):  # no /dev/shm
            probe = SharedMemory(1, torch.device("cpu"))
        try:
            self.client = Client(url, secret(), timeout)
            ranks = self.client.call("qerl_describe", probe.name if probe else "")
            self._local = all(rank["same_host"] for rank in ranks)
            found = differences(spec, model, ranks)
        except (OSError, RuntimeError, KeyError) as error:  # KeyError: other version
            kind = ConnectionError if isinstance(error, OSError) else RuntimeError
            what = f"{type(error).__name__}: {error}"
            raise kind(f"The server at {url} does not serve this trainer: {what}\n{self._advice()}") from error
        if found:
            listed = "".join(f"\n  - {difference}" for difference in found)
            raise RuntimeError(f"The server at {url} does not run the trainer's model:{listed}\n{self._advice()}")
        if urlsplit(url).scheme != "https" and not _is_loopback(url):
            logger.warning(
                "%s is neither loopback nor https, so others can read secret, adapter and texts. Use --ssl-certfile "
                "and --ssl-keyfile, or a tunnel.",
                url,
            )
        logger.info("Updates go to %s %s.", url, "through /dev/shm" if self._local else "over the network")

    def _advice(self) -> str:
        asked = urlsplit(self.url)
        host, where = ("127.0.0.1", "") if _is_loopback(self.url) else ("0.0.0.0", f" on {asked.hostname}")
        command = self.spec.serve_command(host, asked.port)
        return f"Set the trainer's {SECRET} in the server's environment, too; it is started{where} by\n{command}"

    def put(self, update: Update | None, noisy: Sequence[str] = (), draw: NoiseDraw | None = None) -> float | None:
        """Do as the parent does, but in one request."""
        told = {"update": update and self._deliver(update), "noisy": [*noisy], "draw": draw}
        answer = self.client.call("qerl_put", json.dumps(told))[0]
        if self._memory is not None:
            self._memory.unlink()  # the workers have mapped it
        return answer.get("sigma_effective")

    def _deliver(self, update: Update) -> dict[str, Any]:
        """Send an update to the server's host. Returns its description for the workers."""
        layout = UpdateLayout.of(update, DTYPES[self.spec.dtype])
        if layout != self._layout:
            device = next(t.a.device for t in update.adapter.values())
            self._layout, self._memory = layout, SharedMemory(layout.nbytes, device) if self._local else None
            if self._memory is not None and device.type == "cpu":
                self._flat = self._memory.data
            else:
                self._flat = torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)
        self._layout.pack(update, self._flat)
        if self._memory is None:
            name = self.client.upload(self._flat.cpu().numpy().data)
        else:
            name = self._memory.name
            if self._flat is not self._memory.data:
                self._memory.data.copy_(self._flat)
        sums = {"checksum": checksum_of(self._flat), "fingerprint": update.fingerprint}
        return {"layout": self._layout.text, "memory": name, **sums}

    def contents(self) -> Contents:
        answers = self.client.call("qerl_contents")
        ranks = [Contents(a["received"], a["damaged"], a["draw"] and NoiseDraw(*a["draw"])) for a in answers]
        damaged = sorted({name for rank in ranks for name in rank.damaged})
        if any((rank.received, rank.draw) != (ranks[0].received, ranks[0].draw) for rank in ranks):
            damaged.append(f"another update or noise on some of the {len(ranks)} ranks")
        return ranks[0]._replace(damaged=damaged)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        counts, everyone = gather_prompts(prompts)
        payload: list[list[Completion] | None] = [None]
        try:
            payload[0] = self._complete(everyone, sampling)
        finally:  # the other processes wait for it, even after a failure here
            broadcast_object_list(payload, from_process=0)
        assert payload[0] is not None
        return payload[0][: counts[0]]

    def _complete(self, prompts: list[list[int]], sampling: Sampling) -> list[Completion]:
        if not prompts:
            return []
        first = sampling.seed if sampling.temperature > 0 else None
        seeds = None if first is None else [first + i for i in range(len(prompts))]
        own = vars(sampling) | {"seed": seeds, "stop_token_ids": list(sampling.stop_token_ids)}
        output = self.client.generate(prompts, generation_kwargs=own)
        return [
            Completion(list(ids), [math.nan if step[0] is None else step[0] for step in steps])
            for ids, steps in zip(output["completion_ids"], output["logprobs"], strict=True)
        ]

    def trl_attributes(self) -> dict[str, Any]:
        return {"vllm_client": self.client}

    def close(self) -> None:
        """Close the connections; the server keeps running."""
        self._layout, self._flat, self._memory = UpdateLayout(()), torch.empty(0, dtype=torch.uint8), None
        self.client.session.close()


def _is_loopback(url: str) -> bool:
    return urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1", "0.0.0.0")  # the last is TRL's default


def trainer_summaries(model: nn.Module, names: Iterable[str]) -> dict[str, WeightSummary]:
    """Summarize the trainer's linear layers, and its other frozen weights in `names`."""
    summaries: dict[str, WeightSummary] = {}
    head = cast(PreTrainedModel, model).get_output_embeddings()  # PeftModel passes it on
    for name, layer in linear_layers(model).items():
        if isinstance(layer, NVFP4Linear):
            scale = float(layer.global_scale)
            summaries[name] = summary("nvfp4", layer.weight_packed, layer.weight_scale, divisor=scale)
        else:
            summaries[name] = summary("embedding" if layer is head else "dense", layer.weight)
        if layer.bias is not None:
            summaries[f"{name}.bias"] = summary("bias", layer.bias)
    others = set(names) - set(trained_norms(model)) - set(summaries)
    for path, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None and (name := canonical_name(path)) in others:
            summaries[name] = summary("norm" if weight.ndim == 1 else "embedding", weight)
    return summaries


def differences(spec: EngineSpec, model: nn.Module, ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Describe how a server differs from the trainer's `spec` and `model`; empty if it can generate for the trainer.
    `ranks`: answers of `qerl_describe`, one per tensor-parallel rank."""
    first, found = ranks[0], []
    if first["dtype"] != spec.dtype:
        found.append(f"it computes in {first['dtype']}, the trainer in {spec.dtype}")
    if first["logprobs_mode"] != LOGPROBS_MODE:
        found.append(f"its log-probabilities are {first['logprobs_mode']}, not {LOGPROBS_MODE}")
    if spec.max_model_len is not None and first["max_model_len"] < spec.max_model_len:
        found.append(f"its longest sequence is {first['max_model_len']} tokens, the trainer's {spec.max_model_len}")
    if spec.batch_invariant and not first["batch_invariant"]:
        found.append("it was started without batch-invariant kernels, and vllm_batch_invariant=True asks for them")
    if (compute := first["options"].get("compute", "w4a16")) != spec.compute:
        found.append(f"its NVFP4 products are {compute}, the trainer's {spec.compute} (compute)")
    groups: dict[str, list[str]] = defaultdict(list)
    causes = {"norm": "another checkpoint, or an earlier run trained them on this server"}
    if spec.scale_rule not in (None, rule := first["options"].get("scale_rule", "rtn")):
        causes["nvfp4"] = f"scale_rule={rule!r} there, {spec.scale_rule!r} in the trainer"
    theirs = {name: [WeightSummary(*rank["weights"][name]) for rank in ranks] for name in first["weights"]}
    mine = trainer_summaries(model, theirs)
    for name, weight in mine.items():
        if name not in theirs:
            if weight.kind == "nvfp4":
                groups["it has no layer for"].append(name)
        elif (there := theirs[name][0].kind) != weight.kind:
            groups[f"{there} there and {weight.kind} in the trainer:"].append(name)
        elif not _same(weight, theirs[name]):
            groups[f"other {weight.kind} weights ({causes.get(weight.kind, 'another checkpoint')}):"].append(name)
    for name, shards in theirs.items():
        if name not in mine and shards[0].kind in ("nvfp4", "dense"):
            groups["layers that the trainer's model does not have:"].append(name)
    adapter, buffers = active_adapter(model), first["adapter_ranks"]
    for name, layer in rollout_layers(model).items():
        has, rank = buffers.get(name), layer.r[adapter]
        if has is None:
            groups["no adapter buffers in"].append(name)
        elif has < rank:
            groups[f"adapter buffers of rank {has}, but the trainer's adapter has rank {rank}, in"].append(name)
    for text, names in groups.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        found.append(f"{text.replace('nvfp4', 'NVFP4')} {', '.join(sorted(names)[:3])}{more}")
    return found


def _same(mine: WeightSummary, shards: list[WeightSummary]) -> bool:
    """Whether the shards form the weight or copies of it (replicated norms; k and v on more ranks than heads)."""
    copies, rest = divmod(sum(shard.numel for shard in shards), mine.numel)
    if rest or any(abs(shard.divisor - mine.divisor) > 1e-6 * mine.divisor for shard in shards):
        return False
    sums = [sum(parts) for parts in zip(*(shard.sums for shard in shards), strict=True)]
    return sums == [copies * value for value in mine.sums]
