"""Structured answers and calls of tools through the official client: openai_calls.py URL."""

import json
import sys

import openai
from pydantic import BaseModel, Field
from typing import Literal

client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="none-needed", max_retries=0, timeout=60)
model = client.models.list().data[0].id
user = {"role": "user", "content": "Do it"}


class Day(BaseModel):
    city: Literal["Bern", "Oslo"]
    rain: bool
    hours: list[Literal[1, 2, 3]] = Field(max_length=3)


class Weather(BaseModel):
    """Tells the weather."""

    city: Literal["Bern", "Oslo"]
    days: Literal[1, 2, 3]


def ask(**more):
    return dict(model=model, messages=[user], max_tokens=300, seed=5, **more)


# Structured output, whole and streamed.
day = client.chat.completions.parse(**ask(response_format=Day)).choices[0].message
assert isinstance(day.parsed, Day), day
with client.chat.completions.stream(**ask(response_format=Day)) as stream:
    streamed = stream.get_final_completion().choices[0].message
assert streamed.parsed == day.parsed and streamed.content == day.content, streamed

# Calls, whole and streamed, and the conversation after.
tool = openai.pydantic_function_tool(Weather)
named = {"type": "function", "function": {"name": "Weather"}}
for choice in ["required", named]:
    asked = ask(tools=[tool], tool_choice=choice, parallel_tool_calls=False)
    answer = client.chat.completions.parse(**asked).choices[0]
    (call,) = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls" and isinstance(call.function.parsed_arguments, Weather), answer
    with client.chat.completions.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds, kinds
    (again,) = streamed.message.tool_calls
    assert (again.id, again.function.arguments) == (call.id, call.function.arguments), streamed
    history = [user, answer.message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    for message in history[1]["tool_calls"]:
        message["function"].pop("parsed_arguments")
    history[1].pop("parsed", None)
    after = client.chat.completions.create(**{**ask(tools=[tool]), "messages": history, "max_tokens": 5})
    assert after.choices[0].finish_reason in ["length", "stop"], after

# Refusals are the client's own errors.
for bad in [
    dict(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}),
    dict(tools=[tool], tool_choice={"type": "function", "function": {"name": "other"}}),
]:
    try:
        client.chat.completions.create(**ask(**bad))
        raise SystemExit(f"not refused: {bad}")
    except openai.BadRequestError as e:
        assert e.code in ["unsupported", "invalid_value"] and e.param, e.body

# Several prompts.
both = client.completions.create(model=model, prompt=["a", "b"], n=2, max_tokens=3, seed=1, temperature=1)
assert [c.index for c in both.choices] == [0, 1, 2, 3]
one = client.completions.create(model=model, prompt="b", n=2, max_tokens=3, seed=1, temperature=1)
assert [c.text for c in one.choices] == [c.text for c in both.choices[2:]]
print(json.dumps({"held": True}))
