"""An agent whose tool shows a picture: the policy calls the tool, sees the picture, and names the number in it.

    mcore-rl train grpo configs/grpo_agent_images.yaml

`make demo-agent-images` writes the model, the pictures and the questions, and runs this command.
"""

import base64
from pathlib import Path

from openai import AsyncOpenAI

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Shows the picture.",
            "parameters": {"type": "object", "properties": {}},
        },
    }
]


async def solve(session):
    """Let the policy look at the picture of the record and answer; return 1 for the right answer."""
    client, messages = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key), list(session.messages)
    for _ in range(3):
        response = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        message = response.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return float((message.content or "").strip() == session.record["answer"])
        for call in message.tool_calls:
            content = [{"type": "image_url", "image_url": {"url": data_url(session.record["picture"])}}]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return 0.0


def data_url(path: str) -> str:
    return "data:image/png;base64," + base64.b64encode(Path(path).read_bytes()).decode()
