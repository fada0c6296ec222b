"""The cases of at_843f908.py that need an engine or its server.

The engine is a copy of the trainer's own model under 843f908's `QeRLVLLMGeneration`, with one fault; its inside exists there only. What
stands for the same fault today is in the tests of this folder.
"""

import base64
import copy
import hashlib
import math
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

from benchmarks.faults_gpu_cases import exchanged, scaled, without

from tests.faults.doors import MODEL, Lost, case, ends_without, full_disk, trainer

NOISE = {"aqn_schedule": "constant", "aqn_sigma_start": 0.01}


# --- an engine --------------------------------------------------------------------------------------------------------------------


class Copied:
    """What 843f908's trainer has as `llm` and `state`: a copy of the trainer's model in evaluation mode, which takes adapters and noise.

    Attributes:
        change: what is done to an adapter that arrives. answer: what is done to (tokens, log-probabilities). draw: the noise that was set.
    """

    def __init__(self, model) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        for module in self.model.modules():
            vars(module).pop("forward", None)  # TRL's own, which computes with the trainer's model in a copy too
        self.change = self.answer = lambda given: given
        self.draw = None

    def load_adapter(self, adapter) -> int:
        import torch
        from qerl_trl.rollout_policy import rollout_layers

        adapter = self.change(dict(adapter))
        with torch.no_grad():
            for name, layer in rollout_layers(self.model).items():
                a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
                if name in adapter:
                    a.copy_(adapter[name].a)
                    b.copy_(adapter[name].b)
                else:
                    b.zero_()
        return len(adapter)

    def remember_clean(self, names) -> None: ...

    def set_noise(self, draw) -> None:
        self.draw = draw

    def sigma_effective(self) -> float:
        return 0.0 if self.draw is None else self.draw.sigma

    def reset_prefix_cache(self) -> bool:
        return True

    def generate(self, prompts, sampling_params, use_tqdm=False):
        outputs = []
        for number, prompt in enumerate(prompts):
            parameters = sampling_params[number] if isinstance(sampling_params, list) else sampling_params
            tokens, logps = self.answer(
                self.complete(prompt["prompt_token_ids"], parameters.max_tokens, parameters.temperature)
            )
            steps = [{t: SimpleNamespace(logprob=p, rank=1)} for t, p in zip(tokens, logps, strict=True)]
            one = SimpleNamespace(token_ids=tokens, logprobs=steps)
            outputs.append(SimpleNamespace(prompt_token_ids=prompt["prompt_token_ids"], outputs=[one]))
        return outputs

    def complete(self, prompt, count, temperature):
        import torch

        ids, logps = list(prompt), []
        for _ in range(count):
            with torch.no_grad():
                logits = self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].float()
            row = (logits / (temperature or 1.0)).log_softmax(-1)
            ids.append(int(torch.multinomial(row.exp(), 1) if temperature else row.argmax()))
            logps.append(float(row[ids[-1]]))
        return ids[len(prompt) :], logps


def with_engine(folder: Path, before=lambda engine, model: None, **options):
    """(trainer on bf16 NVFP4 weights, its engine); `before` may damage the engine before the probe at start looks at it."""
    from qerl_trl import rollout
    from qerl_trl.rollout import QeRLVLLMGeneration

    engines = []

    class Generation(QeRLVLLMGeneration):
        def _start_colocated(self):
            engine = Copied(self.model)
            before(engine, self.model)
            self.shared, self.llm, self.state, self.enable_sleep_mode = False, engine, engine, False
            engines.append(engine)

    rollout.QeRLVLLMGeneration = Generation
    given = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "max_steps": 2,
        "save_strategy": "no",
        "model_init_kwargs": {"dtype": "bfloat16"},
    }
    made = trainer(folder, **{**given, "targets": "all-linear", **options})
    return made, engines[0]


def started_with(folder: Path, change) -> None:
    """The check at start passes with this fault in the adapter."""
    with_engine(folder / "run", lambda engine, model: setattr(engine, "change", change))


@case("S.probe_in_bf16")
def adapter_is_doubled(folder):
    started_with(folder, scaled(2.0))


@case("S.probe_in_bf16")
def adapter_is_halved(folder):
    started_with(folder, scaled(0.5))


@case("S.probe_in_bf16")
def half_of_the_layers_are_lost(folder):
    started_with(folder, without(lambda name: int(name.split(".")[2]) % 2))


@case("S.probe_in_bf16")
def all_mlps_are_lost(folder):
    started_with(folder, without(lambda name: ".mlp." in name))


