"""A session's tree: the engine gets the recorded tokens, and each delivered sampled token counts in one row."""

import itertools
import random
from collections import Counter

import pytest
from agent_cases import ScriptedEngine, random_reply, random_text
from chat_forms import FORMS, tokenizer_with

from mcore_rl.agents.messages import BadRequest
from mcore_rl.agents.parsing import call_form_of
from mcore_rl.agents.templates import ChatTemplate
from mcore_rl.agents.tree import SessionTree
from mcore_rl.models.generation.interfaces import RequestOptions

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Does something.",
            "parameters": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
        },
    }
    for name in ("add", "search")
]


REWRITING = ("deepseek-r1", "glm-4.5", "gpt-oss")
"""Templates that write every earlier response in another way than the model does."""


class Episode:
    """A random session: the program continues, repeats, rewrites and forks conversations."""

    def __init__(self, form, generator, history):
        self.form, self.generator = form, generator
        self.tokenizer = tokenizer_with(form.plain, form.eos)
        self.tree = SessionTree(ChatTemplate(self.tokenizer), history)
        self.call_form = call_form_of(form.plain)
        end = self.tokenizer.convert_tokens_to_ids(form.eos)
        self.engine = ScriptedEngine(self.tokenizer, lambda _: self.reply(), end)
        self.tools = TOOLS if form.tools and form.calls and generator.random() < 0.6 else None
        self.known = []
        """The turns that reached the program, with the messages as the program keeps them."""

    def reply(self):
        return random_reply(self.generator, self.call_form, self.form.thoughts, self.tools)

    def start(self):
        system = [{"role": "system", "content": random_text(self.generator)}] if self.form.system else []
        return [*(system if self.generator.random() < 0.3 else []), self.user()]

    def user(self):
        return {"role": "user", "content": random_text(self.generator)}

    def messages(self):
        """The messages of the next request."""
        if not self.known or self.generator.random() < 0.15:
            return self.start()
        messages = [dict(message) for message in self.generator.choice(self.known[-3:])]
        last = messages[-1]
        if self.generator.random() < 0.7:
            last.pop("reasoning_content", None)  # as most clients do
        if self.generator.random() < 0.1:
            last["content"] += " edited"
        if last.get("tool_calls"):
            return [
                *messages,
                *(
                    {"role": "tool", "name": c["function"]["name"], "tool_call_id": c["id"], "content": "42"}
                    for c in last["tool_calls"]
                ),
            ]
        return [*messages, self.user()]

    def call(self):
        try:
            prompt = self.tree.prompt(self.messages(), self.tools)
        except BadRequest:  # what the template cannot write
            return
        for _ in range(self.generator.choice([1, 1, 1, 2])):
            limits = RequestOptions(self.generator.choice([None, None, 4]))
            response = self.engine.submit(tuple(prompt.ids), 0, options=limits).result()
            turn = self.tree.add(prompt, response, lambda: f"{self.generator.randrange(10**8):09d}")
            if self.generator.random() < 0.1:
                self.tree.discard(turn)
            else:
                self.known.append(turn.messages)


def check(tree, prompts):
    delivered = [turn for turn in tree.turns if turn.is_delivered]
    assert {tuple(turn.prompt.ids) for turn in tree.turns} <= set(prompts)
    rows, counted = tree.rows(), Counter()
    for row in rows:
        assert len(row.input_ids) == len(row.token_mask) == len(row.logprobs)
        assert all(mask or not logprob for mask, logprob in zip(row.token_mask, row.logprobs, strict=True))
        counted.update(token for token, mask in zip(row.input_ids, row.token_mask, strict=True) if mask)
    assert sum(counted.values()) == sum(len(turn.response.token_ids) for turn in delivered)
    assert counted == Counter(token for turn in delivered for token in turn.response.token_ids)
    whole = [(*turn.prompt.ids, *turn.response.token_ids) for turn in delivered]
    assert {tuple(row.input_ids) for row in rows} <= set(whole)
    for turn in tree.turns:  # sampled tokens stay as they are in every context that extends them
        parent = turn.prompt.parent
        if parent is not None:
            kept = (*parent.prompt.ids, *parent.response.token_ids[: turn.prompt.kept])
            assert tuple(turn.prompt.ids[: len(kept)]) == kept


def run_episodes(name, history, seeds):
    continued = 0
    for seed in seeds:
        generator = random.Random(f"{name} {history} {seed}")
        episode = Episode(FORMS[name], generator, history)
        for _ in range(generator.randint(1, 8)):
            episode.call()
        check(episode.tree, episode.engine.prompts)
        continued += episode.tree.counts["extended"]
    return continued


@pytest.mark.parametrize("history", ["template", "keep"])
@pytest.mark.parametrize("name", FORMS)
def test_random_episodes(name, history):
    continued = run_episodes(name, history, range(5))
    assert continued or (history == "template" and name in REWRITING)


@pytest.mark.long
def test_a_thousand_random_episodes():
    modes = itertools.product(FORMS, ("template", "keep"))
    assert sum(run_episodes(name, history, range(5, 30)) for name, history in modes) > 500


