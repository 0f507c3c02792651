"""Tests of chat templates: the ids are those of the whole conversation, and only responses are trained on.

The templates are written here to behave as those of the models they are named after. What is expected is
written out by hand: the text of each response, as transformers renders it with the template.
"""

import itertools
import json

import pytest
from tokenizers import AddedToken, ByteLevelBPETokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mcore_rl.config import DataConfig
from mcore_rl.data.datasets import Prompt, load_preference_dataset, load_reward_dataset, load_sft_dataset
from mcore_rl.data.tokenize import tokenize_completion, tokenize_messages, tokenize_prompt
from mcore_rl.data.turns import check_keeps_turns, tokens_between
from mcore_rl.environments.interfaces import Step
from mcore_rl.errors import UserError
from mcore_rl.models.generation.interfaces import Response
from mcore_rl.rollouts.samples import Rollout
from mcore_rl.rollouts.worker import Conversation

CHATML = (
    "{%- if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{%- for call in m.tool_calls or [] %}{{ '\n<tool_call>\n' ~ (call.function | tojson) }}{{ '\n</tool_call>' }}"
    "{% endfor %}"
    "<|im_end|>NEWLINE{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3 = (
    "{%- set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{%- for m in messages %}<|im_start|>{{ m.role ~ '\n' }}"
    "{% if m.role == 'assistant' %}{% set thought = '' %}{% set content = m.content %}"
    "{% if '</think>' in content %}{% set thought = content.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.last %}{{ '<think>\n' ~ thought ~ '\n</think>\n\n' }}{% endif %}{{ content }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "<|bos|>{% if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "<|header|>system<|/header|>\n\nToday: {{ date | default('26 Jul 2024') }}\n\n{{ system }}<|eot|>"
    "{% for m in messages %}<|header|>{{ m.role }}<|/header|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant<|/header|>\n\n{% endif %}"
)
MISTRAL = (
    "<s>{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content | trim }}</s>{% endif %}"
    "{% endfor %}"
)
GEMMA = (
    "<bos>{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "<start_of_turn>{{ role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
DEEPSEEK = (
    "{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% else %}"
    "<|Assistant|>{{ m.content.split('</think>')[-1] }}<|eos|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_END = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<|bos|>", "<|header|>", "<|/header|>", "<|eot|>", "<s>", "</s>", "<bos>", "<eos>",
    "<start_of_turn>", "<end_of_turn>", "<|User|>", "<|Assistant|>", "<|eos|>", "<|pad|>",
]  # fmt: skip
TEMPLATES = {
    "qwen2.5": (CHATML.replace("NEWLINE", "\n"), "<|im_end|>"),
    "chatml without newline": (CHATML.replace("NEWLINE", ""), "<|im_end|>"),
    "qwen3": (QWEN3, "<|im_end|>"),
    "llama3": (LLAMA3, "<|eot|>"),
    "mistral": (MISTRAL, "</s>"),
    "gemma": (GEMMA, "<eos>"),
    "deepseek-r1": (DEEPSEEK, "<|eos|>"),
    "generation markers": (MARKED, "<|im_end|>"),
    "no end token": (NO_END, "</s>"),
}


@pytest.fixture(scope="module")
def base():
    """A byte-level BPE that has learnt to merge over what templates write: line ends, spaces, headers."""
    bpe = ByteLevelBPETokenizer()
    texts = ["assistant\n\n\nuser\n\n  assistant: one user: \n\nBe kind. Hello world, how are you?\n\n"] * 40
    bpe.train_from_iterator(texts, vocab_size=420, show_progress=False)
    bpe.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    bpe.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    return bpe


@pytest.fixture
def tokenizer_of(base):
    def make(name):
        template, eos = TEMPLATES[name]
        return PreTrainedTokenizerFast(
            tokenizer_object=base._tokenizer, eos_token=eos, pad_token="<|pad|>", chat_template=template
        )

    return make


def conversation(*contents, system=None):
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    return [*([{"role": "system", "content": system}] if system else []), *turns]


def trained(tokenizer, sequence):
    """The texts of the runs of trained tokens."""
    runs = itertools.groupby(zip(sequence.input_ids, sequence.token_mask, strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([i for i, _ in run]) for is_trained, run in runs if is_trained]


THREE = conversation("Hi", " one\n", "and?", "two  ", "so?", "<think>\nhm\n</think>\n\n3\n\nlines")

EXPECTED = {
    "qwen2.5": [" one\n<|im_end|>", "two  <|im_end|>", "<think>\nhm\n</think>\n\n3\n\nlines<|im_end|>"],
    "chatml without newline": [" one\n<|im_end|>", "two  <|im_end|>", "<think>\nhm\n</think>\n\n3\n\nlines<|im_end|>"],
    "qwen3": [" one\n<|im_end|>", "two  <|im_end|>", "<think>\nhm\n</think>\n\n3\n\nlines<|im_end|>"],
    "llama3": ["one<|eot|>", "two<|eot|>", "<think>\nhm\n</think>\n\n3\n\nlines<|eot|>"],
    "mistral": [" one</s>", " two</s>", " <think>\nhm\n</think>\n\n3\n\nlines</s>"],
    "gemma": ["one<end_of_turn>", "two<end_of_turn>", "<think>\nhm\n</think>\n\n3\n\nlines<end_of_turn>"],
    "deepseek-r1": [" one\n<|eos|>", "two  <|eos|>", "\n\n3\n\nlines<|eos|>"],
    "generation markers": [" one\n<|im_end|>", "two  <|im_end|>", "<think>\nhm\n</think>\n\n3\n\nlines<|im_end|>"],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_every_response_of_the_whole_conversation(name, tokenizer_of):
    tokenizer = tokenizer_of(name)
    sequence = tokenize_messages(tokenizer, THREE)
    whole = tokenizer.apply_chat_template(THREE, tokenize=True, return_dict=False)
    assert list(sequence.input_ids) == whole[: len(sequence)]
    assert tokenizer.decode(whole[len(sequence) :]) in ("", "\n")
    assert trained(tokenizer, sequence) == EXPECTED[name]


def test_a_thought_that_the_template_adds_is_part_of_the_response(tokenizer_of):
    tokenizer = tokenizer_of("qwen3")
    sequence = tokenize_messages(tokenizer, conversation("Hi", "one", "and?", "two"))
    assert trained(tokenizer, sequence) == ["one<|im_end|>", "<think>\n\n</think>\n\ntwo<|im_end|>"]
    assert tokenizer.decode(sequence.input_ids).startswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\none")


def test_a_template_without_end_token(tokenizer_of):
    tokenizer = tokenizer_of("no end token")
    sequence = tokenize_messages(tokenizer, conversation("Hi", "one", "and?", "two"))
    assert trained(tokenizer, sequence) == [" one", "two</s>"]  # a token " one" holds the header's space
    assert tokenizer.decode(sequence.input_ids) == "user: Hi\nassistant: one\nuser: and?\nassistant: two</s>"


def test_end_tokens_that_only_the_model_declares(tokenizer_of, tmp_path):
    """GLM-4 ends a response with the next turn's header; its tokenizer's end token is another."""
    tokenizer = tokenizer_of("no end token")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|User|>' if m.role == 'user' else '<|Assistant|>' }}\n{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|Assistant|>{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path)
    ends = tokenizer.convert_tokens_to_ids(["</s>", "<|User|>"])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    sequence = tokenize_messages(AutoTokenizer.from_pretrained(tmp_path), conversation("Hi", "one", "and?", "two"))
    assert trained(tokenizer, sequence) == ["\none<|User|>", "\ntwo</s>"]
    assert [text.strip() for text in trained(tokenizer, tokenize_messages(tokenizer, THREE))[:1]] == ["one"]


@pytest.mark.parametrize("name", sorted(set(EXPECTED) - {"mistral", "gemma"}))
def test_weights_and_system_messages(name, tokenizer_of):
    tokenizer = tokenizer_of(name)
    messages = conversation("Hi", "one", "and?", "two", system="Rhyme.")
    if name == "deepseek-r1":
        messages = messages[1:]
    whole = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    messages[-3]["weight"], messages[-1]["weight"] = 0, 1
    (text,) = trained(tokenizer, sequence := tokenize_messages(tokenizer, messages))
    assert text.removeprefix("<think>\n\n</think>\n\n") == "two" + tokenizer.decode([sequence.input_ids[-1]])
    assert list(sequence.input_ids) == whole[: len(sequence)]


def test_tools_and_calls(tokenizer_of):
    tokenizer = tokenizer_of("qwen2.5")
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2.5}'}}
    tools = [{"type": "function", "function": {"name": "add", "description": None, "parameters": {"a": {}, "b": {}}}}]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "1 + "}, {"type": "text", "text": "2.5"}]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3.5"},
        {"role": "assistant", "content": "3.5", "tool_calls": None},
    ]
    first, second = trained(tokenizer, sequence := tokenize_messages(tokenizer, messages, json.dumps(tools)))
    # The template begins the call on a new line; one token holds that line's end and the header's.
    assert first.startswith("\n\n<tool_call>\n") and first.endswith("\n</tool_call><|im_end|>")
    assert json.loads(first.split("<tool_call>")[1].split("</tool_call>")[0])["arguments"] == {"a": 1, "b": 2.5}
    assert second == "3.5<|im_end|>"
    text = tokenizer.decode(sequence.input_ids)
    assert "user\n1 + 2.5<|im_end|>" in text and '"name": "add"' in text and "null" not in text and "None" not in text


@pytest.mark.parametrize(
    ("name", "messages", "message"),
    [
        ("mistral", conversation("a", "b", system="s"), "the chat template fails: roles must alternate"),
        ("gemma", conversation("a", "b", system="s"), "the chat template fails: System role not supported"),
        ("qwen2.5", [{"content": "a"}], "messages, message 1: must have a role and a content; its keys are content"),
        ("qwen2.5", [{"from": "human", "value": "a"}], "must have a role and a content; its keys are from, value"),
        ("qwen2.5", [{"role": "user"}], "message 1: has neither content nor tool_calls"),
        ("qwen2.5", [{"role": "user", "content": 5}], "content must be a text or a list of parts, found a number"),
        ("qwen2.5", [{"role": "user", "content": [{"type": "image"}]}], "has images, but the model reads no images"),
        ("qwen2.5", [{"role": "user", "content": "a", "weight": 1}], "has weight 1 and the role user"),
        ("qwen2.5", [{"role": "assistant", "content": "a", "weight": 0.5}], "weight must be 0 or 1, got 0.5"),
        ("qwen2.5", [*conversation("a"), {"role": "assistant", "content": " "}], r"message 2 \(assistant\) is empty"),
        ("qwen2.5", [{**conversation("a", "b")[1], "weight": 0}], "no response tokens: no message of the assistant"),
        ("llama3", [*conversation("a"), {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}],
         "does not write the tool calls of message 2"),
        ("qwen2.5", [*conversation("a"), {"role": "assistant", "tool_calls": [{"function": {"name": "f",
         "arguments": "{"}}]}], "the arguments of the tool call f are not JSON"),
        ("qwen2.5", "text", "messages must be a list of messages, found a text"),
        ("qwen2.5", ["text"], "messages must be a list of messages, found a list with a text"),
    ],
)  # fmt: skip
def test_what_cannot_be_rendered_is_refused(name, messages, message, tokenizer_of):
    with pytest.raises(ValueError, match=message):
        tokenize_messages(tokenizer_of(name), messages)


def test_templates_that_lose_text_are_refused(tokenizer_of):
    tokenizer = tokenizer_of("qwen2.5")
    with pytest.raises(ValueError, match="does not write the record's tools"):
        tokenize_messages(tokenizer_of("llama3"), conversation("a", "b"), [{"name": "f"}])
    tokenizer.chat_template = LLAMA3.replace("{{ system }}", "")
    with pytest.raises(ValueError, match=r"the chat template does not write message 1 \(system\)"):
        tokenize_messages(tokenizer, conversation("a", "b", system="s"))
    with pytest.raises(ValueError, match=r"the chat template does not write message 1 \(system\)"):
        tokenize_prompt(tokenizer, conversation("a", system="s"))
    with pytest.raises(ValueError, match="does not write the record's tools"):
        tokenize_prompt(tokenizer, conversation("a"), [{"name": "f"}])
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content | length }}{{ m.content }}<|im_end|>{% endfor %}{{ messages[1].content }}"
    )
    with pytest.raises(ValueError, match="must write message 2 exactly once"):
        tokenize_messages(tokenizer, conversation("a", "b"))
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"need a chat template, but the tokenizer has none; set data\.chat_template"):
        tokenize_messages(tokenizer, conversation("a", "b"))


