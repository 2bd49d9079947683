"""The bodies of requests, as pydantic models: OpenAI's fields, and the further sampling settings of the engine."""

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

_LARGEST_SEED = 2**63 - 1
_MOST_STOPS, _LONGEST_STOP = 16, 256
_MOST_CHOICES = 128
_NAME = r"^[a-zA-Z0-9_-]{1,64}$"


def _texts_or_ids(value: Any) -> tuple[str | tuple[int, ...], ...]:
    """Return one or several prompts. Raises ValueError."""
    prompts = [value] if isinstance(value, str) or _is_ids(value) else value
    if not isinstance(prompts, list) or not prompts:
        raise ValueError("a text, a list of texts, a list of token ids or a list of such lists is needed")
    if not (all(isinstance(each, str) for each in prompts) or all(map(_is_ids, prompts))):
        raise ValueError("a list of texts, or a list of lists of token ids that are not empty, is needed")
    return tuple(each if isinstance(each, str) else tuple(each) for each in prompts)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


def _texts(value: Any) -> Any:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError("a text or a list of texts is needed")
    if len(texts) > _MOST_STOPS:
        raise ValueError(f"{len(texts)} texts are more than {_MOST_STOPS}")
    return tuple(texts)


def _parts(value: Any) -> Any:
    if isinstance(value, str):
        return ({"type": "text", "text": value},)
    if value is not None and not isinstance(value, list):
        raise ValueError("a text or a list of parts is needed")
    return value if value is None else tuple(value)


# A strict body takes no list for a tuple.
_TUPLE = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
Stop = Annotated[str, Field(min_length=1, max_length=_LONGEST_STOP)]
TextsOrIds = Annotated[tuple[str | tuple[int, ...], ...], BeforeValidator(_texts_or_ids)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True, frozen=True)


class StreamOptions(_Body):
    """Options of a stream.

    include_usage: a last chunk counts the tokens. include_obfuscation: no effect; no chunk is padded.
    """

    include_usage: bool = False
    include_obfuscation: bool = False


class JsonSchema(_Body):
    """A JSON schema with its name. strict: the text always follows the schema, whatever its value."""

    name: Annotated[str, Field(pattern=_NAME)]
    definition: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None
    description: Annotated[str, Field(max_length=4096)] | None = None


class ResponseFormat(_Body):
    """The form of the text, by constrained decoding; json_object: one JSON object."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @field_validator("json_schema")
    @classmethod
    def _of_its_type(cls, value: JsonSchema | None, info: ValidationInfo) -> JsonSchema | None:
        if value is not None and info.data.get("type", "json_schema") != "json_schema":
            raise ValueError('it needs type = "json_schema"')
        return value

    @model_validator(mode="after")
    def _has_schema(self) -> "ResponseFormat":
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError('type "json_schema" needs json_schema: {"name": ..., "schema": {...}}')
        return self


class SamplingFields(_Body):
    """How tokens are sampled, the same for all endpoints. ignore_eos: only max_tokens and `stop` end the text."""

    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] = 1.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    seed: Annotated[int, Field(ge=-_LARGEST_SEED - 1, le=_LARGEST_SEED)] | None = None
    stop: Annotated[tuple[Stop, ...], BeforeValidator(_texts)] = ()
    ignore_eos: bool = False


class _GenerationFields(SamplingFields):
    model: str
    n: Annotated[int, Field(ge=1, le=_MOST_CHOICES)] = 1
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: Annotated[str, Field(max_length=256)] | None = None
    response_format: ResponseFormat = ResponseFormat(type="text")

    @field_validator("stream_options")
    @classmethod
    def _stream_options(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if not info.data.get("stream"):
            raise ValueError("it needs stream = true")
        return value

    @field_validator("response_format")
    @classmethod
    def _without_stop(cls, value: ResponseFormat, info: ValidationInfo) -> ResponseFormat:
        if value.type != "text" and info.data.get("stop"):
            raise ValueError("a text of stop may cut the JSON; leave stop out")
        return value


class CompletionRequest(_GenerationFields):
    """The body of /v1/completions. prompt: texts, or lists of token ids. echo: the answer begins with the prompt."""

    prompt: TextsOrIds
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool = False
    max_tokens: Annotated[int, Field(ge=0)] | None = None


class EmbeddingRequest(_Body):
    """The body of /v1/embeddings. input: texts, or lists of token ids."""

    model: str
    input: TextsOrIds
    encoding_format: Literal["float", "base64"] = "float"
    user: Annotated[str, Field(max_length=256)] | None = None


class TextPart(_Body):
    """A part of a message's content. cache_control: no effect."""

    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("type") != "text":
            raise ValueError('each part has to be {"type": "text", "text": "..."}; only text is read')
        return value