@case("S.probe_in_bf16")
def k_and_v_are_exchanged(folder):
    started_with(folder, exchanged)


@case("S.probe_in_bf16")
def unquantized_weights_are_served(folder):
    def dense(engine, model):
        from qerl_trl.linear import NVFP4Linear
        from transformers import AutoModelForCausalLM

        layers = dict(AutoModelForCausalLM.from_pretrained(MODEL, dtype="bfloat16").named_modules())
        base = engine.model.get_base_model()
        packed = [name for name, module in base.named_modules() if isinstance(module, NVFP4Linear)]
        assert packed
        for name in packed:
            base.get_submodule(name.rpartition(".")[0]).base_layer = layers[name.removesuffix(".base_layer")]

    with_engine(folder / "run", dense)


@case("S.embedding_adapter_unsent")
def adapter_on_the_embeddings(folder):
    sent = []
    made, _ = with_engine(
        folder / "run",
        lambda engine, model: setattr(engine, "change", lambda a: sent.extend(a) or a),
        targets=["q_proj", "embed_tokens"],
    )
    made.train()
    moved = [n for n, p in made.model.named_parameters() if "lora_embedding_B" in n and p.abs().sum() > 0]
    assert moved and not [name for name in sent if "embed" in name]


@case("S.noise_never_acts")
def rollout_function_samples_without_noise(folder):
    seen = []

    def rollout(prompts, trainer):
        engine = trainer.vllm_generation.llm
        seen.append(0.0 if engine.draw is None else engine.draw.sigma)
        ids = trainer.processing_class(text=prompts)["input_ids"]
        found = [engine.complete(one, 4, 1.0) for one in ids]
        return {"prompt_ids": ids, "completion_ids": [t for t, _ in found], "logprobs": [p for _, p in found]}

    made, _ = with_engine(folder / "run", rollout_func=rollout, logging_steps=1, **NOISE)
    made.train()
    logged = [entry["aqn/sigma"] for entry in made.state.log_history if "aqn/sigma" in entry]
    assert logged == [0.01, 0.01] and seen == [0.0, 0.0]


def trains_with_answers(folder: Path, answer) -> list[float]:
    """A run of two steps is trained to its end; what it logged as mismatch."""
    made, engine = with_engine(folder / "run", logging_steps=1)
    engine.answer = answer
    made.train()
    assert made.state.global_step == 2
    return [entry["rollout/mismatch_kl"] for entry in made.state.log_history if "rollout/mismatch_kl" in entry]


@case("S.engine_logps_nan")
def log_probabilities_are_all_nan(folder):
    assert trains_with_answers(folder, lambda given: (given[0], [math.nan] * len(given[0]))) == [0.0, 0.0]


@case("S.constant_logp_error")
def log_probabilities_are_shifted(folder):
    found = trains_with_answers(folder, lambda given: (given[0], [logp - 0.3 for logp in given[1]]))
    assert all(value > 0.03 for value in found)


@case("R4.completions_or_logps_bad")
def completions_are_empty(folder):
    with ends_without("empty", "resume"):
        trains_with_answers(folder, lambda given: ([], []))


@case("R4.noise_left_on")
def noise_stays_on(folder):
    import torch

    made, engine = with_engine(folder / "run", aqn=False)
    with torch.no_grad():
        for name, parameter in engine.model.named_parameters():
            if "norm" in name:
                parameter.add_(0.02 * torch.randn_like(parameter))
    made.train()
    assert made.state.global_step == 2


@case("R4.prefix_cache_stale")
def old_adapter_computes(folder):
    made, engine = with_engine(folder / "run", max_steps=3)
    engine.load_adapter = len  # what was computed under the adapter of the start is used again
    made.train()
    assert made.state.global_step == 3


@case("S.rescue_loses_checkpoint")
def disk_is_full_when_the_engine_dies(folder):
    import torch

    from qerl_trl import last_checkpoint
    from qerl_trl.rollout import RolloutError

    made, engine = with_engine(folder / "run", save_strategy="steps", save_steps=1, save_total_limit=1)

    def die(given):
        if made.state.global_step == 1:
            assert last_checkpoint(folder / "run") is not None
            torch.save = full_disk
            raise RuntimeError("EngineCore died")
        return given

    engine.answer, save = die, torch.save
    try:
        made.train()
    except RolloutError:
        if last_checkpoint(folder / "run") is None:
            raise Lost("the checkpoint of step 1") from None
    finally:
        torch.save = save
    raise AssertionError("the checkpoint is there")


