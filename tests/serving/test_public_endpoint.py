"""The public endpoint over HTTP, with a scripted engine: keys, distributions, streams, echo, prompts in batches."""

import asyncio
import json
import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest
from agent_cases import HELLO, ScriptedEngine, Served
from tokenizers.processors import TemplateProcessing

from mcore_rl.models.generation.interfaces import Distribution, PromptScores, Response
from mcore_rl.serving.client import is_loopback
from mcore_rl.serving.endpoint import PublicEndpoint, distribution_of

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = 'Let me see. <tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'


class Engine(ScriptedEngine):
    """Also records options, scores prompts, and tells a response token by token if it is asked to."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.asked, self.seeds = [], []

    def submit(self, prompt, sample_id, group=(), greedy=False, options=None, images=()):
        self.asked.append(options)
        self.seeds.append(sample_id)
        self.prompts.append(prompt)
        text, future = self.answer(prompt), Future()
        if text is None:
            return future
        whole = self.response(text, options)
        if options.scores_prompt:
            count = options.num_likeliest
            likeliest = [[(token, -1.0), (3, -2.0)][:count] for token in prompt[1:]]
            whole.prompt_scores = PromptScores(-np.arange(1, len(prompt), dtype=np.float32), likeliest)
        if options.on_tokens is None:
            future.set_result(whole)
            return future

        def tell():
            for place in range(len(whole.token_ids) - 1):
                own = slice(place, place + 1)
                options.on_tokens(
                    Response(whole.token_ids[own], whole.logprobs[own], False, likeliest=whole.likeliest[own])
                )
                time.sleep(0.01)
            if not future.cancelled():
                future.set_result(whole)

        threading.Thread(target=tell, daemon=True).start()
        return future


class PublicServed(Served):
    def __init__(self, replies, key=None, scores=True, longest=400):
        self.key, self.scores = key, scores
        super().__init__(replies, longest=longest)

    def endpoint(self, limits, body_bytes):
        engine = self.engine
        self.engine = Engine(engine.tokenizer, engine.answer, engine.end_id, engine.max_sequence_length)
        made = PublicEndpoint(self.engine, self.tokenizer, "tiny <b>", self.key, self.scores)
        self.sessions = made.sessions
        return made

    async def begin(self):
        return None

    async def request(self, method, path, body=None, key=None, timeout=10, **headers):
        return await super().request(method, path, body, key or self.key or "none", timeout, **headers)

    def get(self, path, **headers):
        return self.run(self.request("GET", path, **headers))


@pytest.fixture
def serve():
    served = []

    def start(*arguments, **options):
        served.append(PublicServed(*arguments, **options))
        return served[-1]

    yield start
    for one in served:
        assert one.sessions._by_key == {}, "every request is forgotten"
        one.close()


def events_of(text):
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


# ------------------------------------------------------------------ who may ask


def test_without_a_key_only_this_machine_asks(serve):
    served = serve(["Hi."] * 2)
    assert served.post("/v1/chat/completions", HELLO)[0] == 200
    assert served.get("/v1/models")[2]["data"][0]["id"] == "tiny <b>"
    wrong = ({"Host": "evil.example:80"}, {"Host": "["}, {"Origin": "http://evil.example"}, {"Origin": "null"})
    for headers in wrong:
        status, _, body = served.post("/v1/chat/completions", HELLO, **headers)
        assert status == 403 and "only programs and pages of this machine" in body["error"]["message"]
        assert served.get("/v1/models", **headers)[0] == 403
    own = served.server.url
    assert served.post("/v1/chat/completions", HELLO, Origin=own)[0] == 200


def test_with_a_key_everyone_needs_it(serve):
    served = serve(["Hi."] * 2, key="sk-right")
    assert served.post("/v1/chat/completions", HELLO)[0] == 200
    for path in ("chat/completions", "completions", "messages", "responses", "messages/count_tokens"):
        path = f"/v1/{path}"
        status, _, body = served.run(served.request("POST", path, HELLO, key="sk-wrong"))
        assert status == 401 and "the API key is wrong" in json.dumps(body)
    assert served.run(served.request("GET", "/v1/models", key="sk-wrong"))[0] == 401
    assert served.get("/health")[0] == 200 and served.run(served.request("GET", "/", key="sk-wrong"))[0] == 200


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False),
     ("::", False), ("10.0.0.1", False), ("localhost.evil.example", False), ("", False)],
)  # fmt: skip
def test_addresses_of_this_machine(host, local):
    assert is_loopback(host) is local


def test_the_page_shows_the_models_name(serve):
    status, _, page = serve([]).get("/")
    assert status == 200 and "<title>tiny &lt;b&gt;</title>" in page and "{{" not in page
    status, _, body = serve([]).post("/v1/reward", 1)
    assert status == 404 and "takes no rewards" in body["error"]["message"]


# ------------------------------------------------------------------ distributions


def test_a_request_has_its_own_distribution(serve):
    served = serve(["Hi."] * 3)
    body = {**HELLO, "temperature": 0.3, "top_p": 0.9, "top_k": 7, "min_p": 0.05, "max_tokens": 3, "stop": ["x"]}
    served.post("/v1/chat/completions", body)
    served.post("/v1/chat/completions", {**HELLO, "temperature": 0, "top_k": -1})
    served.post("/v1/messages", {**HELLO, "max_tokens": 4, "temperature": 0.5})
    asked = served.engine.asked
    assert asked[0].distribution == Distribution(0.3, 7, 0.9, 0.05)
    assert (asked[0].max_new_tokens, asked[0].stop_strings) == (3, ("x",))
    assert asked[1].distribution == Distribution(0.0) and asked[2].distribution == Distribution(0.5)


@pytest.mark.parametrize(
    "wrong",
    [{"stream": "false"}, {"stream": 2},
     {"temperature": -1}, {"temperature": "hot"}, {"temperature": True}, {"temperature": float("nan")},
     {"top_p": 0}, {"top_p": 1.1}, {"top_k": -2}, {"top_k": 1.5}, {"top_k": 10**30}, {"min_p": 2},
     {"stop": ["x"] * 65}, {"stop": "x" * 1025}],
    ids=str,
)  # fmt: skip
def test_a_value_out_of_range_is_refused(wrong, serve):
    status, _, body = serve([]).post("/v1/chat/completions", {**HELLO, **wrong})
    (name,) = wrong
    assert status == 400 and body["error"]["message"].startswith(f"{name}: must be")
    assert distribution_of({}) == Distribution() and distribution_of({"temperature": 1e-40}) == Distribution(0.0)


def test_a_seed_repeats_and_without_one_responses_differ(serve):
    served = serve(["Hi."] * 5)
    for seed in (3, 3, 4, None, None):
        served.post("/v1/chat/completions", HELLO | ({} if seed is None else {"seed": seed}))
    first, second, third, *random = served.engine.seeds
    assert first == second != third and len({first, third, *random}) == 4


# ------------------------------------------------------------------ streams


def test_a_stream_comes_token_by_token_and_says_the_same(serve):
    reply = "<think>\nHm, yes.\n</think>\n\nIt is four. 🙂 Fin."
    served = serve([reply] * 2)
    whole = served.post("/v1/chat/completions", {**HELLO, "logprobs": True})[2]["choices"][0]
    options = {"stream": True, "logprobs": True, "stream_options": {"include_usage": True}}
    events = events_of(served.post("/v1/chat/completions", {**HELLO, **options})[2])
    *chunks, usage = events
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == len(whole["logprobs"]["content"])
    deltas = [event["choices"][0]["delta"] for event in chunks]
    assert len(deltas) > 10
    for key in ("content", "reasoning_content"):
        assert "".join(delta.get(key) or "" for delta in deltas) == whole["message"][key]
    told = [token for event in chunks for token in (event["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert told == whole["logprobs"]["content"]
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]] == ["stop"]


def test_a_stop_string_is_never_streamed(serve):
    served = serve(["one two END three"])
    # The scripted engine does not stop; the text is cut where the response has ended.
    events = events_of(served.post("/v1/chat/completions", {**HELLO, "stream": True, "stop": "END"})[2])
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events).rstrip() == "one two"


def test_completions_are_streamed_with_offsets(serve):
    served = serve(["some more text"] * 2)
    whole = served.post("/v1/completions", {"prompt": "say", "logprobs": 1, "max_tokens": 50})[2]["choices"][0]
    body = {"prompt": "say", "logprobs": 1, "max_tokens": 50, "stream": True}
    choices = [event["choices"][0] for event in events_of(served.post("/v1/completions", body)[2])]
    assert len(choices) > 3 and "".join(choice["text"] for choice in choices) == whole["text"]
    for key in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert [one for choice in choices for one in choice["logprobs"][key]] == whole["logprobs"][key]


REPLY = "<think>\nHm, yes.\n</think>\n\nIt is four. 🙂 Fin."


@pytest.mark.parametrize(
    "reply", [REPLY, "Yes. 🙂", "<think>\nHm, yes.\n</think>\n\n"], ids=["both", "text", "thought"]
)
def test_messages_are_streamed_as_they_come(reply, serve):
    served = serve([reply] * 2)
    body = {**HELLO, "max_tokens": 90}
    whole = served.post("/v1/messages", body)[2]
    events = events_of(served.post("/v1/messages", {**body, "stream": True})[2])
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
    blocks = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
            assert event["index"] == len(blocks) - 1
        if event["type"] == "content_block_delta":
            kind = event["delta"]["type"].removesuffix("_delta")
            assert event["index"] == len(blocks) - 1 and kind == blocks[-1]["type"]
            blocks[-1][kind] += event["delta"][kind]
    assert blocks == whole["content"]
    kinds = [event["type"] for event in events]
    assert kinds.count("content_block_stop") == len(blocks) and kinds.count("content_block_delta") >= 3
    assert events[-2]["delta"]["stop_reason"] == whole["stop_reason"] == "end_turn"


@pytest.mark.parametrize(
    "reply", [REPLY, "Yes. 🙂", "<think>\nHm, yes.\n</think>\n\n"], ids=["both", "text", "thought"]
)
def test_responses_are_streamed_as_they_come(reply, serve):
    served = serve([reply] * 2)
    whole = served.post("/v1/responses", {"input": "Hello?"})[2]
    events = events_of(served.post("/v1/responses", {"input": "Hello?", "stream": True})[2])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    last = events[-1]["response"]
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert items == last["output"] and events[-1]["type"] == "response.completed"
    texts = {}
    for event in events:
        if event["type"].endswith("_text.delta"):
            texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
    assert len([event for event in events if event["type"].endswith("_text.delta")]) >= 3
    for item, other in zip(items, whole["output"], strict=True):
        assert texts.get(item["id"], "") == item["content"][0]["text"] == other["content"][0]["text"]


def test_log_probabilities_of_characters_of_several_tokens(serve):
    """Tokens' texts are parts of the text, their bytes those of the vocabulary, their offsets those in the text."""
    text = "ab 🙂é☃ z"
    served = serve([text] * 3)
    content = served.post("/v1/chat/completions", {**HELLO, "logprobs": True})[2]["choices"][0]["logprobs"]["content"]
    *content, end = content
    assert end["token"] == "<|im_end|>"
    ids = served.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(content) > len(text), "some characters have several tokens"
    assert bytes(byte for token in content for byte in token["bytes"]).decode() == text
    assert "".join(token["token"] for token in content) == text
    body = {"prompt": "say", "logprobs": 1, "max_tokens": 50}
    told = served.post("/v1/completions", body)[2]["choices"][0]["logprobs"]
    assert "".join(told["tokens"]) == text + "<|im_end|>"
    for token, offset, best in zip(told["tokens"], told["text_offset"], told["top_logprobs"], strict=True):
        assert (text + "<|im_end|>")[offset : offset + len(token)] == token and token in best
    # A response that ends within a character: the other bytes of the character are not known.
    (first,) = {place for place, token in enumerate(content) if token["token"] == "🙂"}
    cut = served.post("/v1/completions", {**body, "max_tokens": first})[2]["choices"][0]
    assert cut["text"] == "".join(cut["logprobs"]["tokens"]) == "ab \ufffd"