def test_a_last_thought_that_the_template_leaves_out_is_refused(tokenizer_of):
    first, last = conversation("Hi", "one"), conversation("and?", "two")
    first[1]["reasoning_content"] = "easy"
    tokenizer = tokenizer_of("qwen2.5")
    assert trained(tokenizer, tokenize_messages(tokenizer, [*first, *last])) == ["one<|im_end|>", "two<|im_end|>"]
    with pytest.raises(ValueError, match="does not write the reasoning_content of message 2"):
        tokenize_messages(tokenizer, first)
    tokenizer.chat_template = CHATML.replace("{{ m.content }}", "{{ m.reasoning_content or '' }}{{ m.content }}")
    assert "easy" in trained(tokenizer, tokenize_messages(tokenizer, first))[0]


def test_null_is_a_value_of_arguments_and_parameters(tokenizer_of, tmp_path):
    call = {"id": None, "function": {"name": "f", "arguments": {"x": None}}}
    tool = {"name": "f", "description": None, "parameters": {"x": {"default": None}}}
    messages = [*conversation("a"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    path, tokenizer = tmp_path / "a.jsonl", tokenizer_of("qwen2.5")
    path.write_text(json.dumps({"messages": messages, "tools": [tool]}))
    dataset = load_sft_dataset(str(path), tokenizer, DataConfig(train="x", max_sequence_length=400))
    text = tokenizer.decode(dataset.units[0][0].input_ids)
    assert '"arguments": {"x": null}' in text and '{"x": {"default": null}}' in text and "description" not in text


def test_marked_passages_without_an_end_token_are_told(tokenizer_of, tmp_path):
    path, tokenizer, said = tmp_path / "a.jsonl", tokenizer_of("generation markers"), []
    path.write_text((json.dumps({"messages": conversation("a", "b")}) + "\n") * 2)
    settings = DataConfig(train="x", max_sequence_length=100)
    load_sft_dataset(str(path), tokenizer, settings, said.append)
    assert said == []
    tokenizer.chat_template = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    load_sft_dataset(str(path), tokenizer, settings, said.append)
    (line,) = said
    assert "no response teaches the model to end" in line


def test_a_response_may_be_marked_in_several_passages(tokenizer_of):
    tokenizer = tokenizer_of("generation markers")
    tokenizer.chat_template = MARKED.replace(
        "{{ m.content }}", "{{ m.content }}{% endgeneration %}|{% generation %}", 1
    )
    messages = conversation("Hi", "one", "and?", "two")
    assert trained(tokenizer, tokenize_messages(tokenizer, messages)) == ["one", "<|im_end|>", "two", "<|im_end|>"]
    messages[1]["weight"] = 0
    assert trained(tokenizer, tokenize_messages(tokenizer, messages)) == ["two", "<|im_end|>"]
    tokenizer.chat_template = MARKED.replace("m.role == 'assistant'", "m.role == 'assistant' and loop.last")
    with pytest.raises(ValueError, match=r"marks no text of message 2 \(assistant\) as generated"):
        tokenize_messages(tokenizer, conversation("Hi", "one", "and?", "two"))


def test_a_call_ends_with_the_special_token_that_closes_its_turn(tokenizer_of):
    """Llama 3.1 closes calls with another token than texts, which generation_config.json may fail to name."""
    tokenizer = tokenizer_of("llama3")
    tokenizer.chat_template = LLAMA3.replace(
        "{{ m.content | trim }}<|eot|>",
        "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}<|eos|>"
        "{% else %}{{ m.content | trim }}<|eot|>{% endif %}",
    )
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    messages = [*conversation("Hi"), call, {"role": "tool", "content": "3"}, *conversation("x", "one")[1:]]
    text = '{"name": "f", "arguments": {}}<|eos|>'
    assert trained(tokenizer, tokenize_messages(tokenizer, messages)) == [text, "one<|eot|>"]
    assert trained(tokenizer, tokenize_messages(tokenizer, messages[:2])) == [text]


def test_only_what_the_assistant_says_in_a_completion(tokenizer_of):
    tokenizer = tokenizer_of("qwen3")
    prompt = conversation("Hi", "one", "and?")
    completion = [{"role": "assistant", "content": "two"}, {"role": "user", "content": "x"},
                  {"role": "assistant", "content": "three"}]  # fmt: skip
    sequence = tokenize_completion(tokenizer, prompt, completion)
    assert trained(tokenizer, sequence) == ["two<|im_end|>", "<think>\n\n</think>\n\nthree<|im_end|>"]


def test_records_say_where(tokenizer_of, tmp_path):
    good = {"messages": conversation("a", "b")}
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(good)}\n\n{json.dumps({'messages': [{'content': 'x'}]})}\n")
    settings = DataConfig(train="x", max_sequence_length=100)
    with pytest.raises(UserError, match=r"a\.jsonl, line 3: messages, message 1: must have a role"):
        load_sft_dataset(str(tmp_path / "a.jsonl"), tokenizer_of("qwen2.5"), settings)


def test_pairs_that_are_no_choice(tokenizer_of, tmp_path):
    said, settings = [], DataConfig(train="x", max_sequence_length=100)
    same, other = {"chosen": conversation("a", "b"), "rejected": conversation("a", "b")}, conversation("a", "c")
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(same) + "\n" + json.dumps({**same, "rejected": other}) + "\n")
    assert len(load_preference_dataset(str(path), tokenizer_of("llama3"), settings, said.append)) == 2
    assert said == [f"{path}: chosen and rejected are the same in 1 of 2 records, which teach nothing"]
    path.write_text((json.dumps(same) + "\n") * 2)
    with pytest.raises(UserError, match="chosen and rejected are the same in every record"):
        load_preference_dataset(str(path), tokenizer_of("llama3"), settings)


