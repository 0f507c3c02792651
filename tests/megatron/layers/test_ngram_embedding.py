"""Tests of embeddings of n-grams: earlier tokens in packs, the rows of n-grams, the numbers of the hash, directories.

Whole models are compared with transformers in test_families, test_layout_check, test_megatron_generation.
"""

import json

import pytest
import torch
from attention_cases import layouts, predecessors
from small_models import make_config, make_model
from transformers.models.qwen4_exp import modeling_qwen4_exp as theirs

from mcore_rl.errors import UserError
from mcore_rl.models.megatron.families import family_of
from mcore_rl.models.megatron.layers.ngram_embedding import earlier_rows, earlier_values, hash_multipliers, primes_from
from mcore_rl.models.megatron.model.hf_config import load_hf_config
from mcore_rl.models.megatron.model.hf_directory import SafetensorsDirectory
from mcore_rl.models.megatron.weights.conversion import check_hf_tensors

LAGS = (0, 2, 5)
END = 1


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_earlier_tokens_are_those_of_the_same_row(cp):
    """All packs of test_attention, also with shared prefixes; the last tokens of the sequences too."""
    for name, layout in layouts(cp).items():
        distance = predecessors(layout)
        values = torch.arange(1, layout.total + 1)[:, None]  # of a token: its position in the pack, plus 1
        expected = torch.zeros(layout.total, len(LAGS), dtype=torch.long)
        for number, lag in enumerate(LAGS):
            tokens, places = (distance == lag).nonzero(as_tuple=True)
            expected[tokens, number] = places + 1
        order = torch.cat([layout.local_positions(rank) for rank in range(cp)])
        for rank in range(cp):
            own = layout.local_positions(rank)
            found = earlier_values(values[order], earlier_rows(layout, rank, LAGS, torch.device("cpu")))[..., 0]
            real = layout.is_token[own]
            assert torch.equal(found[real], expected[own][real]), name
        last = [start + n - 1 for start, n in zip(layout.starts.tolist(), layout.lengths, strict=True) if n]
        if len(last) == len(layout.lengths):
            of_last = earlier_values(values[order], earlier_rows(layout, None, LAGS, torch.device("cpu")))[..., 0]
            assert torch.equal(of_last, expected[last]), name


@pytest.mark.parametrize("layer", [0, 2])
def test_rows_of_ngrams_equal_those_of_transformers(layer):
    """Whatever end-of-sequence tokens a row has; a row may have a single token."""
    config = make_config("qwen4", ngram_size=4, ple_embed_dim=60, vocab_size=250_000)
    ngrams = family_of(config).ngrams(layer)
    module = theirs.Qwen4ExpTextNGramEmbedding(config, 60, layer, config.ple_layer_ids.index(layer + 1))
    assert module.ngram_embedding.weight.shape == (ngrams.rows, ngrams.head_dim)
    for name, value in ngrams.constants.items():
        module.get_buffer(name).copy_(theirs_of(module, config)[name])
        assert torch.equal(module.get_buffer(name), value), name
    module.ngram_embedding.weight.data = torch.arange(ngrams.rows).double()[:, None]  # a row contains its own number
    generator = torch.Generator().manual_seed(layer)
    for length in (1, 2, 3, 40):
        for share in (0.0, 0.3, 1.0):
            tokens = torch.randint(0, config.vocab_size, (length,), generator=generator)
            tokens[torch.rand(length, generator=generator) < share] = END
            padded = torch.cat((torch.full((3,), -1), tokens))
            earlier = torch.stack([padded[3 - lag :][:length] for lag in (1, 2, 3)], 1)
            assert torch.equal(module(tokens[None], None)[0].long(), ngrams.rows_of(tokens, earlier))


def theirs_of(module, config):
    """Return the numbers of the hash as transformers initializes them."""
    multipliers = theirs._build_layer_multipliers(
        config.vocab_size, config.ngram_size, module.ple_layer_index, config.seed
    )
    return {
        "layer_multipliers": multipliers,
        "ngram_heads_vocab_sizes": torch.tensor(module.head_vocab_sizes),
        "ngram_heads_offsets": torch.tensor(module.head_offsets),
    }


def test_numbers_of_the_hash_at_the_published_size():
    found = [hash_multipliers(248_320, 3, index, 1234) for index in range(3)]
    assert found == [tuple(theirs._build_layer_multipliers(248_320, 3, index, 1234).tolist()) for index in range(3)]
    assert hash_multipliers(5, 1, 0, 2**63)[0] % 2 == 1
    primes = primes_from(20_000_000, 20)
    assert [primes[n] for n in (0, 3, 19)] == [theirs._find_nth_prime_after(19_999_999, n + 1) for n in (0, 3, 19)]
    assert primes_from(1, 4) == (2, 3, 5, 7)


def test_numbers_that_contradict_the_configuration_are_refused(tmp_path):
    path = make_model("qwen4", tmp_path)
    check_hf_tensors(load_hf_config(path), SafetensorsDirectory(path))
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**values, "seed": 1235}))
    with pytest.raises(UserError, match=r"ple_embedding\.layer_multipliers has other values than config\.json"):
        check_hf_tensors(load_hf_config(path), SafetensorsDirectory(path))


def test_too_short_n_grams_are_refused():
    family = family_of(make_config("qwen4"))
    family.hf.ngram_size = 1
    with pytest.raises(UserError, match="ngram_size=1 must be at least 2"):
        family.check(60)


@pytest.mark.parametrize("name", ["make_ngram_vocab_size_divisible_by", "split_ngram_parts"])
def test_numbers_of_parts_are_at_least_1(name, tmp_path):
    path = make_model("qwen4", tmp_path)
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**values, name: 0}))
    with pytest.raises(UserError, match=f"{name} must be a whole number of at least 1, got 0"):
        load_hf_config(path)
