"""A scripted engine and an endpoint for tests of sessions, and random texts."""

import asyncio
import json
import threading
from concurrent.futures import Future

import aiohttp
from chat_forms import FORMS, tokenizer_with

from mcore_rl.agents.parsing import hermes, llama_json, mistral, qwen_tags
from mcore_rl.agents.server import Endpoint, Server
from mcore_rl.agents.sessions import SessionLimits, Sessions
from mcore_rl.models.generation.interfaces import RequestEngine, Response

HELLO = {"model": "any", "messages": [{"role": "user", "content": "Hello?"}]}


class ScriptedEngine(RequestEngine):
    """Answers requests at once, by a function from the prompt's tokens to a text.

    prompts, images: the tokens and the images of each request.
    """

    def __init__(self, tokenizer, answer, end_id, max_sequence_length=4096):
        self.tokenizer, self.answer, self.end_id = tokenizer, answer, end_id
        self.max_sequence_length, self.prompts, self.images, self.cancelled = max_sequence_length, [], [], []

    def submit(self, prompt, sample_id, group=(), greedy=False, options=None, images=()):
        self.prompts.append(prompt)
        self.images.append(images)
        future = Future()
        text = self.answer(prompt)
        if text is not None:
            future.set_result(self.response(text, options))
        return future

    def response(self, text, options=None):
        ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.end_id]
        limit = (options and options.max_new_tokens) or len(ids)
        ids = ids[:limit]
        likeliest = [[(token, -0.5), (5, -1.5)][: options.num_likeliest] for token in ids] if options else ()
        return Response(ids, [-0.5] * len(ids), ids[-1] == self.end_id, [(0, len(ids))], likeliest=likeliest)

    def cancel(self, future):
        self.cancelled.append(future)
        future.cancel()


LIMITS = SessionLimits(5, 100)


class Served:
    """A running endpoint with one session, in an event loop of its own thread."""

    def __init__(self, replies, limits=LIMITS, body_bytes=2**20, longest=400):
        form = FORMS["qwen3"]
        self.tokenizer = tokenizer_with(form.plain, form.eos)
        end = self.tokenizer.convert_tokens_to_ids(form.eos)
        self.replies = list(replies)
        self.engine = ScriptedEngine(self.tokenizer, lambda _: self.replies.pop(0), end, longest)
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.server = Server(self.endpoint(limits, body_bytes), "127.0.0.1", 0)
        self.run(self.server.start())
        self.session = self.run(self.begin())

    def endpoint(self, limits, body_bytes):
        self.sessions = Sessions(self.engine, self.tokenizer, limits)
        return Endpoint(self.sessions, body_bytes)

    async def begin(self):
        return self.sessions.begin(7, {"answer": "4"}, HELLO["messages"])

    def run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout=20)

    def post(self, path, body, **headers):
        """Return status, headers and body of a request."""
        return self.run(self.request("POST", path, body, **headers))

    async def request(self, method, path, body=None, key=None, timeout=10, **headers):
        headers = {"Authorization": f"Bearer {key or self.session.key}", **headers}
        limit = aiohttp.ClientTimeout(total=timeout)
        async with (
            aiohttp.ClientSession(timeout=limit) as client,
            client.request(method, self.server.url + path, json=body, headers=headers) as answer,
        ):
            text = await answer.text()
            is_json = answer.headers["content-type"].startswith("application/json")
            return answer.status, answer.headers, json.loads(text) if is_json else text

    def close(self):
        self.run(self.server.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)


WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "twice,", "then", "sleeps;", "42"]


def random_text(generator, longest=6):
    return " ".join(generator.choice(WORDS) for _ in range(generator.randint(1, longest)))


def random_reply(generator, form, thoughts, calls):
    """Return the text of a response: a thought, a text, tool calls, or what no parser can read."""
    text = ""
    if thoughts and generator.random() < 0.5:
        text += f"<think>\n{random_text(generator)}\n</think>\n\n"
    if generator.random() < 0.15:
        return text + generator.choice(["<tool_call>{broken", "<think>", "[TOOL_CALLS] no", " ", "{}", "\n\n"])
    if calls and generator.random() < 0.5:
        name, value = generator.choice(["add", "search"]), random_text(generator, 2)
        return (
            text
            + {
                hermes: f'<tool_call>\n{{"name": "{name}", "arguments": {{"q": "{value}"}}}}\n</tool_call>',
                qwen_tags: (
                    f"<tool_call>\n<function={name}>\n<parameter=q>\n{value}\n</parameter>\n</function>\n</tool_call>"
                ),
                mistral: f'[TOOL_CALLS][{{"name": "{name}", "arguments": {{"q": "{value}"}}, "id": "abcdefghi"}}]',
                llama_json: f'{{"name": "{name}", "parameters": {{"q": "{value}"}}}}',
            }[form]
        )
    return text + random_text(generator)