def test_columns_filled_with_nulls_by_parquet(tokenizer_of, tmp_path):
    """Arrow gives every message the keys of all messages, and every tool call the arguments of all calls."""
    import datasets

    messages = [*conversation("a"), {"role": "assistant", "content": "b", "weight": 1}]
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    other = {"function": {"name": "g", "arguments": {"y": 2}}}
    records = [
        {"messages": messages},
        {"messages": [*conversation("a"), {"role": "assistant", "content": "", "tool_calls": [call, other]}]},
    ]
    path = str(tmp_path / "a.parquet")
    datasets.Dataset.from_list(records).to_parquet(path)
    tokenizer = tokenizer_of("qwen2.5")
    dataset = load_sft_dataset(path, tokenizer, DataConfig(train="x", max_sequence_length=400))
    assert dataset.units == [(tokenize_messages(tokenizer, record["messages"]),) for record in records]


# ------------------------------------------------------------------ conversations that go on

KEEP = ("qwen2.5", "chatml without newline", "llama3", "mistral", "gemma", "generation markers", "no end token")


@pytest.mark.parametrize("name", KEEP)
@pytest.mark.parametrize("truncated", [False, True])
def test_turns_are_joined_as_the_template_joins_them(name, truncated, tokenizer_of):
    """A sampled response plus the template's text after it gives the text of the whole conversation."""
    tokenizer = tokenizer_of(name)
    asked, answered = conversation("Hi"), conversation("Hi", "one two", "and?")
    prompt = tokenizer.apply_chat_template(asked, tokenize=True, add_generation_prompt=True, return_dict=False)
    whole = tokenizer.apply_chat_template(answered, tokenize=False, add_generation_prompt=True)
    space = " " if name == "mistral" else ""  # which a model of that family samples
    response = tokenizer(f"{space}one two", add_special_tokens=False)["input_ids"]
    end = tokenizer.convert_tokens_to_ids("<end_of_turn>") if name == "gemma" else tokenizer.eos_token_id
    response = response if truncated or name == "no end token" else [*response, end]
    between = tokens_between(tokenizer, asked, "and?", response)
    assert tokenizer.decode([*prompt, *response, *between]) == whole


