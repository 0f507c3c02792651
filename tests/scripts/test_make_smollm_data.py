"""Tests of the script that writes SmolLM2's model and data."""

import make_smollm_data
import pytest


def test_a_model_that_was_cut_off_has_not_the_name_of_a_whole_one(tmp_path, monkeypatch):
    """`make demo-smollm` and the tests take a directory of this name for the model."""

    def write_part(_, directory):
        directory.mkdir()
        (directory / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(make_smollm_data, "download", lambda directory: directory / "model.gguf")
    monkeypatch.setattr(make_smollm_data, "write_model", write_part)
    with pytest.raises(KeyboardInterrupt):
        make_smollm_data.main(tmp_path / "smollm")
    assert not (tmp_path / "smollm" / "model").exists()
    monkeypatch.setattr(make_smollm_data, "write_model", lambda _, directory: directory.mkdir())
    make_smollm_data.main(tmp_path / "again")
    assert {path.name for path in (tmp_path / "again").iterdir()} == {
        "model", "train.jsonl", "validation.jsonl", "pairs_train.jsonl", "pairs_validation.jsonl",
    }  # fmt: skip
