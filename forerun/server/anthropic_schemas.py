"""Bodies of Anthropic's Messages API. /openapi.json is made from them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from forerun.server.schemas import (
    UNSUPPORTED_RESPONSES,
    WHOLE,
    AnsweredBody,
    Effort,
    Stop,
    ThinkingLimit,
)

# The unsupported fields: those of OpenAI's API, where they are not known here or have another
# name, and those of Anthropic's that need tools, state or models of the server's.
UNSUPPORTED_MESSAGES: dict[str, tuple[Any, ...]] = {
    **UNSUPPORTED_RESPONSES,
    **dict.fromkeys(("container", "compaction", "thread", "output_format", "input"), ()),
    **dict.fromkeys(("instructions", "max_output_tokens", "text", "reasoning_effort"), ()),
    "mcp_servers": ([],),
    "parallel_tool_calls": (True,),
    # The last is what Claude Code sends: earlier thoughts stay, as they do here.
    "context_management": (
        {},
        {"edits": []},
        {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    ),
    "service_tier": ("auto", "standard_only"),
}
# Members of parts that ask for nothing that changes an answer.
HARMLESS_MEMBERS = {"cache_control", "caller", "citations", "eager_input_streaming", "signature"}


def _as_blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _of_client(kind: str | None) -> str | None:
    if kind not in (None, "custom"):
        raise ValueError(
            f"{kind[:40]!r} is not supported; only tools with an input_schema, which the client "
            "runs, are"
        )
    return kind


class Part(BaseModel):
    """A part of a body. Unknown members are accepted, and the log names them."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class TextBlock(Part):
    """A text."""

    type: Literal["text"]
    text: str


Texts = Annotated[
    list[TextBlock],
    Field(fail_fast=True),
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock]),
]


class ThinkingBlock(Part):
    """The thoughts of an earlier answer. Nobody looks at their signature."""

    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(Part):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Part):
    """What a call has brought."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: bool | None = None


Said = Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]
Asked = Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]


class UserTurn(Part):
    """A question, or the results of tools."""

    role: Literal["user"]
    content: Annotated[
        list[Asked],
        Field(fail_fast=True),
        BeforeValidator(_as_blocks, json_schema_input_type=str | list[Asked]),
    ]


class AssistantTurn(Part):
    """An earlier answer. The last one is continued."""

    role: Literal["assistant"]
    content: Annotated[
        list[Said],
        Field(fail_fast=True),
        BeforeValidator(_as_blocks, json_schema_input_type=str | list[Said]),
    ]


class SystemTurn(Part):
    """A system prompt inside a conversation, for templates that take one there."""

    role: Literal["system"]
    content: Texts


Turn = Annotated[UserTurn | AssistantTurn | SystemTurn, Field(discriminator="role")]


class SchemaTool(Part):
    """A tool that the client runs."""

    type: Annotated[
        str | None,
        AfterValidator(_of_client),
        Field(json_schema_extra={"enum": ["custom", None]}),
    ] = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    # What would change the prompt, or who calls.
    defer_loading: Literal[False] | None = None
    input_examples: Annotated[list[Any], Field(max_length=0)] | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class ToolUse(Part):
    """Whether tools may or must be called, and how many times."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessageThinking(Part):
    """Whether the model may think, how long, and whether its thoughts are shown."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: ThinkingLimit | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputConfig(Part):
    """The form of an answer, and how much effort it is worth."""

    format: dict[str, Any] | None = None
    effort: Effort | None = None
    task_budget: None = None


class PromptBody(AnsweredBody):
    """A conversation, whose tokens are counted."""

    unsupported = UNSUPPORTED_MESSAGES

    messages: Annotated[list[Turn], Field(min_length=1, fail_fast=True)]
    system: Texts | None = None
    tools: Annotated[list[SchemaTool], Field(fail_fast=True)] | None = None
    tool_choice: ToolUse | None = None
    thinking: MessageThinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31), WHOLE] | None = None
    stop_sequences: Stop = ()
    metadata: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None

    def unknown(self) -> list[str]:
        """Return the names of unknown fields, and those of unknown members of their parts."""
        parts: list[tuple[str, Part | None]] = [
            ("tool_choice", self.tool_choice),
            ("thinking", self.thinking),
            ("output_config", self.output_config),
            *(("system", block) for block in self.system or []),
            *(("tools", tool) for tool in self.tools or []),
            *(("messages", turn) for turn in self.messages),
            *(("messages", block) for turn in self.messages for block in turn.content),
        ]
        members = {
            f"{field}.{name}"
            for field, part in parts
            if part is not None
            for name in (part.model_extra or {}).keys() - HARMLESS_MEMBERS
        }
        return super().unknown() + sorted(members)


class MessagesBody(PromptBody):
    """A conversation that the model continues."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**31), WHOLE]


class MessageErrorBody(BaseModel):
    """The shape of every error of Anthropic's API."""

    class Detail(BaseModel):
        """The error."""

        type: str
        message: str

    type: Literal["error"]
    error: Detail
