"""Requests that arrive while the training model generates: their responses, and the likeliest tokens."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from generation_cases import LIMIT, config_of
from generation_cases import model_path as model_path
from small_models import and_long, make_tokenizer
from transformers import AutoModelForCausalLM

from mcore_rl.models.generation.interfaces import Distribution, RequestOptions
from mcore_rl.models.generation.sampling import SamplingParams
from mcore_rl.testing.layout_check import ParallelLayout
from mcore_rl.testing.processes import run_processes

PROMPTS = [(7, 20, 33, 8), (9,), (40, 41, 42, 43, 44, 45), (7, 20, 33, 8)]
ASKED = [RequestOptions(12, num_likeliest=3), RequestOptions(9), RequestOptions(5, num_likeliest=7), RequestOptions(1)]
PARAMS = SamplingParams(30, temperature=0.7, seed=5)
FILTERED = SamplingParams(30, temperature=0.7, top_k=4, seed=5)


def serve(config, params):
    """Return the responses to the prompts, on the first rank."""
    from mcore_rl.models.generation.megatron.generation import MegatronGeneration
    from mcore_rl.models.generation.megatron.served_generation import ServedGeneration
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config)
    served = ServedGeneration(MegatronGeneration(policy.model, params, LIMIT, make_tokenizer(), 3, prefill_tokens=100))
    work, leads = None, policy.topology.leads_replica

    def ask():
        pairs = enumerate(zip(PROMPTS, ASKED, strict=True))
        asked = [served.submit(prompt, number, options=options) for number, (prompt, options) in pairs]
        asked[-1].result(timeout=60)  # others, which are not told the likeliest tokens, come to those that are
        later = served.submit(PROMPTS[1], 9, options=RequestOptions(20))
        assert len(later.result(timeout=60).token_ids) == 20 and not later.result().likeliest
        return [future.result(timeout=60) for future in asked]

    early = served.submit(PROMPTS[0], 9, options=ASKED[0]) if leads else None  # before responses are generated
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(ask) if leads else None
        served.serve(work)
    assert early is None or len(early.result(timeout=0).token_ids) == ASKED[0].max_new_tokens
    policy.shutdown()
    return work.result() if work else None


@pytest.mark.parametrize("params", [PARAMS, FILTERED], ids=["all", "top-k"])
@pytest.mark.parametrize(
    "layout",
    and_long([ParallelLayout(), ParallelLayout(tp=2)], [ParallelLayout(pp=2), ParallelLayout(tp=2, pp=2)]),
    ids=str,
)
def test_the_likeliest_tokens_are_those_of_transformers(layout, params, model_path):
    path = model_path("llama")
    responses = run_processes(serve, config_of(path, layout), params, world_size=layout.world_size)[0]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for prompt, options, response in zip(PROMPTS, ASKED, responses, strict=True):
        ids = response.token_ids
        assert len(ids) == options.max_new_tokens and len(response.likeliest) == len(ids) * bool(options.num_likeliest)
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1] / params.temperature
        if params.top_k:
            logits = logits.masked_fill(logits < logits.topk(params.top_k).values[:, -1:], -torch.inf)
        logprobs = logits.log_softmax(-1)
        sampled = logprobs.gather(1, torch.tensor(ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(response.logprobs), sampled, atol=1e-5, rtol=0)
        if options.num_likeliest:
            best = logprobs.topk(min(options.num_likeliest, params.top_k or 99))
            found = torch.tensor([[logprob for _, logprob in step] for step in response.likeliest])
            torch.testing.assert_close(found, best.values, atol=1e-5, rtol=0)
            assert [[token for token, _ in step] for step in response.likeliest] == best.indices.tolist()


# ------------------------------------------------------------------ requests with options of their own

OWN = [
    RequestOptions(14),
    RequestOptions(14, distribution=Distribution(temperature=0.0), num_likeliest=2),
    RequestOptions(14, distribution=Distribution(temperature=1.3, top_p=0.7)),
    RequestOptions(14, distribution=Distribution(temperature=0.1 + 0.2, top_k=3, min_p=0.01)),  # not exact in float32
    RequestOptions(1, scores_prompt=True, num_likeliest=3),
    RequestOptions(2, scores_prompt=True, distribution=Distribution(temperature=0.0)),
]


def serve_own(config, together):
    """Return the responses to one prompt, asked for together or one after the other, and what listeners were told."""
    from mcore_rl.models.generation.megatron.generation import MegatronGeneration
    from mcore_rl.models.generation.megatron.served_generation import ServedGeneration
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config)
    served = ServedGeneration(MegatronGeneration(policy.model, PARAMS, LIMIT, make_tokenizer(), 8, prefill_tokens=100))
    told = [[] for _ in OWN]

    def ask():
        def submit(number):
            return served.submit(PROMPTS[0], number, options=replace(OWN[number], on_tokens=told[number].append))

        asked = map(submit, range(len(OWN)))
        return [future.result(timeout=60) for future in (list(asked) if together else asked)]

    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(ask) if policy.topology.leads_replica else None
        served.serve(work)
    policy.shutdown()
    return (work.result(), told) if work else None


@pytest.mark.parametrize(
    "layout", and_long([ParallelLayout()], [ParallelLayout(tp=2, pp=2)], [ParallelLayout(pp=2)]), ids=str
)
def test_requests_have_distributions_of_their_own(layout, model_path):
    """A response does not depend on the other requests. Scores of a prompt are transformers'."""
    path = model_path("llama")
    config, size = config_of(path, layout), layout.world_size
    together, told = run_processes(serve_own, config, True, world_size=size)[0]
    alone, _ = run_processes(serve_own, config, False, world_size=size)[0]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        of_prompt = model(torch.tensor([PROMPTS[0]])).logits[0].log_softmax(-1)
    for options, one, other, parts in zip(OWN, together, alone, told, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist() and len(one.token_ids) == options.max_new_tokens
        heard = [token for part in parts for token in part.token_ids.tolist()]
        assert heard == one.token_ids[: len(heard)].tolist() and len(heard) < len(one.token_ids)
        assert [x for part in parts for x in part.logprobs.tolist()] == one.logprobs[: len(heard)].tolist()
        assert [step for part in parts for step in part.likeliest] == (one.likeliest or [])[: len(heard)]
        assert parts or options.max_new_tokens < 14
        assert all(len(part.token_ids) and not part.ended for part in parts)
        own = options.distribution or Distribution(PARAMS.temperature)
        with torch.no_grad():
            logits = model(torch.tensor([[*PROMPTS[0], *one.token_ids]])).logits[0, len(PROMPTS[0]) - 1 : -1]
        if own.temperature == 0:
            assert logits.argmax(-1).tolist() == one.token_ids.tolist()
        elif own.top_k:
            best = logits.topk(own.top_k).indices
            assert all(token in kept for token, kept in zip(one.token_ids.tolist(), best.tolist(), strict=True))
        if options.scores_prompt:
            scores, targets = one.prompt_scores, torch.tensor(PROMPTS[0][1:])
            expected = of_prompt[:-1].gather(1, targets[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(scores.logprobs), expected, atol=1e-5, rtol=0)
            best = of_prompt[:-1].topk(options.num_likeliest).indices.tolist()
            assert [[token for token, _ in step] for step in scores.likeliest] == best
        else:
            assert one.prompt_scores is None


def test_a_prompt_of_one_token_has_no_scores(model_path):
    from mcore_rl.models.generation.interfaces import PromptScores

    options = RequestOptions(1, scores_prompt=True, num_likeliest=2)
    (scores,) = run_processes(serve_short, config_of(model_path("llama"), ParallelLayout()), options, world_size=1)
    assert isinstance(scores, PromptScores) and len(scores.logprobs) == 0 and scores.likeliest == []


def serve_short(config, options):
    from mcore_rl.models.generation.megatron.generation import MegatronGeneration
    from mcore_rl.models.generation.megatron.served_generation import ServedGeneration
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config)
    served = ServedGeneration(MegatronGeneration(policy.model, PARAMS, LIMIT, make_tokenizer(), 8, prefill_tokens=100))
    asked = served.submit((7,), 0, options=options)
    served.serve(asked)
    policy.shutdown()
    return asked.result().prompt_scores