def conversation(name, replies, history="template", tools=None):
    """Lead a conversation in which the program appends a question to each reply, without thoughts; return the tree."""
    form = FORMS[name]
    tokenizer = tokenizer_with(form.plain, form.eos)
    tree, told = SessionTree(ChatTemplate(tokenizer), history), [{"role": "user", "content": "Hello?"}]
    engine = ScriptedEngine(tokenizer, lambda _: replies.pop(0), tokenizer.convert_tokens_to_ids(form.eos))
    while replies:
        prompt = tree.prompt(told, tools)
        turn = tree.add(prompt, engine.submit(tuple(prompt.ids), 0).result(), lambda: "abcdefghi")
        answer = {k: v for k, v in turn.messages[-1].items() if k != "reasoning_content"}
        results = [{"role": "tool", "tool_call_id": c["id"], "content": "5"} for c in answer.get("tool_calls", ())]
        told = [*told, answer, *(results or [{"role": "user", "content": "And now?"}])]
    return tree


def test_a_context_equals_the_templates_own_text():
    """No separator between turns is lost: where responses are what the template writes, so is the whole context."""
    for name in ("qwen2.5", "llama-3.1", "phi-4", "gemma-3", "granite", "hermes"):
        tree = conversation(name, ["One.", "Two.", "Three."])
        (row,) = tree.rows()
        text = tree.template.text(row.input_ids)
        assert text.startswith(tree.turns[-1].prompt.text) and tree.turns[-1].prompt.text.count("And now?") == 2
        assert sum(row.token_mask) == sum(len(turn.response.token_ids) for turn in tree.turns)


def test_dropped_thoughts_begin_a_branch_unless_they_are_kept():
    replies = ["<think>\na\n</think>\n\nOne.", "<think>\nb\n</think>\n\nTwo."]
    assert len(conversation("qwen3", [*replies]).rows()) == 2
    (row,) = conversation("qwen3", [*replies], "keep").rows()
    assert sum(row.token_mask) > 4


def test_tool_calls_continue_a_turn():
    call = '<tool_call>\n{"name": "add", "arguments": {"q": "2+3"}}\n</tool_call>'
    tree = conversation("qwen2.5", [call, "It is 5."], tools=TOOLS)
    assert tree.counts["extended"] == 1 and len(tree.rows()) == 1
    assert tree.turns[0].messages[-1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"q": "2+3"}}


def test_texts_and_ids_continue_what_they_repeat():
    form = FORMS["qwen2.5"]
    tokenizer = tokenizer_with(form.plain, form.eos)
    tree = SessionTree(ChatTemplate(tokenizer))
    engine = ScriptedEngine(tokenizer, lambda _: " four", tokenizer.convert_tokens_to_ids(form.eos))
    first = tree.prompt_of_text("2 + 2 =")
    turn = tree.add(first, engine.submit(tuple(first.ids), 0).result())
    second = tree.prompt_of_text("2 + 2 = four and 3 + 3 =")
    assert second.parent is turn and second.kept == len(turn.response.token_ids) - 1  # without the end token
    tree.add(second, engine.submit(tuple(second.ids), 0).result())
    third = tree.prompt_of_text([*first.ids, *turn.response.token_ids, 5, 6])
    assert third.parent is turn and third.kept == len(turn.response.token_ids) and third.new_ids == [5, 6]
    check(tree, [*engine.prompts, tuple(third.ids)])
    rows = tree.rows()
    assert len(rows) == 2 and [sum(row.token_mask) for row in rows] == [len(turn.response.token_ids)] * 2


def test_a_branch_inside_a_response_counts_each_token_once():
    """A text prompt continues a response without its end token; the end token counts in a row of its own."""
    form = FORMS["phi-4"]
    tokenizer = tokenizer_with(form.plain, form.eos)
    tree = SessionTree(ChatTemplate(tokenizer))
    engine = ScriptedEngine(tokenizer, lambda _: " a b c", tokenizer.convert_tokens_to_ids(form.eos))
    for prompt in ("x", "x a b c y", "x a b c z"):
        found = tree.prompt_of_text(prompt)
        tree.add(found, engine.submit(tuple(found.ids), 0).result())
    check(tree, engine.prompts)
    assert len(tree.rows()) == 3


@pytest.mark.parametrize("form", ["qwen3", "deepseek-r1", "gpt-oss"])
def test_logged_sessions_have_each_message_once(form):
    """The template removes earlier thoughts, so each turn is a row; the logged conversation still is one chain."""
    made = FORMS[form]
    tokenizer = tokenizer_with(made.plain, made.eos)
    end = tokenizer.convert_tokens_to_ids(made.eos)
    engine = ScriptedEngine(tokenizer, lambda _: "<think>\nHm.\n</think>\n\nYes.", end, 10**6)
    tree, messages = SessionTree(ChatTemplate(tokenizer)), [{"role": "user", "content": "0?"}]
    for n in range(1, 12):
        prompt = tree.prompt(messages)
        turn = tree.add(prompt, engine.submit(tuple(prompt.ids), 0).result())
        reply = {key: turn.messages[-1][key] for key in ("role", "content")}  # without its thought
        messages = [*messages, reply, {"role": "user", "content": f"{n}?"}]
    tree.discard(tree.add(tree.prompt(messages), engine.submit((1,), 0).result()))
    logged = tree.logged()
    assert [turn["parent"] for turn in logged] == [None, *range(11)]
    assert [[m["content"] for m in turn["messages"]][:1] for turn in logged] == [[f"{n}?"] for n in range(12)]
    assert all(len(turn["messages"]) == 2 for turn in logged) and logged[-1]["row"] is None
    rows = len(tree.rows())
    assert sorted({turn["row"] for turn in logged[:-1]}) == list(range(rows))
    assert sum(not turn["extends"] for turn in logged[1:]) in (rows - 1, rows), "the last turn may be rewritten too"
