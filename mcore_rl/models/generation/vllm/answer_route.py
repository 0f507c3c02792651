"""The route of packed answers, in vLLM's API process.

The route takes the requests of vLLM's /inference/v1/generate and gives them to the same handler. The handler makes an
object and a JSON entry of each token, which takes 0.7 s of the API process for an answer of 32,000 tokens. The subclass
here packs the engine's output instead.
"""

# FastAPI reads the annotations of `generate`, so they must not be strings.

import asyncio
import copy
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, validate_json_request, with_cancellation
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput

from mcore_rl.models.generation.vllm.packed import LOWEST_LOGPROB, ROUTE, Array, pack


class PackedTokens(ServingTokens):
    """vLLM's handler of requests for tokens, with packed answers."""

    @classmethod
    def of(cls, handler: ServingTokens) -> "PackedTokens":
        """Return a handler with the same engine and options."""
        own = copy.copy(handler)
        own.__class__ = cls
        return own

    async def serve_tokens_full_generator(
        self,
        request: GenerateRequest,
        result_generator: AsyncGenerator[RequestOutput, None],
        request_id: str,
        *_: Any,
        **__: Any,  # newer versions have more
    ) -> bytes | ErrorResponse:
        result = None
        try:
            async for each in result_generator:
                result = each  # the last one has the whole response
        except asyncio.CancelledError:
            return self.create_error_response("Client disconnected")
        assert result is not None, "the engine ends a request with a result"
        (output,) = result.outputs
        self._raise_if_error(output.finish_reason, request_id)
        told = {
            "finish_reason": output.finish_reason or "stop",
            "weight_versions": [[span.version, span.start, span.end] for span in output.weight_versions or ()],
        }
        arrays = arrays_of(output, request.sampling_params.logprobs or 0)
        if request.return_token_ids:
            arrays["prompt_token_ids"] = np.array(result.prompt_token_ids, np.int32)
            places = (request._response_mm_placeholders or {}).get("image", ())
            told["image_places"] = [[place.offset, place.length] for place in places]
        return pack(told, arrays)


def arrays_of(output: CompletionOutput, num_likeliest: int) -> dict[str, Array]:
    """Return the arrays in the engine's output.

    Ids of tokens are int32. Log-probabilities are float32, as the engine computes them.
    """
    ids, flat = np.array(output.token_ids, np.int32), output.logprobs
    assert isinstance(flat, FlatLogprobs), "`generate` has asked for this form"
    starts = np.array(flat.start_indices, np.int64)[: len(ids)]
    entries, values = np.array(flat.token_ids, np.int32), np.array(flat.logprobs, np.float32)
    values = np.maximum(np.nan_to_num(values, nan=LOWEST_LOGPROB, neginf=LOWEST_LOGPROB), LOWEST_LOGPROB)
    arrays: dict[str, Array] = {"token_ids": ids, "logprobs": values[starts]}
    if num_likeliest:  # entries of consecutive positions are adjacent
        counts = (np.array(flat.end_indices, np.int64)[: len(ids)] - starts).astype(np.int32)
        total = int(counts.sum())
        arrays |= {"likeliest_counts": counts}
        arrays |= {"likeliest_ids": entries[:total], "likeliest_logprobs": values[:total]}
    if output.routed_experts is not None:
        arrays["routed_experts"] = output.routed_experts
    if output.sampling_mask is not None:
        kept = output.sampling_mask.token_ids
        arrays["mask_counts"] = np.array([len(of_token) for of_token in kept], np.int32)
        arrays["mask_ids"] = np.array([token for of_token in kept for token in of_token], np.int32)
    return arrays


@with_cancellation
@load_aware_call
async def generate(request: GenerateRequest, raw_request: Request):  # type: ignore[no-untyped-def]
    """Answer a request as /inference/v1/generate does, in packed form; errors are the same."""
    handler = raw_request.app.state.serving_tokens
    if handler is None:
        raise NotImplementedError(f"{ROUTE}: the served model does not generate tokens")  # vLLM answers 501
    params = request.sampling_params
    if request.stream or request.output_mode != "tokens" or params.n != 1 or params.logprobs is None:
        raise HTTPException(400, f"{ROUTE} needs n=1, logprobs, output_mode=tokens and no stream")
    params.flat_logprobs = True  # a few lists instead of two objects for each token
    answer = await PackedTokens.of(handler).serve_tokens(request, raw_request)
    if isinstance(answer, ErrorResponse):
        return JSONResponse(answer.model_dump(), answer.error.code)
    return Response(answer, media_type="application/octet-stream")


def add_route(app: FastAPI) -> None:
    """Add the route to vLLM's application."""
    app.add_api_route(ROUTE, generate, methods=["POST"], dependencies=[Depends(validate_json_request)])
