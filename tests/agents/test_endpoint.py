"""The endpoint over HTTP: routes, errors, keys, retries, lost connections, limits. A scripted engine answers."""

import asyncio
import json
from socket import IPPROTO_TCP

import pytest
from agent_cases import HELLO, Served

from mcore_rl.agents import sessions as module
from mcore_rl.agents.sessions import SessionLimits
from mcore_rl.models.generation.interfaces import RequestError

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = 'Let me see. <tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'


@pytest.fixture
def serve():
    served = []

    def start(*arguments, **options):
        served.append(Served(*arguments, **options))
        return served[-1]

    yield start
    for one in served:
        one.close()


def test_chat_completion(serve):
    served = serve([f"<think>\nHm.\n</think>\n\n{CALL}", "It is 4."])
    body = {**HELLO, "tools": [TOOL], "logprobs": True, "top_logprobs": 2, "return_token_ids": True, "seed": 3}
    status, _, first = served.post("/v1/chat/completions", body)
    (choice,) = first["choices"]
    message = choice["message"]
    assert status == 200 and choice["finish_reason"] == "tool_calls"
    assert message["content"] == "Let me see." and message["reasoning_content"] == "Hm."
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": 2}
    assert first["usage"]["completion_tokens"] == len(choice["token_ids"]) == len(choice["logprobs"]["content"])
    assert tuple(first["prompt_token_ids"]) == served.engine.prompts[0]
    told = choice["logprobs"]["content"][0]
    assert [other["logprob"] for other in told["top_logprobs"]] == [-0.5, -1.5] and told["logprob"] == -0.5
    assert told["top_logprobs"][0] == {key: told[key] for key in ("token", "logprob", "bytes")}

    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "4"}
    kept = {key: value for key, value in message.items() if key != "reasoning_content"}
    body["messages"] = [*HELLO["messages"], kept, result]
    status, _, second = served.post("/v1/chat/completions", body)
    assert status == 200 and second["choices"][0]["message"]["content"] == "It is 4."
    assert len(served.session.tree.rows()) == 1, "the thought that the client dropped is restored"
    assert second["prompt_token_ids"][: len(first["prompt_token_ids"])] == first["prompt_token_ids"]


def events_of(text):
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"], lines[-1]


def test_streams_say_the_same_as_whole_responses(serve):
    served = serve([CALL, CALL])
    body = {**HELLO, "tools": [TOOL], "stream": True, "stream_options": {"include_usage": True}}
    _, headers, text = served.post("/v1/chat/completions", body)
    assert headers["content-type"].startswith("text/event-stream")
    chunks, last = events_of(text)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert last == "[DONE]" and chunks[-1]["usage"]["completion_tokens"] > 0
    assert "".join(delta.get("content") or "" for delta in deltas) == "Let me see."
    assert [call["function"]["name"] for delta in deltas for call in delta.get("tool_calls", ())] == ["add"]

    tools = [{"name": "add", "input_schema": {"type": "object"}}]
    body = {"model": "any", "max_tokens": 50, "messages": HELLO["messages"], "tools": tools, "stream": True}
    _, _, text = served.post("/v1/messages", body)
    events, _ = events_of(text)
    kinds = [event["type"] for event in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    pieces = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(piece.get("text", "") for piece in pieces) == "Let me see."
    assert json.loads("".join(piece.get("partial_json", "") for piece in pieces)) == {"a": 2}
    assert len(served.session.tree.turns) == 2


def test_anthropic_messages(serve):
    served = serve([CALL, "Four."])
    tools = [{"name": "add", "description": "adds", "input_schema": {"type": "object"}}]
    body = {"model": "any", "max_tokens": 60, "system": "Be brief.", "messages": HELLO["messages"], "tools": tools}
    _, _, counted = served.post("/v1/messages/count_tokens", {k: v for k, v in body.items() if k != "max_tokens"})
    _, _, first = served.post("/v1/messages", body)
    assert first["stop_reason"] == "tool_use" and first["usage"]["input_tokens"] == counted["input_tokens"]
    text, use = first["content"]
    assert text == {"type": "text", "text": "Let me see."} and (use["name"], use["input"]) == ("add", {"a": 2})
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "4"}]}
    body["messages"] = [
        *HELLO["messages"],
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [result]},
    ]
    _, _, second = served.post("/v1/messages", body)
    assert second["content"] == [{"type": "text", "text": "Four."}] and second["stop_reason"] == "end_turn"
    assert len(served.session.tree.rows()) == 1