class CalledFunction(_Body):
    """The function of a call. arguments: the text of a JSON object; parsed_arguments: a client's own reading of it."""

    name: str
    arguments: str
    parsed_arguments: Any = None


class ToolCall(_Body):
    """A call of a tool in an assistant's message. index: its place in a stream, which clients keep."""

    id: str
    index: int | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(_Body):
    """A message of a conversation.

    name: for the template, and most templates have no use for it. parsed: a client's own reading of the content.
    Clients send back the answers of a server, in which the fields of the second part have a value that says nothing.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[tuple[TextPart, ...] | None, BeforeValidator(_parts)] = None
    name: str | None = None
    tool_calls: Annotated[tuple[ToolCall, ...] | None, _TUPLE] = None
    tool_call_id: str | None = None
    parsed: Any = None

    type: Literal["text", "message"] | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[Annotated[tuple[Any, ...], Field(max_length=0)] | None, _TUPLE] = None

    @model_validator(mode="after")
    def _is_whole(self) -> "ChatMessage":
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content is missing: only an assistant's message with tool_calls needs none")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls belong to an assistant's message, not to one of role {self.role}")
        if self.tool_call_id is not None and self.role != "tool":
            raise ValueError(
                f"tool_call_id belongs to a message of role tool, not to one of role {self.role}"
            )
        return self

    @property
    def text(self) -> str | None:
        """The text of all parts; None: there is none, beside calls of tools."""
        return None if self.content is None else "".join(part.text for part in self.content)


class FunctionTool(_Body):
    """A function that the model may call. parameters: a JSON schema; None: no parameters.

    strict: no effect; arguments follow the schema where tool_choice is "required" or names the function.
    """

    name: Annotated[str, Field(pattern=_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionTool

    @property
    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates read it, whose parameters are always a schema."""
        function = self.function.model_dump(exclude_none=True, exclude={"strict"})
        empty = {"type": "object", "properties": {}}
        return {"type": "function", "function": {**function, "parameters": self.function.parameters or empty}}


class FunctionName(_Body):
    """The function of a choice."""

    name: str


class ToolChoice(_Body):
    """Which tool is called: by itself ("auto"), none, at least one, or the named function."""

    type: Literal["none", "auto", "required", "function"]
    function: FunctionName | None = None

    @model_validator(mode="before")
    @classmethod
    def _word(cls, value: Any) -> Any:
        return {"type": value} if isinstance(value, str) and value != "function" else value

    @model_validator(mode="after")
    def _named(self) -> "ToolChoice":
        if (self.type == "function") != (self.function is not None):
            raise ValueError('a function needs {"type": "function", "function": {"name": "..."}}')
        return self


class ChatRequest(_GenerationFields):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: Annotated[list[Tool], Field(max_length=_MOST_CHOICES)] = []
    tool_choice: ToolChoice = ToolChoice(type="auto")
    parallel_tool_calls: bool = True
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @field_validator("tool_choice")
    @classmethod
    def _known_tool(cls, value: ToolChoice, info: ValidationInfo) -> ToolChoice:
        names = [tool.function.name for tool in info.data.get("tools", ())]
        if value.function is not None and value.function.name not in names:
            raise ValueError(f"{value.function.name!r} is not one of tools")
        if value.type == "required" and not names:
            raise ValueError('"required" needs tools')
        return value

    @field_validator("max_completion_tokens")
    @classmethod
    def _one_limit(cls, value: int | None, info: ValidationInfo) -> int | None:
        if info.data.get("max_tokens") not in (None, value):
            raise ValueError("max_tokens has another value; send one of them")
        return value

    @field_validator("top_logprobs")
    @classmethod
    def _needs_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if not info.data.get("logprobs"):
            raise ValueError("it needs logprobs = true")
        return value


class BatchRequest(SamplingFields):
    """The body of /batch_generate: a list of prompts that all have the same settings. model: None: the base model."""

    model: str | None = None
    prompts: Annotated[list[str], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] = 16