def test_a_rollout_keeps_what_was_sampled(tokenizer_of):
    tokenizer = tokenizer_of("qwen2.5")
    asked = conversation("Hi")
    ids = tokenizer.apply_chat_template(asked, tokenize=True, add_generation_prompt=True, return_dict=False)
    prompt = Prompt(tuple(ids), asked, {})
    rollout = Rollout.begin(0, 0, prompt)
    odd = [tokenizer.convert_tokens_to_ids(letter) for letter in "on"] + [tokenizer.convert_tokens_to_ids("e")]
    rollout.add_response(odd, [-1.0] * 3)  # letters that the tokenizer would have merged, and no end token
    rollout.turns = 1
    rollout.message_log = [*asked, {"role": "assistant", "content": "one"}]
    going = Conversation(rollout, prompt)
    observed = going.observe(Step(done=False, observation="and?"), tokenizer, max_turns=2, max_sequence_length=100)
    assert observed == rollout.input_ids[len(ids) + 3 :].tolist()
    assert rollout.input_ids[len(ids) : len(ids) + 3].tolist() == odd
    behind = tokenizer.decode(rollout.input_ids[len(ids) + 3 :])
    assert behind == "<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    assert sum(rollout.token_mask) == 3


@pytest.mark.parametrize("name", KEEP)
def test_templates_that_keep_turns_are_accepted(name, tokenizer_of):
    check_keeps_turns(tokenizer_of(name))


