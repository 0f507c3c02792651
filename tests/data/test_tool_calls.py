"""Tests of conversations with tool calls and thoughts, under templates with the structure of published ones.

The expected tokens and masks are those of transformers, for the same template with `{% generation %}` markers.
"""

import json
from pathlib import Path

import pytest
from chat_forms import FORMS, tokenizer_with

from mcore_rl.config import DataConfig
from mcore_rl.data.datasets import load_preference_dataset, load_prompt_dataset, load_sft_dataset
from mcore_rl.data.tokenize import tokenize_messages, tokenize_prompt

ARGUMENTS = {"a": 1, "b": 2.5}
FUNCTIONS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": {"type": "object"}}}
    for name in ("add", "now")
]


def user(text):
    return {"role": "user", "content": text}


def says(content=..., *names, arguments=ARGUMENTS, **others):
    """A message of the assistant, with a call of each of the functions `names`."""
    calls = [{"id": "abcdefghi", "type": "function", "function": {"name": n, "arguments": arguments}} for n in names]
    message = {"role": "assistant", **others, **({"tool_calls": calls} if calls else {})}
    return message if content is ... else {**message, "content": content}


def result(content):
    return {"role": "tool", "name": "add", "tool_call_id": "abcdefghi", "content": content}


TEXTS = {
    "texts": [user("Hi"), says("one"), user("and?"), says("two")],
    "one letter": [user("a"), says("b")],
    "system": [{"role": "system", "content": "Be kind."}, user("Hi"), says("one"), user("and?"), says("two")],
}
FIRST = [user("Hi"), says("", "add"), result("3.5"), says("3.5")]
CALLS = {
    "null": [user("Hi"), says(None, "add"), result("3.5"), says("It is 3.5.")],
    "empty": [user("Hi"), says("", "add"), result("3.5"), says("It is 3.5.")],
    "missing": [user("Hi"), says(..., "add"), result("3.5"), says("It is 3.5.")],
    "last": [user("Hi"), says(None, "add")],
    "no arguments": [user("Hi"), says("", "now", arguments={}), result("3.5"), says("It is 3.5.")],
    "equal calls": [user("Hi"), says("", "add"), result("3.5"), says("", "add"), result("3.5"), says("3.5")],
    "turns": [*FIRST, user("now?"), says("", "now"), result("1"), says("1")],
}  # fmt: skip
BOTH = {"text and call": [user("Hi"), says("I add.", "add"), result("3.5"), says("It is 3.5.")]}
SEVERAL = {
    "several": [user("Hi"), says("", "add", "now"), result("3.5"), result("1"), says("3.5 at 1")],
    "equal several": [user("Hi"), says("", "add", "add"), result("3.5"), result("3.5"), says("3.5")],
}
THOUGHT = [user("Hi"), says("", "add", reasoning_content="hm"), result("3.5")]
THOUGHTS = {
    "thought": [user("Hi"), says("one", reasoning_content="hm")],
    "thought and call": [*THOUGHT, says("3.5", reasoning_content="ok")],
    "old thoughts": [*THOUGHT, says("3.5"), user("more"), says("", "now"), result("1"), says("1")],
}  # fmt: skip


def conversations(form):
    shapes = {name: messages for name, messages in TEXTS.items() if form.system or name != "system"}
    for kinds, written in (
        (CALLS, form.calls),
        (BOTH, form.calls and form.text_with_calls),
        (SEVERAL, form.calls and form.several_calls),
        (THOUGHTS, form.thoughts),
    ):
        shapes |= kinds if written else {}
    return shapes


def given(form, messages):
    """The messages as transformers must get them: with the arguments, and the empty content, that the form needs."""
    messages = json.loads(json.dumps(messages))
    for message in messages if form.text_arguments else ():
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
            message["content"] = message.get("content") or ""
    return messages


def tokenizer_of(form, template, tmp_path):
    tokenizer = tokenizer_with(template, form.eos)
    ends = tokenizer.convert_tokens_to_ids([form.eos, *form.declared])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    tokenizer.name_or_path = str(tmp_path)
    return tokenizer


