"""An agent that answers a question with a tool: a loop of OpenAI's client, and the reward of its answer.

    mcore-rl train grpo configs/grpo_agent.yaml

`make demo-agent` writes the model and the questions, and runs this command.
"""

import json

from openai import AsyncOpenAI

TOOLS = [
    {
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
]


async def solve(session):
    """Let the policy answer the question, and run the tools that it calls; return 1 for the right answer."""
    client, messages = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key), list(session.messages)
    for _ in range(4):
        response = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        message = response.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return float((message.content or "").strip() == session.record["answer"])
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": add(call.function.arguments)})
    return 0.0


def add(arguments: str) -> str:
    try:
        values = json.loads(arguments)
        return str(int(values["a"]) + int(values["b"]))
    except (ValueError, KeyError, TypeError):
        return "error"