@pytest.mark.parametrize(
    ("name", "what"), [("qwen3", "thoughts in earlier responses"), ("deepseek-r1", "earlier turns")]
)
def test_templates_that_rewrite_turns_are_refused(name, what, tokenizer_of):
    with pytest.raises(UserError, match=f"environment.max_turns: the chat template rewrites {what}"):
        check_keeps_turns(tokenizer_of(name))


# ------------------------------------------------------------------ prompts that end with the beginning of a response

PREFILL, REST = "The number is", " two."
CONTINUED = [{"role": "assistant", "content": PREFILL}]


def asked_and_answered(tokenizer):
    """transformers' text of a prompt whose last message is continued, and of the whole conversation."""
    prompt, whole = [*conversation("Hi"), *CONTINUED], conversation("Hi", PREFILL + REST)
    return tokenizer.apply_chat_template(prompt, tokenize=False, continue_final_message=True), whole


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_response_continues_the_beginning_that_the_prompt_gives(name, tokenizer_of):
    tokenizer = tokenizer_of(name)
    asked, whole = asked_and_answered(tokenizer)
    prompt = [*conversation("Hi"), *CONTINUED]
    assert tokenizer.decode(tokenize_prompt(tokenizer, prompt).input_ids) == asked
    sequence = tokenize_completion(tokenizer, prompt, [{"role": "assistant", "content": REST}])
    complete = tokenize_messages(tokenizer, whole)
    assert sequence.input_ids == complete.input_ids
    text = tokenizer.decode(sequence.input_ids)
    (response,) = trained(tokenizer, sequence)
    assert text == asked + response
    assert response.startswith(REST) and trained(tokenizer, complete)[0].endswith(PREFILL + response)


