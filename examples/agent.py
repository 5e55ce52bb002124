"""An agent with a deadline on the ``openai`` SDK: plan, look things up side by side, answer.

Run it against ``make demo``'s server: ``python examples/agent.py --base-url http://127.0.0.1:8000/v1``. The model there
has random weights and no parser of tool calls, so the agent calls its tools itself after its plan. With a real model,
use ``tool_choice="auto"`` and read ``message.tool_calls``.
"""

import argparse
import asyncio
import time
import uuid
from datetime import UTC, datetime
from typing import Any

from openai import APIStatusError, AsyncOpenAI

QUESTION = "What time is it, and how long is this question?"
TOOLS = {"clock": lambda: datetime.now(UTC).isoformat(timespec="seconds"), "length": lambda: str(len(QUESTION))}
DECLARED = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in TOOLS
]


class Agent:
    """One program: every call carries its id, its deadline, and where in it the call belongs."""

    def __init__(self, client: AsyncOpenAI, model: str, deadline_ms: int) -> None:
        self.client, self.model, self.started_s = client, model, time.monotonic()
        self.headers = {"x-program-id": f"agent-{uuid.uuid4().hex[:8]}", "x-program-deadline-ms": str(deadline_ms)}

    async def call(self, messages: list[dict[str, Any]], stage: str, **program: Any) -> str:
        """One sub-request; prints what its stage was given."""
        told = {"stage": stage, "app": "example-agent", **program}
        request: dict[str, Any] = {"model": self.model, "messages": messages, "max_tokens": 32}
        if stage == "plan":
            request |= {"tools": DECLARED, "tool_choice": "none"}
        answer = await self.client.chat.completions.create(
            **request, extra_headers=self.headers, extra_body={"slo": {"program": told}}
        )
        verdict = (answer.model_extra or {})["slo"]
        given, after_s = verdict["program"], time.monotonic() - self.started_s
        print(
            f"{after_s:6.2f} s  {stage:8} stage {given['stage']}: had {given['stage_deadline_ms']:.0f} ms, "
            f"took {verdict['e2e_ms']:.0f} ms, {'held' if verdict['met'] else 'late'} ({verdict['reason']})"
        )
        return answer.choices[0].message.content or "."

    async def run(self) -> float:
        """The whole program; returns its seconds."""
        messages: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
        plan = await self.call(messages, "plan")
        messages.append({"role": "assistant", "content": plan})
        looks = [
            self.call([*messages, {"role": "user", "content": f"{name} says {tool()}"}], "look", parents=["plan"],
                      tools=[name])
            for name, tool in TOOLS.items()
        ]  # fmt: skip
        messages += [{"role": "user", "content": found} for found in await asyncio.gather(*looks)]
        await self.call(messages, "answer", parents=["look"], last=True)
        return time.monotonic() - self.started_s


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--deadline-ms", type=int, default=10_000)
    chosen = parser.parse_args()
    client = AsyncOpenAI(base_url=chosen.base_url, api_key="none", max_retries=0)
    try:
        took_s = await Agent(client, chosen.model, chosen.deadline_ms).run()
    except APIStatusError as error:
        wait = error.response.headers.get("retry-after", "never")
        raise SystemExit(f"refused ({error.code}): try again in {wait} s") from error
    print(f"program: {took_s:.2f} s of {chosen.deadline_ms / 1000:g} s")


if __name__ == "__main__":
    asyncio.run(main())