def test_tool_calls_are_streamed_whole(serve):
    served = serve([CALL])
    events = events_of(served.post("/v1/chat/completions", {**HELLO, "tools": [TOOL], "stream": True})[2])
    calls = [e["choices"][0]["delta"]["tool_calls"] for e in events if "tool_calls" in e["choices"][0]["delta"]]
    assert len(calls) == 1 and calls[0][0]["function"]["name"] == "add"


def test_others_go_on_while_a_long_text_is_tokenized(serve):
    served = serve(["Hi."])
    tokenize, began = served.sessions.template.ids, threading.Event()

    def slow(text):
        began.set()
        time.sleep(2)
        return tokenize(text)

    served.sessions.template.ids = slow
    asked = asyncio.run_coroutine_threadsafe(served.request("POST", "/v1/chat/completions", HELLO), served.loop)
    assert began.wait(10)
    start = time.monotonic()
    assert served.get("/health")[0] == 200 and not asked.done() and time.monotonic() - start < 1.5
    assert asked.result(20)[0] == 200


def test_the_size_of_a_body_is_limited(serve):
    served = serve([])
    status, _, body = served.post("/v1/chat/completions", {**HELLO, "user": "x" * 2**24})
    assert status == 413 and body["error"]["message"] == f"the body is larger than {2**24} bytes"