def test_further_turns_after_a_continued_response(tokenizer_of):
    tokenizer = tokenizer_of("qwen2.5")
    prompt = [*conversation("Hi"), {**CONTINUED[0], "weight": 0}]
    rest = [{"role": "assistant", "content": REST}, *conversation("more", "three")]
    assert trained(tokenizer, tokenize_completion(tokenizer, prompt, rest)) == [f"{REST}<|im_end|>", "three<|im_end|>"]
    rest[0]["weight"] = 0
    assert trained(tokenizer, tokenize_completion(tokenizer, prompt, rest)) == ["three<|im_end|>"]


def test_a_continued_response_may_be_a_call(tokenizer_of):
    tokenizer = tokenizer_of("qwen2.5")
    calls = [{"function": {"name": "f", "arguments": {}}}]
    sequence = tokenize_completion(
        tokenizer, [*conversation("Hi"), *CONTINUED], [{"role": "assistant", "content": None, "tool_calls": calls}]
    )
    text = '\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>'
    assert trained(tokenizer, sequence) == [text]


def test_pairs_continue_the_end_of_their_prompt_only_if_it_stands_alone(tokenizer_of, tmp_path):
    """Responses that repeat the prompt are whole conversations, in which the assistant speaks twice."""
    tokenizer, path = tokenizer_of("qwen2.5"), tmp_path / "a.jsonl"
    prompt = [*conversation("Hi"), *CONTINUED]
    answers = {key: [{"role": "assistant", "content": text}] for key, text in (("chosen", REST), ("rejected", " 3."))}
    whole = {key: [*prompt, *answer] for key, answer in answers.items()}
    settings = DataConfig(train="x", max_sequence_length=200)
    for load in (load_preference_dataset, load_reward_dataset):
        texts = []
        for record in ({"prompt": prompt, **answers}, {"prompt": prompt, **whole}, whole):
            path.write_text(json.dumps(record))
            ((chosen, rejected),) = load(str(path), tokenizer, settings).units
            texts.append(tokenizer.decode(chosen.input_ids))
            assert trained(tokenizer, chosen) == [f"{REST}<|im_end|>"]
            assert trained(tokenizer, rejected) == [" 3.<|im_end|>"]
        assert f"assistant\n{PREFILL}{REST}<|im_end|>" in texts[0]
        assert f"{PREFILL}<|im_end|>\n<|im_start|>assistant\n{REST}<|im_end|>" in texts[1] == texts[2]


