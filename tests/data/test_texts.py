"""Tests of plain texts: start and end tokens, and the ids of a response where it stands in the whole text."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

from mcore_rl.cli.dry_run import records
from mcore_rl.config import DataConfig
from mcore_rl.data.datasets import Prompt, load_preference_dataset, load_prompt_dataset, load_sft_dataset
from mcore_rl.data.tokenize import tokenize_completion, tokenize_prompt
from mcore_rl.environments.interfaces import Step
from mcore_rl.rollouts.samples import Rollout
from mcore_rl.rollouts.worker import Conversation

WORDS = [
    "▁",
    "▁Seven",
    "▁4",
    "▁2",
    "=",
    "+",
    "2",
    "4",
    "▁a",
    "▁Name",
    "S",
    "e",
    "v",
    "n",
    ".",
    "\n",
    "a",
    "1",
    " ",
    "e.",
]


def metaspace_tokenizer(template=None):
    """A tokenizer as Llama 2's: a start token and a space are written before every text."""
    vocabulary = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>", "<|im_end|>", *WORDS])}
    merges = [("▁", "2"), ("▁", "4"), ("▁", "a"), ("e", ".")]
    letters = {piece for pair in merges for piece in pair} | {"S", "v", "n", "m", "N"}
    for token in sorted(letters - set(vocabulary)):
        vocabulary[token] = len(vocabulary)
    model = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    model.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    model.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    model.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>", "<|im_end|>")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=model, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=template
    )


def tokens(tokenizer, sequence, trained=None):
    pairs = zip(sequence.input_ids, sequence.token_mask, strict=True)
    return tokenizer.convert_ids_to_tokens([i for i, mask in pairs if trained in (None, mask)])


def test_a_response_has_the_ids_of_the_whole_text():
    tokenizer = metaspace_tokenizer()
    sequence = tokenize_completion(tokenizer, "2+2=", "4")
    assert list(sequence.input_ids) == [*tokenizer("2+2=4")["input_ids"], tokenizer.eos_token_id]
    assert tokens(tokenizer, sequence) == ["<s>", "▁2", "+", "2", "=", "4", "</s>"]
    assert tokens(tokenizer, sequence, trained=True) == ["4", "</s>"]
    assert sequence.notes == ()
    assert tokenize_prompt(tokenizer, "2+2=").input_ids == sequence.input_ids[:-2]


def test_a_token_over_the_border_is_not_made_and_is_told():
    """The prompt ends with "e" and the response is ".", which one token of the whole text holds."""
    tokenizer = metaspace_tokenizer()
    sequence = tokenize_completion(tokenizer, "ae", ".")
    assert tokens(tokenizer, sequence) == ["<s>", "▁a", "e", ".", "</s>"]
    assert sequence.notes == ("apart",)
    assert tokenizer.decode(sequence.input_ids) == "<s> ae.</s>"


def test_texts_that_the_tokenizer_changes_are_told():
    tokenizer = metaspace_tokenizer()
    tokenizer._tokenizer.normalizer = normalizers.Sequence(
        [tokenizer._tokenizer.normalizer, normalizers.Replace("a2", "2")]
    )
    sequence = tokenize_completion(tokenizer, "=a", "2")
    assert sequence.notes == ("inexact",)


@pytest.mark.parametrize("prompt", ["", "2"])
def test_empty_prompts_and_responses(prompt):
    tokenizer = metaspace_tokenizer()
    assert not any(tokenize_completion(tokenizer, prompt, "").token_mask)
    sequence = tokenize_completion(tokenizer, prompt, "2")
    assert list(sequence.input_ids) == [*tokenizer(prompt + "2")["input_ids"], tokenizer.eos_token_id]


@pytest.mark.parametrize("prompt", ["<s>2", "2"])
def test_a_start_token_is_written_once(prompt):
    tokenizer = metaspace_tokenizer()
    sequence = tokenize_prompt(tokenizer, prompt)
    assert list(sequence.input_ids) == tokenizer(prompt, add_special_tokens=prompt == "2")["input_ids"]
    assert sequence.input_ids.count(tokenizer.bos_token_id) == 1
    assert sequence.notes == (("own_start",) if prompt == "<s>2" else ())


@pytest.mark.parametrize("response", ["4</s>", "4</s>\n", "4</s> \n\n"])
def test_an_end_token_is_written_once_and_ends_the_text(response):
    tokenizer = metaspace_tokenizer()
    sequence = tokenize_completion(tokenizer, "2+2=", response)
    assert tokens(tokenizer, sequence, trained=True) == ["4", "</s>"]
    assert sequence.notes == ("own_end",)


@pytest.mark.parametrize(
    ("response", "expected"),
    [("4</s>a", ["4", "</s>", "▁a", "</s>"]), ("4\n", ["4", "\n", "</s>"]), ("\n", ["\n", "</s>"]), ("</s>", ["</s>"])],
)
def test_other_ends_of_responses(response, expected):
    tokenizer = metaspace_tokenizer()
    assert tokens(tokenizer, tokenize_completion(tokenizer, "=", response), trained=True) == expected


def test_the_end_token_of_a_rendered_conversation_ends_a_text():
    """The text was rendered with a chat template whose end token is not the tokenizer's."""
    template = "{% for m in messages %}{{ m.role }}{{ m.content }}<|im_end|>{% endfor %}"
    tokenizer = metaspace_tokenizer(template)
    assert tokens(tokenizer, tokenize_completion(tokenizer, "=", "4<|im_end|>\n"), trained=True) == ["4", "<|im_end|>"]


def test_every_loader_tells_once_what_it_did(tmp_path):
    record = {"prompt": "<s>2+2=", "completion": "4</s>\n", "chosen": "4</s>", "rejected": "2</s>"}
    path = tmp_path / "a.jsonl"
    path.write_text((json.dumps(record) + "\n") * 3)
    settings, tokenizer = DataConfig(train="x", max_sequence_length=40), metaspace_tokenizer()
    for load in (load_sft_dataset, load_preference_dataset):
        said = []
        load(str(path), tokenizer, settings, said.append)
        assert len(said) == 2 and all(line.startswith(f"{path}: in 3 of 3 records, the ") for line in said)
        assert "start token" in said[0] and "end token" in said[1]
    said = []
    load_prompt_dataset(str(path), tokenizer, settings, 40, said.append)
    assert len(said) == 1 and "start token" in said[0]
    said = []
    path.write_text(json.dumps({"prompt": "2+2=", "completion": "4"}))
    load_sft_dataset(str(path), tokenizer, settings, said.append)
    assert said == []


def test_observations_continue_the_text():
    tokenizer = metaspace_tokenizer()
    prompt = Prompt(tokenize_prompt(tokenizer, "2+2=").input_ids, "2+2=", {})
    rollout = Rollout.begin(0, 0, prompt)
    rollout.add_response([tokenizer.convert_tokens_to_ids("4")], [-1.0])
    rollout.turns, rollout.message_log = 1, [*prompt.message_log, {"role": "assistant", "content": "4"}]
    going = Conversation(rollout, prompt)
    going.observe(Step(done=False, observation="+2="), tokenizer, max_turns=2, max_sequence_length=100)
    assert rollout.input_ids.tolist() == tokenizer("2+2=4+2=")["input_ids"]


def test_the_dry_run_shows_the_text_of_the_trained_ids():
    tokenizer = metaspace_tokenizer()
    for prompt, response in (("2+2=", "4"), ("2+2=", " 4")):
        _, line = records(tokenizer, [tokenize_completion(tokenizer, prompt, response)])
        assert line == f"  <s> 2+2=»{response}</s>«"