def test_a_client_that_leaves_frees_the_engine(serve):
    served = serve([None])
    with pytest.raises(asyncio.TimeoutError):
        served.run(served.request("POST", "/v1/chat/completions", HELLO, timeout=0.5))
    deadline = time.monotonic() + 10
    while not served.engine.cancelled and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(served.engine.cancelled) == 1


# ------------------------------------------------------------------ echo and several prompts


def test_echo_scores_the_prompt(serve):
    served = serve(["!"] * 2)
    body = {"prompt": "ab c", "max_tokens": 1, "logprobs": 2, "echo": True, "temperature": 0}
    choice = served.post("/v1/completions", body)[2]["choices"][0]
    told, ids = choice["logprobs"], served.engine.prompts[0]
    assert choice["text"] == "ab c!" and "".join(told["tokens"]) == "ab c!"
    assert told["token_logprobs"] == [None, *(-float(n) for n in range(1, len(ids))), -0.5]
    assert told["top_logprobs"][0] is None and len(told["top_logprobs"]) == len(ids) + 1
    assert served.engine.asked[0].scores_prompt
    none = served.post("/v1/completions", {**body, "max_tokens": 0})[2]
    assert none["choices"][0]["text"] == "ab c" and len(none["choices"][0]["logprobs"]["tokens"]) == len(ids)
    assert none["choices"][0]["finish_reason"] == "length"


