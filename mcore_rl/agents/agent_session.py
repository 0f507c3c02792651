"""A session as its program sees it.

This file imports only the standard library, because programs have environments of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class AgentSession:
    """A session, for its program: the address of the policy, and the record.

    base_url: base URL of OpenAI's clients.
    anthropic_base_url: base URL of Anthropic's clients.
    api_key: key of this session.
    record: the fields of the record, without the prompt.
    messages: the prompt as messages; a plain text is one message of the user.
    """

    id: str
    base_url: str
    anthropic_base_url: str
    api_key: str
    record: dict[str, Any]
    messages: list[dict[str, Any]]
