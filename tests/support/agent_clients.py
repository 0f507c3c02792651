"""Programs that use official clients, unmodified: `python agent_clients.py KIND URL KEY`. They print a line of JSON.

They run in an environment of their own (`make test-agents`), and import nothing of this repository.
"""

import json
import sys

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
QUESTION = {"role": "user", "content": "What is 2+3?"}


def openai(url, key, stream):
    from openai import APIStatusError, AuthenticationError, BadRequestError, OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key=key)
    assert client.models.list().data[0].id == "policy"
    messages, said = [QUESTION], []
    for _ in range(2):
        options = {"model": "policy", "messages": messages, "tools": [TOOL], "max_completion_tokens": 60}
        if stream:
            with client.chat.completions.stream(**options, stream_options={"include_usage": True}) as events:
                for _event in events:
                    pass
                completion = events.get_final_completion()
        else:
            completion = client.chat.completions.create(**options, logprobs=True, top_logprobs=2, seed=3)
            assert len(completion.choices[0].logprobs.content[0].top_logprobs) == 2
        message = completion.choices[0].message
        assert completion.usage.completion_tokens > 0
        messages.append(message)
        said.append(message.content)
        for call in message.tool_calls or []:
            values = json.loads(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(values["a"] + values["b"])})
    refused = []
    for wrong, options in (
        (BadRequestError, {"top_logprobs": 21, "logprobs": True}),
        (BadRequestError, {"messages": []}),
    ):
        try:
            client.chat.completions.create(**{"model": "policy", "messages": [QUESTION], **options})
        except wrong as error:
            refused.append(error.status_code)
    try:
        OpenAI(base_url=f"{url}/v1", api_key="wrong").models.list()
    except AuthenticationError as error:
        refused.append(error.status_code)
    text = client.completions.create(model="policy", prompt="2+3=", max_tokens=20).choices[0].text
    client.post("/reward", body={"reward": 0.5}, cast_to=object)
    try:
        client.chat.completions.create(model="policy", messages=[QUESTION])
    except APIStatusError as error:
        refused.append(error.status_code)
    return {"said": said, "refused": refused, "text": text}


def anthropic(url, key, stream):
    from anthropic import Anthropic, AuthenticationError, BadRequestError

    client = Anthropic(base_url=url, api_key=key)
    function = TOOL["function"]
    tools = [{"name": "add", "description": function["description"], "input_schema": function["parameters"]}]
    messages, said = [QUESTION], []
    for _ in range(2):
        options = {"model": "policy", "max_tokens": 60, "messages": messages, "tools": tools}
        if stream:
            with client.messages.stream(**options) as events:
                message = events.get_final_message()
        else:
            message = client.messages.create(**options)
        assert message.usage.output_tokens > 0
        messages.append({"role": "assistant", "content": message.content})
        said.append("".join(block.text for block in message.content if block.type == "text"))
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": str(block.input["a"] + block.input["b"])}
            for block in message.content
            if block.type == "tool_use"
        ]
        if results:
            messages.append({"role": "user", "content": results})
    counted = client.messages.count_tokens(model="policy", messages=[QUESTION]).input_tokens
    refused = []
    try:
        client.messages.create(
            model="policy", max_tokens=5, messages=[QUESTION], tool_choice={"type": "any"}, tools=tools
        )
    except BadRequestError as error:
        refused.append(error.status_code)
    try:
        Anthropic(base_url=url, api_key="wrong").messages.create(model="policy", max_tokens=5, messages=[QUESTION])
    except AuthenticationError as error:
        refused.append(error.status_code)
    return {"said": said, "refused": refused, "counted": counted}


def images(url, key, stream):
    """Send the picture of the standard input in a question and in a tool's result, by each client and API."""
    from anthropic import Anthropic
    from openai import OpenAI

    picture = sys.stdin.read()
    address = f"data:image/png;base64,{picture}"
    client, said = OpenAI(base_url=f"{url}/v1", api_key=key), []
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    part = {"type": "image_url", "image_url": {"url": address}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, part]},
        {"role": "assistant", "content": "b", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [part]},
    ]
    said.append(client.chat.completions.create(model="policy", messages=messages).choices[0].message.content)
    seen = {"type": "input_image", "image_url": address, "detail": "auto"}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, seen]},
        {"role": "assistant", "content": "b"},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [seen]},
    ]
    said.append(client.responses.create(model="policy", input=items).output_text)
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": picture}}
    blocks = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, block]},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "b"}, {"type": "tool_use", "id": "c", "name": "add", "input": {}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [block]}]},
    ]
    anthropic = Anthropic(base_url=url, api_key=key)
    said.append(anthropic.messages.create(model="policy", max_tokens=9, messages=blocks).content[0].text)
    return {"said": said}


def langchain(url, key, stream):
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def add(a: int, b: int) -> str:
        """Adds two numbers."""
        return str(a + b)

    model = ChatOpenAI(model="policy", base_url=f"{url}/v1", api_key=key, streaming=stream).bind_tools([add])
    messages, said = [HumanMessage(QUESTION["content"])], []
    for _ in range(2):
        answer = model.invoke(messages)
        messages.append(answer)
        said.append(answer.content)
        messages += [ToolMessage(add.invoke(call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls]
    return {"said": said}


if __name__ == "__main__":
    kind, url, key, stream = sys.argv[1:]
    kinds = {"openai": openai, "anthropic": anthropic, "langchain": langchain, "images": images}
    print(json.dumps(kinds[kind](url, key, stream == "1")))