# --- what a server is sent --------------------------------------------------------------------------------------------------------


def state():
    """A `RolloutState` over two fused layers and a norm, and the model."""
    import torch
    from qerl_trl.vllm_linear import AdaptedMethod
    from torch import nn

    from qerl_trl import vllm_state

    class Method(AdaptedMethod):
        def create_weights(self, *args, **kwargs): ...
        def apply(self, *args, **kwargs): ...

    model, layer = nn.Module(), nn.Module()
    model.qkv_proj = layer
    layer.quant_method, layer.qerl_splits = Method(["q_proj", "k_proj"], 4), [6, 2]
    layer.register_buffer("adapter_a", torch.zeros(8, 8))
    layer.register_buffer("adapter_b", torch.zeros(8, 4))
    model.norm = nn.RMSNorm(8)
    vllm_state.find_norms = lambda *args: {"model.norm": model.norm}
    return vllm_state.RolloutState(model), model


def adapter(rows: int = 2, value: float = 1.0):
    import torch
    from qerl_trl.vllm_state import AdapterTensors

    fill = torch.full((4, 8), value)
    return {
        "q_proj": AdapterTensors(fill.clone(), torch.ones(6, 4), 1.0),
        "k_proj": AdapterTensors(fill, torch.ones(rows, 4), 1.0),
    }


def worker():
    import torch
    from qerl_trl.vllm_worker import QeRLWorkerExtension

    extension = QeRLWorkerExtension()
    extension._qerl_rollout_state, model = state()
    extension.device = torch.device("cpu")
    return extension, model


def sent(extension, norms) -> dict:
    import torch
    from qerl_trl.vllm_worker import encode_update

    data = encode_update(adapter(), norms, torch.float32)
    extension.qerl_receive("t", "0", base64.b64encode(data).decode())
    return extension.qerl_apply("t", hashlib.sha256(data).hexdigest())


@case("S.update_refused_after_change")
def refused_update_has_changed_the_engine(folder):
    import torch

    extension, model = worker()
    answer = sent(extension, {"model.nowhere": torch.ones(8)})
    assert "error" in answer and model.qkv_proj.adapter_b.abs().sum() > 0


@case("S.update_values_bad")
def one_row_is_broadcast(folder):
    found, model = state()
    assert found.load_adapter(adapter(rows=1)) == 2 and model.qkv_proj.adapter_b[6:].eq(1).all()


@case("S.update_values_bad")
def adapter_of_nan_is_taken(folder):
    found, model = state()
    assert found.load_adapter(adapter(value=math.nan)) == 2 and model.qkv_proj.adapter_a.isnan().any()


@case("S.update_values_bad")
def noise_of_nan_is_taken(folder):
    extension, model = worker()
    extension.qerl_noisy_norms("model.norm")
    assert "error" not in extension.qerl_noise("nan", "1", "2", "3") and model.norm.weight.isnan().all()


@case("S.update_values_bad")
def noise_of_minus_one_is_taken(folder):
    extension, model = worker()
    clean = model.norm.weight.clone()
    extension.qerl_noisy_norms("model.norm")
    assert "error" not in extension.qerl_noise("-1", "1", "2", "3") and not model.norm.weight.equal(clean)


@case("S.update_values_bad")
def noise_of_infinity_is_taken(folder):
    extension, model = worker()
    extension.qerl_noisy_norms("model.norm")
    assert "error" not in extension.qerl_noise("inf", "1", "2", "3") and not model.norm.weight.isfinite().all()


@case("S.server_unauthenticated")
def stranger_fills_memory_and_sets_noise(folder):
    extension, _ = worker()
    extension.qerl_noisy_norms("model.norm")
    assert extension.qerl_receive("x", "0", base64.b64encode(bytes(3 * 2**22)).decode()) == {"bytes": 3 * 2**22}
    assert extension.qerl_noise("0.5", "1", "2", "3")["sigma_effective"] > 0.1


@case("S.engine_answer_garbage")
def server_answers_something_else(folder):
    import requests
    from qerl_trl.rollout_server import ServerLink

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args): ...

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    link = object.__new__(ServerLink)
    link.session, link.url = requests.Session(), f"http://127.0.0.1:{server.server_address[1]}"
    try:
        with ends_without(link.url, "vllm serve"):
            link.call("qerl_describe")
    finally:
        server.shutdown()
