"""LlamaIndex by `OpenAILike`."""

import asyncio
from typing import Any, Literal

import tries
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

USER = [ChatMessage(role="user", content=tries.HELLO)]
CALLS: list[object] = []


class Person(BaseModel):
    """A person."""

    job: Literal["engineer", "teacher"]
    age: int = Field(ge=0, le=150)


def get_weather(city: Literal["Oslo", "Rome"]) -> str:
    """Get the weather of a city."""
    CALLS.append(city)
    return "sunny"


def model(tokens: int = 200, **more: Any) -> OpenAILike:
    asked: dict[str, Any] = {
        "api_base": tries.URL,
        "api_key": tries.KEY,
        "model": tries.MODEL,
        "temperature": 0,
    }
    asked |= {"max_retries": 0, "max_tokens": tokens, "is_chat_model": True}
    return OpenAILike(**asked | more)


def chat() -> str:
    whole = model(tries.TOKENS).chat(USER).message.content or ""
    return tries.same(
        "".join(piece.delta or "" for piece in model(tries.TOKENS).stream_chat(USER)), whole
    )


def asynchronous() -> str:
    async def both() -> tuple[str, str]:
        asked = model(tries.TOKENS)
        stream = await asked.astream_chat(USER)
        streamed = "".join([piece.delta or "" async for piece in stream])
        return streamed, (await asked.achat(USER)).message.content or ""

    return tries.same(*asyncio.run(both()))


def completions() -> str:
    plain = model(tries.TOKENS, is_chat_model=False)
    whole = plain.complete(tries.HELLO).text
    return tries.same(
        "".join(piece.delta or "" for piece in plain.stream_complete(tries.HELLO)), whole
    )


def structured() -> None:
    """By functions, as it does with models that call them, and by a schema."""
    for more in (
        {"is_function_calling_model": True},
        {"is_function_calling_model": True, "should_use_structured_outputs": True},
    ):
        asked = model(**more)
        person = asked.structured_predict(Person, PromptTemplate(tries.PERSON))
        tries.check_person(person.job, person.age)
        raw = asked.as_structured_llm(Person).complete(tries.PERSON).raw
        tries.check_person(raw.job, raw.age)


def agent() -> None:
    async def answer(streaming: bool) -> str:
        made = FunctionAgent(
            tools=[get_weather],
            llm=model(is_function_calling_model=True, context_window=4096),
            streaming=streaming,
        )
        return str(await made.run(tries.WEATHER))

    for streaming in (False, True):
        CALLS.clear()
        tries.check_agent(CALLS, asyncio.run(answer(streaming)))


tries.run(
    ["llama-index-llms-openai-like", "llama-index-core"],
    {
        "chats": chat,
        "`astream_chat`": asynchronous,
        "completions": completions,
        "structured output": structured,
        "agents": agent,
    },
)
