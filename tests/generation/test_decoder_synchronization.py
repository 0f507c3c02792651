"""Tests of the host's waits during generation, counted on a simulated device without values."""

from collections import Counter

import pytest
import torch
from simulated_cases import config_of, in_processes
from small_models import make_tokenizer
from transfers import Transfers

from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.simulation.rank import simulated_process


def waits_of_decoding(path, new_tokens):
    """(file → how often the host waits for the device, passes of the model, draws at each of its reads) on a simulated
    device. What draws end is not known there: none does."""
    config = config_of(path)
    with simulated_process(config, 0, 1) as seen:
        from mcore_rl.models.policy.megatron_policy import MegatronPolicy

        policy = MegatronPolicy(config)
    reads = seen.reads
    from mcore_rl import platform
    from mcore_rl.models.generation.megatron import generation as megatron_generation
    from mcore_rl.models.generation.sampling import SamplingParams

    passes, begun, late = [], {}, []

    class Watched(platform.HostCopy):
        def __init__(self, of):
            begun[self] = len(passes)
            super().__init__(of)

        def read(self):
            late.append(len(passes) - begun[self])
            return super().read()

    platform.HostCopy = Watched
    params = SamplingParams(new_tokens, 0.8, top_k=20, top_p=0.9, min_p=0.01, stop_token_ids=(1,), seed=1)
    generation = megatron_generation.MegatronGeneration(policy.model, params, 384, make_tokenizer(), 64)
    forward = generation.decoder.forward

    def counted(*arguments):
        passes.append(len(arguments[0]))
        return forward(*arguments)

    generation.decoder.forward = counted
    ids = torch.randint(6, 80, (4, 70), generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    prompts = BatchedDataDict(input_ids=ids[[0, 0, 1, 2]], input_lengths=torch.tensor([70, 70, 3, 66]))
    generation.generate(prompts)  # tables of angles come to the device once
    reads.places.clear()
    passes.clear(), late.clear()
    with Transfers() as transfers:
        generation.generate(prompts)
    assert not transfers.waited_for, transfers.waited_for
    places = Counter()
    for (_, place), count in reads.places.items():
        places[place.partition(":")[0]] += count
    return places, len(passes), late


@pytest.mark.exhaustive
@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_generate_waits_for_host_copies_of_responses_only(family, model_of):
    """The host reads a token while the next ones are computed; twice as many tokens need no more waits."""
    seen = []
    for tokens, run in zip(
        (20, 40), in_processes(waits_of_decoding, (model_of(family), 20), (model_of(family), 40)), strict=True
    ):
        places, passes, late = run
        assert passes == tokens, "prompts, and all tokens but the last"
        assert len(late) == tokens and set(late[:-1]) == {1}
        seen.append(places)
    assert seen[0] == seen[1] == {"generation.py": 2}  # tokens, log-probabilities