def test_completions_of_texts_and_ids(serve):
    served = serve([" four", " five"])
    _, _, first = served.post("/v1/completions", {"prompt": "2 + 2 =", "max_tokens": 30, "logprobs": 1})
    assert first["choices"][0]["text"] == " four" and first["choices"][0]["logprobs"]["text_offset"][0] == 0
    ids = [*served.session.tree.turns[0].prompt.ids, *served.session.tree.turns[0].response.token_ids.tolist(), 9]
    status, _, second = served.post("/v1/completions", {"prompt": ids, "max_tokens": 30, "return_token_ids": True})
    assert status == 200 and second["prompt_token_ids"] == ids
    assert len(served.session.tree.rows()) == 1


def test_models_and_stop_strings(serve):
    served = serve(["one STOP two"])
    (socket,) = [socket for server in served.server._server.servers for socket in server.sockets]
    assert socket.proto == IPPROTO_TCP, "asyncio sends responses without delay only then"
    assert served.run(served.request("GET", "/v1/models"))[2]["data"][0]["id"] == "policy"
    _, _, answer = served.post("/v1/chat/completions", {**HELLO, "stop": ["STOP"]})
    assert answer["choices"][0]["message"]["content"] == "one"


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "an image must have an URL"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "'input_audio' are not supported"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "last message must not be the assistant's"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"max_tokens": 0}, "max_tokens: must be an integer of at least 1"),
        ({"n": 1000}, "n: must be an integer from 1 to 128"),
        ({"stop": [1]}, "stop: must be a text"),
        ({"tools": "add"}, "tools: must be a list"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": 5}]}, "malformed"),
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, "complete characters"),
        ({"stream_options": "x"}, "stream_options: must be an object"),
    ],
)
def test_what_would_change_the_samples_is_refused(changes, part, serve):
    served = serve([])
    status, headers, body = served.post("/v1/chat/completions", {**HELLO, **changes})
    assert status == 400 and part in body["error"]["message"] and headers["x-should-retry"] == "false"
    assert not served.engine.prompts


def test_keys_bodies_and_unknown_routes(serve):
    served = serve([], body_bytes=300)
    other = served.run(served.begin())
    for key in ("wrong", "", "é"):
        status, _, body = served.post("/v1/chat/completions", HELLO, key=key or " ")
        assert status == 401 and body["error"]["code"] == "invalid_api_key" and served.session.key not in str(body)
    _, _, body = served.post("/v1/messages", HELLO, key="wrong")
    assert body["type"] == "error" and body["error"]["type"] == "authentication_error"
    assert served.post(f"/s/{other.id}/v1/chat/completions", HELLO)[0] == 401, "another session's key"
    long = {"messages": [{"role": "user", "content": "x" * 400}]}
    assert served.post("/v1/chat/completions", long)[0] == 413
    assert served.post("/v1/chat/completions", [1])[0] == 400
    assert served.run(served.request("GET", "/v1/other"))[0] == 404
    assert not served.engine.prompts


def test_limits_of_calls_tokens_and_context(serve):
    served = serve(["a b c d e f"] * 9, limits=SessionLimits(2, None))
    assert [served.post("/v1/chat/completions", HELLO)[0] for _ in range(3)] == [200, 200, 400]
    assert served.session.reached == "calls"
    served = serve(["a b c d e f g h i j"] * 9, limits=SessionLimits(9, 3))
    assert [served.post("/v1/chat/completions", HELLO)[0] for _ in range(2)] == [200, 400]
    assert served.session.reached == "tokens"
    served = serve([], longest=5)
    status, _, body = served.post("/v1/chat/completions", HELLO)
    assert status == 400 and body["error"]["code"] == "context_length_exceeded" and served.session.reached == "context"


def test_rewards_and_requests_after_the_end(serve):
    served = serve(["x"] * 3)
    served.post("/v1/chat/completions", HELLO)
    for wrong in ("a", {"reward": float("inf")}, {"points": 1}, {"rewards": {"a": None}}, None, {}):
        assert served.post("/reward", wrong)[0] == 400, wrong
    assert served.post("/reward", {"rewards": {"right": 1, "short": 0.5}})[0] == 200
    assert served.session.reward == 1.5 and served.session.rewards == {"right": 1.0, "short": 0.5}
    status, headers, body = served.post("/v1/chat/completions", HELLO)
    assert status == 410 and headers["x-should-retry"] == "false" and body["error"]["code"] == "session_ended"
    assert served.post("/reward", 2.0)[0] == 410