def tools_of(form, messages):
    return FUNCTIONS if form.tools and any(message.get("tool_calls") for message in messages) else None


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_trained_tokens_are_those_that_transformers_marks(name, marked, tmp_path):
    form = FORMS[name]
    oracle = tokenizer_of(form, form.marked, tmp_path)
    tokenizer = oracle if marked else tokenizer_of(form, form.plain, tmp_path)
    for shape, messages in conversations(form).items():
        tools = tools_of(form, messages)
        expected = oracle.apply_chat_template(
            given(form, messages), tools=tools, return_dict=True, return_assistant_tokens_mask=True
        )
        sequence = tokenize_messages(tokenizer, messages, tools)
        ids, mask = list(sequence.input_ids), list(map(int, sequence.token_mask))
        length = max(place for place, trained in enumerate(expected["assistant_masks"]) if trained) + 1
        if ids[length:] and not marked:  # a last turn without end token gets one
            assert ids[length:] == [oracle.eos_token_id], shape
            ids, mask = ids[:length], mask[:length]
        assert oracle.decode(ids) == oracle.decode(expected["input_ids"][:length]), shape
        assert ids == expected["input_ids"][:length], shape
        assert mask == expected["assistant_masks"][:length], shape


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.calls])
def test_arguments_as_json_text_are_rendered_as_transformers_renders_them(name, tmp_path):
    """Text stays as it is where the template writes it raw; elsewhere, the template gets an object."""
    form = FORMS[name]
    tokenizer = tokenizer_of(form, form.plain, tmp_path)
    text = '{"b":2.5,\n "a": "é"}'
    messages = [user("Hi"), says("", "add", arguments=text)]
    (call,) = messages[1]["tool_calls"]
    raw = tokenizer.decode(tokenize_messages(tokenizer, messages).input_ids)
    writes_raw = name in ("qwen3", "hermes", "smollm3") or form.text_arguments
    arguments = text if writes_raw else json.loads(text)
    object_call = {**call, "function": {**call["function"], "arguments": arguments}}
    whole = tokenizer.apply_chat_template([messages[0], {**messages[1], "tool_calls": [object_call]}], tokenize=False)
    assert whole.startswith(raw) or raw == whole + form.eos
    assert (text in raw) == writes_raw
    assert (json.dumps(text, ensure_ascii=False) in raw) is False  # not JSON of JSON


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.calls])
@pytest.mark.parametrize("content", [None, ""])
def test_calls_in_prompts_of_every_algorithm(name, content, tmp_path):
    """The turn with calls stands in the prompt, which is not trained on."""
    form = FORMS[name]
    tokenizer = tokenizer_of(form, form.plain, tmp_path)
    prompt, tools = [user("Hi"), says(content, "add"), result("3.5")], FUNCTIONS if form.tools else None
    asked = tokenizer.apply_chat_template(given(form, prompt), tools=tools, add_generation_prompt=True, tokenize=False)
    record = {"prompt": prompt, "tools": tools, "completion": [says("It is 3.5.")]}
    record |= {"chosen": record["completion"], "rejected": [says("It is 4.")]}
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    settings, path = DataConfig(train="x", max_sequence_length=1000), str(tmp_path / "a.jsonl")
    ((sft,),) = load_sft_dataset(path, tokenizer, settings).units
    ((chosen, rejected),) = load_preference_dataset(path, tokenizer, settings).units
    (sampled,) = load_prompt_dataset(path, tokenizer, settings, 1000).prompts
    assert tokenizer.decode(sampled.input_ids) == asked
    assert sft == chosen
    for sequence, answer in ((chosen, "3.5."), (rejected, "4.")):
        trained = tokenizer.decode([i for i, mask in zip(sequence.input_ids, sequence.token_mask, strict=True) if mask])
        assert f"It is {answer}" in trained and "add" not in trained and "Hi" not in trained


def test_arguments_that_are_objects_become_text_where_the_template_needs_text(tmp_path):
    form = FORMS["deepseek-v3.1"]
    tokenizer = tokenizer_of(form, form.plain, tmp_path)
    text = tokenizer.decode(tokenize_prompt(tokenizer, [user("Hi"), says("", "add"), result("3.5")]).input_ids)
    assert 'add<tool_sep>{"a": 1, "b": 2.5}<tool_call_end>' in text


@pytest.mark.parametrize(
    ("name", "messages", "message"),
    [
        ("llama-3.1", BOTH["text and call"], r"the chat template does not write message 2 \(assistant\)"),
        ("llama-3.1", SEVERAL["several"], "the chat template fails: one call at a time"),
        ("gpt-oss", SEVERAL["several"], "the chat template does not write the tool calls of message 2"),
        ("gemma-3", CALLS["last"], "the chat template does not write the tool calls of message 2"),
        ("qwen2.5", [user("Hi"), says(None)], "message 2: has neither content nor tool_calls"),
        ("qwen2.5", [user("Hi"), says("", "add", arguments="{")], "the arguments of the tool call add are not JSON"),
    ],
)
def test_calls_that_a_template_leaves_out_are_refused(name, messages, message, tmp_path):
    tokenizer = tokenizer_of(FORMS[name], FORMS[name].plain, tmp_path)
    with pytest.raises(ValueError, match=message):
        tokenize_messages(tokenizer, messages)


def test_a_result_between_call_and_text_of_one_turn_is_not_trained_on(tmp_path):
    """Such a template (Gemma 4's structure) writes the text of a turn after the result of its call."""
    form = FORMS["hermes"]
    template = form.plain.replace("{{- m.content or '' }}", "{{- '' if m.tool_calls else m.content }}").replace(
        "<tool_response>\\n' ~ m.content", "<tool_response>\\n' ~ m.content ~ (messages[loop.index0 - 1].content or '')"
    )
    tokenizer = tokenizer_of(form, template, tmp_path)
    with pytest.raises(ValueError, match=r"mixes the texts of message 2 \(assistant\) and message 3 \(tool\)"):
        tokenize_messages(tokenizer, BOTH["text and call"])


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_instruct_2507", "llama3", "gemma", "gemma3"])
def test_published_templates_that_trl_contains(name):
    """TRL's variants of the templates mark the same text, and line ends before and after it."""
    trl = pytest.importorskip("trl")
    folder = Path(trl.__file__).parent / "chat_templates"
    eos = {"llama3": "<|eot_id|>", "gemma": "<end_of_turn>", "gemma3": "<end_of_turn>"}.get(name, "<|im_end|>")
    tokenizer, oracle = (
        tokenizer_with((folder / file).read_text(), eos) for file in (f"{name}.jinja", f"{name}_training.jinja")
    )
    shapes = TEXTS | (CALLS | SEVERAL | BOTH if name.startswith("qwen") else {})
    for shape, messages in shapes.items():
        if shape == "system" and name == "gemma":
            continue
        sequence = tokenize_messages(tokenizer, messages)
        expected = oracle.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = expected["input_ids"], expected["assistant_masks"]
        assert list(sequence.input_ids) == ids[: len(sequence)], shape
        ours, theirs = (
            oracle.decode([i for i, m in zip(ids, marks, strict=False) if m]).replace("\n", "")
            for marks in (sequence.token_mask, mask)
        )
        assert ours == theirs, shape
