"""A server's completions as arrays (packed.py): vLLM's own handler of `/v1/completions`, up to the answer.

Request, sampling parameters, cancellation and errors are vLLM's: only what is made of the engine's output differs, and that the engine's
front end makes no text of tokens, unless stop strings are looked for in it. Whatever has no place in the arrays (several log-probabilities per
token, those of the prompt, a stream, an echo, beams) is answered by vLLM as ever, and so is a request that does not ask for them.
"""

import copy
from typing import Any

from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

from ..engine import Completion
from ..packed import FIELD, HEADER, VERSION, pack

#: the name of vLLM's handler in its application's state, where each request looks it up
HANDLER = "openai_serving_completion"
#: what vLLM writes for a log-probability of minus infinity, which JSON does not have
_LOWEST = -9999.0


def install(state: Any) -> None:
    """Put a handler that packs in the place of vLLM's; does nothing the second time, and nothing where there is none."""
    handler = getattr(state, HANDLER, None)
    if type(handler) is OpenAIServingCompletion:
        setattr(state, HANDLER, PackedServing.of(handler))


class TokensOnly(CompletionRequest):
    """A request whose answer is packed."""

    @classmethod
    def of(cls, request: CompletionRequest) -> "TokensOnly":
        return cls.model_construct(request.model_fields_set, **vars(request), **(request.model_extra or {}))

    def to_sampling_params(self, *args: Any, **kwargs: Any) -> SamplingParams:
        parameters = super().to_sampling_params(*args, **kwargs)
        parameters.detokenize = bool(parameters.stop)
        return parameters


class PackedServing(OpenAIServingCompletion):
    """vLLM's handler, which packs the answers of [`TokensOnly`]."""

    @classmethod
    def of(cls, handler: OpenAIServingCompletion) -> "PackedServing":
        """With everything that `handler` has."""
        own = copy.copy(handler)
        own.__class__ = cls
        return own  # type: ignore[return-value]

    async def create_completion(self, request: CompletionRequest, raw_request: Any = None) -> Any:
        asked = raw_request is not None and raw_request.headers.get(HEADER) == VERSION
        return await super().create_completion(
            TokensOnly.of(request) if asked and _fits(request) else request, raw_request
        )

    def request_output_to_completion_response(
        self, final_res_batch: list[RequestOutput], request: CompletionRequest, *args: Any, **kwargs: Any
    ) -> Any:
        if not isinstance(request, TokensOnly):
            return super().request_output_to_completion_response(final_res_batch, request, *args, **kwargs)
        bare = request.model_copy(update={"logprobs": None, "return_token_ids": False})
        response = super().request_output_to_completion_response(final_res_batch, bare, *args, **kwargs)
        completions = [_completion(sequence) for output in final_res_batch for sequence in output.outputs]
        setattr(response, FIELD, pack([output.prompt_token_ids or [] for output in final_res_batch], completions))
        return response


def _fits(request: CompletionRequest) -> bool:
    """Whether the arrays hold all that this request asks for."""
    more = ("stream", "echo", "use_beam_search", "logprob_token_ids")  # the last one is not in every vLLM
    return (
        request.logprobs == 0
        and request.prompt_logprobs is None
        and bool(request.return_token_ids)
        and not any(getattr(request, name, None) for name in more)
    )


def _completion(sequence: Any) -> Completion:
    tokens = list(sequence.token_ids)
    steps = zip(sequence.logprobs or (), tokens, strict=True)
    return Completion(tokens, [max(step[token].logprob, _LOWEST) for step, token in steps])