async def ask_and_leave(served, path, body):
    with pytest.raises(TimeoutError):
        await served.request("POST", path, body, timeout=0.3)


@pytest.mark.parametrize("stream", [False, True])
def test_a_retry_gets_the_response_that_was_lost(stream, serve, monkeypatch):
    """The engine answers after the connection was lost; the client repeats the request on a new connection."""
    served = serve([None])
    body = {**HELLO, "stream": stream}
    served.run(ask_and_leave(served, "/v1/chat/completions", body))
    (call,) = served.session.calls
    call.asked[0].set_result(served.engine.response("late"))
    status, _, answer = served.post("/v1/chat/completions", body, **{"x-stainless-retry-count": "1"})
    assert status == 200 and "late" in str(answer)
    assert len(served.session.calls) == len(served.engine.prompts) == 1
    served.run(finish(served))
    assert len(served.session.tree.rows()) == 1


async def finish(served):
    served.sessions.finish(served.session)


def test_an_engine_error_is_not_repeated(serve):
    served = serve([None, "better"])

    async def ask_and_fail():
        asking = asyncio.ensure_future(served.request("POST", "/v1/chat/completions", HELLO))
        await asyncio.sleep(0.2)
        served.session.calls[0].asked[0].set_exception(RequestError("no server is left"))
        return await asking

    status, _, body = served.run(ask_and_fail())
    assert status == 500 and "no server is left" in body["error"]["message"]
    assert served.post("/v1/chat/completions", HELLO, **{"x-stainless-retry-count": "1"})[0] == 200


def test_responses_that_cannot_be_sent_as_they_are(serve):
    """A tool call with half of a character, NaN, or a thousand brackets stays text."""
    deep = "[" * 2000
    calls = ['{"name": "add", "arguments": {"a": "\\ud83d"}}', '{"name": "add", "arguments": {"a": NaN}}', deep]
    served = serve([f"<tool_call>{call}</tool_call>" for call in calls], limits=SessionLimits(9, None), longest=9999)
    for call in calls:
        status, _, body = served.post("/v1/chat/completions", {**HELLO, "tools": [TOOL]})
        assert status == 200 and call[:9] in body["choices"][0]["message"]["content"]


def test_a_text_does_not_continue_token_ids(serve):
    served = serve(["H", "x"])
    served.post("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 5})
    served.post("/v1/completions", {"prompt": "Hello", "max_tokens": 5})
    assert served.session.tree.turns[1].prompt.parent is None


def test_a_client_that_does_not_come_back_is_left_out(serve, monkeypatch):
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.1)
    served = serve([None, "other"])
    served.run(ask_and_leave(served, "/v1/chat/completions", HELLO))
    served.run(asyncio.sleep(0.3))
    assert len(served.engine.cancelled) == 1 and served.session.calls[0].work.cancelled()
    status, _, _ = served.post("/v1/chat/completions", HELLO)
    assert status == 200 and len(served.session.tree.rows()) == 1


def test_the_same_question_again_is_a_new_sample(serve):
    served = serve(["one", "two"])
    for _ in range(2):
        assert served.post("/v1/chat/completions", HELLO)[0] == 200
    assert len(served.session.tree.turns) == len(served.session.tree.rows()) == 2
    assert len({served.session.sample_id_of((1, 2), 3) for _ in range(3)}) == 3


def test_parallel_requests_and_choices(serve):
    served = serve([f"answer {n}" for n in range(8)], limits=SessionLimits(50, None))

    async def several():
        body = {**HELLO, "n": 2}
        return await asyncio.gather(*(served.request("POST", "/v1/chat/completions", body) for _ in range(4)))

    answers = served.run(several())
    texts = {choice["message"]["content"] for _, _, body in answers for choice in body["choices"]}
    assert texts == {f"answer {n}" for n in range(8)} and len(served.session.tree.rows()) == 8


def test_responses_that_wait_when_the_session_ends(serve):
    served = serve([None])

    async def ask_and_reward():
        asking = asyncio.ensure_future(served.request("POST", "/v1/chat/completions", HELLO))
        await asyncio.sleep(0.2)
        await served.request("POST", "/reward", 1)
        return await asking

    status, _, _ = served.run(ask_and_reward())
    assert status == 410
    served.run(finish(served))
    assert not served.session.tree.rows() and served.session.reward == 1