@pytest.mark.parametrize(
    ("prompt", "completion", "message"),
    [
        ([*CONTINUED], [{"role": "assistant", "content": " "}], r"completion, message 1 \(assistant\) is empty"),
        (
            [*CONTINUED],
            [{"role": "assistant", "content": "a", "reasoning_content": "b"}],
            "has a reasoning_content, but",
        ),
        ([{"role": "assistant", "content": "<think>x</think>\n\ny"}], [{"role": "assistant", "content": "z"}], None),
    ],
)
def test_continuations_that_are_no_text(prompt, completion, message, tokenizer_of):
    tokenizer = tokenizer_of("qwen3")
    given = [*conversation("Hi"), *prompt]
    if message is None:
        assert trained(tokenizer, tokenize_completion(tokenizer, given, completion)) == ["z<|im_end|>"]
        return
    with pytest.raises(ValueError, match=message):
        tokenize_completion(tokenizer, given, completion)


def test_a_beginning_that_the_template_rewrites_is_refused(tokenizer_of):
    tokenizer = tokenizer_of("deepseek-r1")
    given = [*conversation("Hi"), {"role": "assistant", "content": "thought"}]
    with pytest.raises(
        ValueError, match=r"rewrites the beginning of message 2 \(assistant\), with which the prompt ends"
    ):
        tokenize_completion(tokenizer, given, [{"role": "assistant", "content": "</think>answer"}])


def test_a_prompt_of_rollouts_that_ends_with_calls_is_refused(tokenizer_of):
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    with pytest.raises(ValueError, match="prompt, message 2: ends the prompt with tool calls; add their results"):
        tokenize_prompt(tokenizer_of("qwen2.5"), [*conversation("Hi"), call])


def test_a_rollout_continues_the_beginning_of_its_response(tokenizer_of):
    """Judges get one message with the whole response, as from TRL; later turns follow it."""
    tokenizer = tokenizer_of("qwen2.5")
    asked = [*conversation("Hi"), *CONTINUED]
    prompt = Prompt(tokenize_prompt(tokenizer, asked).input_ids, asked, {})
    going = Conversation(Rollout.begin(0, 0, prompt), prompt)
    ids = tokenizer(REST, add_special_tokens=False)["input_ids"]
    going.respond(Response([*ids, tokenizer.eos_token_id], [-1.0] * (len(ids) + 1), True), tokenizer)
    sample = going.sample
    assert sample.message_log == conversation("Hi", PREFILL + REST)
    assert sample.num_prompt_messages == 1
    assert tokenizer.decode(sample.response_ids) == f"{REST}<|im_end|>"
    going.observe(Step(done=False, observation="and?"), tokenizer, max_turns=2, max_sequence_length=200)
    whole = conversation("Hi", PREFILL + REST, "and?")
    assert tokenizer.decode(going.rollout.input_ids) == tokenizer.apply_chat_template(
        whole, tokenize=False, add_generation_prompt=True
    )
