"""Tests of a reference's log-probabilities on disk: written while they are computed, by any layout."""

import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from layout_cases import make_config, plain_logprobs
from small_models import and_long
from transformers import AutoModelForCausalLM

from mcore_rl.algorithms.dpo import precomputes_reference
from mcore_rl.config import DPOConfig
from mcore_rl.data.batching import collate
from mcore_rl.data.token_store import TokenizedChunk, TokenSequence, collect
from mcore_rl.testing.layout_check import ParallelLayout
from mcore_rl.testing.processes import run_processes


def make_store():
    """Seven pairs of 1 to 40 tokens."""
    generator, chunk = torch.Generator().manual_seed(5), TokenizedChunk()
    for lengths in ((1, 40), (17, 3), (8, 8), (30, 31), (2, 1), (25, 9), (14, 37)):
        rows = [torch.randint(0, 250, (length,), generator=generator).tolist() for length in lengths]
        chunk.add(tuple(TokenSequence(tuple(row), (True,) * len(row)) for row in rows))
    return collect([chunk], 2)


def precompute(config, directory):
    """Return rows 13, 0 and 6, the printed lines, and the number of scored rows; a model is built for these rows
    only."""
    from mcore_rl.models.policy.reference import PrecomputedLogprobs
    from mcore_rl.models.policy.scoring import ScoringModel

    said, scored, built = [], [], []

    class Counted(ScoringModel):
        def get_logprobs(self, data):
            scored.append(data.share.total)
            return super().get_logprobs(data)

    def build():
        built.append(Counted(config, rows_per_unit=2))
        return built[-1]

    stored = PrecomputedLogprobs.load_or_compute(directory, config.model, build, make_store(), 0, 3, said.append)
    assert len(built) == bool(said)
    for model in built:
        model.shutdown()
    return stored.rows([13, 0, 6], 40), said, scored


def test_what_is_stored_is_the_models_and_is_computed_once(model_of, tmp_path):
    config, store = make_config(model_of("llama")), make_store()
    data = collate(list(store), 0)
    plain = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    expected = plain_logprobs(plain, data)[[13, 0, 6], :40].float()
    for rank, (rows, said, scored) in enumerate(
        run_processes(precompute, ParallelLayout(dp=2, pp=2).apply(config), tmp_path, world_size=4)
    ):
        torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-5, msg=f"rank {rank}")
        assert scored == [6, 6, 2]
        assert [line.partition(": /")[0] for line in said] == [
            "reference log-probabilities: computing them once for 7 records"
        ]
    (stored,) = tmp_path.iterdir()
    stored.with_suffix(".checksums").touch()  # left by who was stopped just before it would have gone
    ((again, said, scored),) = run_processes(precompute, config, tmp_path, world_size=1)
    assert torch.equal(again, rows) and (said, scored) == ([], [])
    (stored,) = tmp_path.iterdir()
    values = np.frombuffer(stored.read_bytes()[:-32], np.float32)
    assert len(values) == store.num_tokens


@pytest.fixture(scope="module")
def whole(model_of, tmp_path_factory):
    """Return the rows, the name of their file, and its content."""
    directory = tmp_path_factory.mktemp("whole")
    ((rows, *_),) = run_processes(precompute, make_config(model_of("llama")), directory, world_size=1)
    (stored,) = directory.iterdir()
    return rows, stored.name, stored.read_bytes()


# Three records a batch: they end behind 77, 184 and 226 numbers.
@pytest.mark.parametrize(
    ("size", "batches", "torn", "records"),
    and_long(
        [
            (77 * 4 + 41, 1, "", 3),  # in the middle of a batch
            (226 * 4, 3, "", 7),  # before the digest
        ],
        [
            (77 * 4, 1, "7", 3),  # before the checksum of the second was written
            (77 * 4 - 1, 1, "", 0),  # the file system has lost the end
            (184 * 4 - 1, 2, "", 3),
            (5, 0, "", 0),
            (226 * 4 + 32, 3, "", 7),  # before it got its name
        ],
    ),
)
def test_who_was_stopped_goes_on(size, batches, torn, records, whole, model_of, tmp_path):
    (rows, name, content), config = whole, make_config(model_of("llama"))
    stored = tmp_path / name
    stored.with_suffix(".partial").write_bytes(content[:size])
    ends = [4 * end for end in (77, 184, 226)[:batches]]
    lines = "".join(f"{end} {zlib.crc32(content[:end])}\n" for end in ends)
    stored.with_suffix(".checksums").write_text(lines + torn)
    for again, said, scored in run_processes(precompute, ParallelLayout(dp=2).apply(config), tmp_path, world_size=2):
        assert sum(scored) == 2 * (7 - records)
        once = [line for line in said if "computing them once" in line]
        assert [f", {records} of which are done" in line for line in once] == [bool(records)]
        torch.testing.assert_close(again, rows, rtol=1e-5, atol=1e-5)
    assert stored.read_bytes()[: records * 4] == content[: records * 4] and list(tmp_path.iterdir()) == [stored]


@pytest.mark.parametrize("spoiled", [".partial", ".checksums", "a record's end", "digits"])
def test_what_a_stopped_run_left_is_not_believed_once_damaged(spoiled, whole, model_of, tmp_path):
    rows, name, content = whole
    size = 77 * 4 + (8 if spoiled == "a record's end" else 0)
    stored, content = tmp_path / name, bytearray(content[:size])
    checksum = zlib.crc32(content) + (spoiled == ".checksums")
    content[100] ^= spoiled == ".partial"
    stored.with_suffix(".partial").write_bytes(content)
    line = f"{size} {checksum}\n" if spoiled != "digits" else f"{size} {checksum}{'0' * 5000}\n"
    stored.with_suffix(".checksums").write_text(line)
    ((again, said, scored),) = run_processes(precompute, make_config(model_of("llama")), tmp_path, world_size=1)
    assert torch.equal(again, rows) and sum(scored) == 14
    assert "no batch matches its checksum; it is computed anew" in said[0]
    assert list(tmp_path.iterdir()) == [stored]


@pytest.mark.parametrize(
    ("dpo", "trainer", "sync", "precomputes"),
    [
        ({}, {"max_epochs": 1}, None, True),
        ({}, {"max_steps": 3}, None, False),
        ({}, {"max_steps": 4}, None, True),
        ({}, {"max_steps": 4}, {"interval": 2}, False),
        ({"reference": "swap"}, {"max_epochs": 9}, None, False),
        ({"reference": "precompute"}, {"max_steps": 1}, None, True),
        ({"preference_loss": "simpo", "reference_policy_kl_penalty": 2.0}, {"max_epochs": 1}, None, False),
    ],
)
def test_it_is_computed_before_where_a_run_needs_all_of_it(dpo, trainer, sync, precomputes, model_of):
    """Seven records, two a step."""
    values = {**make_config(model_of("llama")).model_dump(), "dpo": dpo, "reference_sync": sync}
    values["trainer"], values["batch"]["global_batch_size"] = trainer, 2
    config = DPOConfig.model_validate(values)
    assert precomputes_reference(config, SimpleNamespace(train=range(7))) == precomputes
