"""instructor: objects by JSON, by tools and by responses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import instructor
import openai
import tries
from pydantic import BaseModel, Field

CLIENT = openai.OpenAI(base_url=tries.URL, api_key=tries.KEY, max_retries=0, timeout=300)
MODES = ("JSON", "JSON_SCHEMA", "MD_JSON", "TOOLS", "TOOLS_STRICT")
RESPONSES = ("RESPONSES_TOOLS",)
SPELLED = ("JSON", "MD_JSON")  # have the schema in the prompt alone


class Person(BaseModel):
    """A person."""

    job: Literal["engineer", "teacher"]
    age: int = Field(ge=0, le=150)


def asked(mode: str) -> dict[str, Any]:
    limit = "max_output_tokens" if mode in RESPONSES else "max_tokens"
    text = tries.SPELLED if mode in SPELLED else tries.PERSON
    messages = [{"role": "user", "content": text}]
    return {
        "model": tries.MODEL,
        "messages": messages,
        "temperature": 0,
        "max_retries": 0,
        limit: 200,
    }


def client(mode: str) -> Any:
    return instructor.from_openai(CLIENT, mode=instructor.Mode[mode])


def one(mode: str) -> None:
    person = client(mode).create(response_model=Person, **asked(mode))
    tries.check_person(person.job, person.age)


def partly(mode: str) -> None:
    *_, person = client(mode).create_partial(response_model=Person, **asked(mode))
    tries.check_person(person.job, person.age)


def several() -> None:
    """Several calls in one answer."""
    people = client("PARALLEL_TOOLS").create(
        response_model=Iterable[Person], tool_choice="required", **asked("PARALLEL_TOOLS")
    )
    found = list(people)
    assert found
    for person in found:
        tries.check_person(person.job, person.age)


TRIES: dict[str, Callable[[], None]] = {
    **{f"`{mode}`": partial(one, mode) for mode in (*MODES, *RESPONSES)},
    **{f"`{mode}`, streamed": partial(partly, mode) for mode in ("JSON", "JSON_SCHEMA", "TOOLS")},
    "`PARALLEL_TOOLS`": several,
}
tries.run(["instructor", "openai"], TRIES)