def test_a_text_begins_with_the_start_token(serve):
    """The tokens are those of transformers. The start token is not part of the returned text."""
    served = serve(["!"] * 2)
    start = served.tokenizer.convert_tokens_to_ids("<|im_start|>")
    served.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", start)]
    )
    for prompt in ("ab c", "<|im_start|>ab c"):
        body = {"prompt": prompt, "max_tokens": 1, "logprobs": 1, "echo": True}
        choice = served.post("/v1/completions", body)[2]["choices"][0]
        assert list(served.engine.prompts[-1]) == served.tokenizer("ab c")["input_ids"]
        told = choice["logprobs"]
        assert choice["text"] == "".join(told["tokens"]) == f"{prompt}!" and len(told["tokens"]) == 1 + len(
            served.engine.prompts[-1]
        )


def test_several_prompts_are_several_choices(serve):
    served = serve(["x", "y", "z", "w"])
    ids = served.tokenizer("abc", add_special_tokens=False)["input_ids"]
    for prompts in (["a", "b"], [ids, ids]):
        body = served.post("/v1/completions", {"prompt": prompts, "max_tokens": 4})[2]
        assert [choice["index"] for choice in body["choices"]] == [0, 1]
        assert body["usage"]["prompt_tokens"] == sum(map(len, served.engine.prompts[-2:]))
    assert [choice["text"] for choice in body["choices"]] == ["z", "w"]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"prompt": ["a", "b"], "stream": True}, "stream: is for requests with one prompt"),
        ({"prompt": "a", "echo": "yes"}, "echo: must be true or false"),
        ({"prompt": ["a"] * 1025}, "prompt: at most 1024 prompts"),
        ({"prompt": []}, "prompt: must be one text"),
        ({"prompt": ["a", 3]}, "prompt: must be one text"),
        ({"prompt": ["a", ""]}, "prompt: must be one text"),
        ({"prompt": "a", "suffix": "b"}, 'suffix="b": is not supported'),
        ({"prompt": "a", "repetition_penalty": 1.1}, "repetition_penalty=1.1: is not supported"),
        ({"prompt": ["a", "b"], "max_tokens": 0}, "max_tokens: must be an integer of at least 1"),
        ({"prompt": "a b " * 400}, "maximum context length is 400 tokens"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_completions_are_refused(body, told, serve):
    served = serve(["x"] * 3)
    status, _, answer = served.post("/v1/completions", body)
    assert status == 400 and told in answer["error"]["message"]


def test_an_engine_that_scores_no_prompts_says_so(serve):
    status, _, body = serve([], scores=False).post("/v1/completions", {"prompt": "a", "echo": True, "logprobs": 1})
    assert status == 400 and "generation.backend=megatron" in body["error"]["message"]


# ------------------------------------------------------------------ /v1/responses


def test_responses_and_their_items(serve):
    served = serve([f"<think>\nHm.\n</think>\n\n{CALL}", "It is 4."])
    tool = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}
    asked = {"model": "any", "instructions": "Be short.", "input": "Hello?", "tools": [tool], "max_output_tokens": 90}
    status, _, first = served.post("/v1/responses", asked)
    assert status == 200 and first["status"] == "completed", first
    thought, message, call = first["output"]
    assert thought["content"][0]["text"] == "Hm." and message["content"][0]["text"] == "Let me see."
    assert (call["name"], json.loads(call["arguments"])) == ("add", {"a": 2})
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "4"}
    hello = {"role": "user", "content": [{"type": "input_text", "text": "Hello?"}]}
    body = {**asked, "input": [hello, *first["output"], result], "stream": True}
    events = events_of(served.post("/v1/responses", body)[2])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.completed"
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == "It is 4." == events[-1]["response"]["output"][0]["content"][0]["text"]
    text = served.tokenizer.decode(served.engine.prompts[1])
    assert "Be short." in text and '"name": "add"' in text and "<tool_response>\n4" in text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize(
    "option",
    [{"repetition_penalty": 1.1}, {"frequency_penalty": 1}, {"logit_bias": {"5": 1}}, {"guided_choice": ["a"]},
     {"ignore_eos": True}, {"use_beam_search": True}, {"add_generation_prompt": False}],
    ids=str,
)  # fmt: skip
def test_options_that_would_change_a_response_are_refused(path, option, serve):
    body = {**HELLO, "input": "Hello?", "max_tokens": 5, **option}
    status, _, answer = serve([]).post(path, body)
    (name,) = option
    assert status == 400 and f"{name}=" in answer["error"]["message"]


def test_the_first_stop_string_is_named(serve):
    body = {**HELLO, "max_tokens": 9, "stop_sequences": ["ee", "th"]}
    answer = serve(["xthree"]).post("/v1/messages", body)[2]
    assert (answer["content"][0]["text"], answer["stop_sequence"]) == ("x", "th")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"n": 3}, "n=3: is not supported"),
        ({"stop": "x"}, "stop="),
        ({"truncation": "auto"}, "truncation="),
        ({"include": ["message.output_text.logprobs"]}, "include="),
        ({"input": []}, "input: must be a text or a list"),
        ({"input": [{"type": "image"}]}, "items of type 'image'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]}, "does not take"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "hosted tools"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format: json_object"),
        ({"max_output_tokens": 0}, "max_output_tokens: must be an integer"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_responses_that_are_not_supported_are_refused(change, told, serve):
    status, _, body = serve([]).post("/v1/responses", {"input": "Hello?", **change})
    assert status == 400 and told in body["error"]["message"]
