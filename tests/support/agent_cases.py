"""A scripted engine for tests of sessions, and tokenizers with chat templates."""

from concurrent.futures import Future

from mcore_rl.agents.parsing import hermes, llama_json, mistral, qwen_tags
from mcore_rl.models.generation.interfaces import RequestEngine, Response


class ScriptedEngine(RequestEngine):
    """Answers requests at once, by a function from the prompt's tokens to a text.

    prompts: the tokens of each request.
    """

    def __init__(self, tokenizer, answer, end_id, max_sequence_length=4096):
        self.tokenizer, self.answer, self.end_id = tokenizer, answer, end_id
        self.max_sequence_length, self.prompts, self.cancelled = max_sequence_length, [], []

    def submit(self, prompt, sample_id, group=(), greedy=False, limits=None):
        self.prompts.append(prompt)
        future = Future()
        text = self.answer(prompt)
        if text is not None:
            future.set_result(self.response(text, limits))
        return future

    def response(self, text, limits=None):
        ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.end_id]
        limit = (limits and limits.max_new_tokens) or len(ids)
        ids = ids[:limit]
        return Response(ids, [-0.5] * len(ids), ids[-1] == self.end_id, [(0, len(ids))])

    def cancel(self, future):
        self.cancelled.append(future)
        future.cancel()


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
