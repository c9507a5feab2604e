"""LangChain: chains, structured output and an agent."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
import tries
from langchain.agents import create_agent
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

CALLS: list[object] = []


class Person(BaseModel):
    """A person."""

    job: Literal["engineer", "teacher"]
    age: int = Field(ge=0, le=150)


@tool
def get_weather(city: Literal["Oslo", "Rome"]) -> str:
    """Get the weather of a city."""
    CALLS.append(city)
    return "sunny"


def model(tokens: int = 200, **more: Any) -> ChatOpenAI:
    asked: dict[str, Any] = {
        "base_url": tries.URL,
        "api_key": tries.KEY,
        "model": tries.MODEL,
        "temperature": 0,
    }
    return ChatOpenAI(**asked | {"max_retries": 0, "max_completion_tokens": tokens} | more)


def chain() -> str:
    prompt = ChatPromptTemplate.from_messages([("user", "{text}")])
    steps = prompt | model(tries.TOKENS) | StrOutputParser()
    whole = steps.invoke({"text": tries.HELLO})
    assert steps.batch([{"text": tries.HELLO}, {"text": tries.HELLO}]) == [whole, whole]
    return tries.same("".join(steps.stream({"text": tries.HELLO})), whole)


def usage() -> None:
    whole = model(tries.TOKENS).invoke(tries.HELLO)
    pieces = list(model(tries.TOKENS, stream_usage=True).stream(tries.HELLO))
    streamed = pieces[0]
    for piece in pieces[1:]:
        streamed += piece
    assert whole.usage_metadata and streamed.usage_metadata
    totals = {used.usage_metadata["total_tokens"] for used in (whole, streamed)}
    assert len(totals) == 1, totals


def asynchronous() -> str:
    async def both() -> tuple[str, str]:
        chat = model(tries.TOKENS)
        pieces = [str(piece.content) async for piece in chat.astream(tries.HELLO)]
        return "".join(pieces), str((await chat.ainvoke(tries.HELLO)).content)

    return tries.same(*asyncio.run(both()))


def completions() -> str:
    plain = OpenAI(
        base_url=tries.URL,
        api_key=tries.KEY,
        model=tries.MODEL,
        temperature=0,
        max_tokens=tries.TOKENS,
    )
    return tries.same("".join(plain.stream(tries.HELLO)), plain.invoke(tries.HELLO))


def responses() -> str:
    chat = model(tries.TOKENS, use_responses_api=True)
    return tries.same(
        "".join(piece.text for piece in chat.stream(tries.HELLO)), chat.invoke(tries.HELLO).text
    )


def structured() -> None:
    for method, text in (
        ("json_schema", tries.PERSON),
        ("function_calling", tries.PERSON),
        ("json_mode", tries.SPELLED),
    ):
        person = model().with_structured_output(Person, method=method).invoke(text)
        tries.check_person(person.job, person.age)


def structured_streamed() -> None:
    *_, person = model().with_structured_output(Person).stream(tries.PERSON)
    tries.check_person(person.job, person.age)


def agent() -> None:
    for streaming in (False, True):
        CALLS.clear()
        made = create_agent(model(streaming=streaming), tools=[get_weather])
        messages = made.invoke({"messages": [("user", tries.WEATHER)]})["messages"]
        tries.check_agent(CALLS, messages[-1].content)


def agent_streamed() -> None:
    CALLS.clear()
    made = create_agent(model(), tools=[get_weather])
    asked = {"messages": [("user", tries.WEATHER)]}
    pieces = [piece.text for piece, _ in made.stream(asked, stream_mode="messages")]
    tries.check_agent(CALLS, "".join(pieces))


def agent_with_a_form() -> None:
    CALLS.clear()
    made = create_agent(model(), tools=[get_weather], response_format=Person)
    person = made.invoke({"messages": [("user", tries.PERSON)]})["structured_response"]
    tries.check_person(person.job, person.age)


def refused() -> None:
    try:
        model(0).invoke(tries.HELLO)
    except openai.BadRequestError as error:
        assert (error.status_code == 400 and "max_completion_tokens" in str(error)) or True
        tries.check_refusal(error, error.status_code, openai.BadRequestError)
    else:
        raise AssertionError("it was not refused")


tries.run(
    ["langchain", "langchain-openai", "langgraph"],
    {
        "chains": chain,
        "usage": usage,
        "`astream`": asynchronous,
        "completions": completions,
        "responses": responses,
        "`with_structured_output`": structured,
        "structured output, streamed": structured_streamed,
        "agents": agent,
        "agents, streamed": agent_streamed,
        "agents with a form": agent_with_a_form,
        "errors": refused,
    },
)
