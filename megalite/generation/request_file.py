"""Requests from a file of JSON lines, all checked before one of them runs. No torch."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from megalite.data.chat.chat_template import ChatTemplate
from megalite.data.tokenizers.tokenizer import Tokenizer
from megalite.errors import ConfigError, DataError, Problem
from megalite.generation.json_schema import JSON_OBJECT, JsonGrammars, schema_text
from megalite.generation.prompts import Chat, prompt_ids
from megalite.generation.request import Request, Sampling, check_request, sampling_problems
from megalite.generation.source import ModelSource
from megalite.generation.stops import Stops, stops_of

_NUMBER = (int, float)
# Field -> the types of its values. The others are those of Sampling.
_TYPES: dict[str, tuple[type, ...]] = {
    "prompt": (str,),
    "messages": (list,),
    "id": (str, int),
    "max_tokens": (int,),
    "stop": (str, list),
    "logprobs": (int,),
    "json_object": (bool,),
    "json_schema": (dict,),
    "adapter": (str,),
    **{each.name: (int,) if each.name in ("top_k", "seed") else _NUMBER for each in fields(Sampling)},
}
_NAMES = {
    str: "a string",
    list: "a list",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    dict: "an object",
}


@dataclass(frozen=True)
class FileRequest:
    """A request of a file. line: of the file, from 1. name: its field "id", if it has one."""

    line: int
    name: str | int | None
    request: Request


def read_requests(
    file: Path,
    defaults: Request,
    source: ModelSource,
    tokenizer: Tokenizer,
    template: ChatTemplate | None = None,
) -> list[FileRequest]:
    """Return the requests of a file: one JSON object a line, with `prompt` or `messages` and any other of _TYPES.

    defaults: the values of fields that an object lacks; its prompt is not used. template: of `messages`; None: the
    tokenizer's own.
    Raises ConfigError with every line that is wrong, its field and the rule; DataError if the file cannot be read.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read ({error}); name a file of JSON lines in UTF-8") from error
    problems: list[Problem] = []
    requests: list[FileRequest] = []
    reader = _Reader(defaults, source, tokenizer, template)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        wrong, row = list[Problem](), _object(line)
        if isinstance(row, str):
            wrong.append(Problem("the line", row, 'write {"prompt": "..."}'))
        else:
            try:
                wrong += reader.problems(row)
                if not wrong:
                    requests.append(FileRequest(number, row.get("id"), reader.request(row)))
            except ConfigError as error:
                wrong += [replace(each, key=_FIELDS.get(each.key, each.key)) for each in error.problems]
            except DataError as error:
                wrong.append(Problem("messages", str(error)))
        problems += [replace(each, key=f"{file}:{number}: {each.key}") for each in wrong]
    if not requests and not problems:
        problems.append(Problem(str(file), "has no request", 'write lines such as {"prompt": "The"}'))
    if problems:
        raise ConfigError(problems, "the file of requests")
    return requests


# Names of `check_request` and `sampling_problems` -> fields of a line.
_FIELDS = {"tokens": "max_tokens"}


class _Reader:
    def __init__(
        self, defaults: Request, source: ModelSource, tokenizer: Tokenizer, template: ChatTemplate | None
    ):
        self._defaults, self._source, self._tokenizer = defaults, source, tokenizer
        self._template = template
        self._chat: Chat | None = None
        self._stops: Stops | None = None
        self._grammars = JsonGrammars(tokenizer)

    def problems(self, row: Mapping[str, Any]) -> Iterator[Problem]:
        """Yield the problems of the fields of a line."""
        types_are_right = True
        for field, value in row.items():
            if field not in _TYPES:
                close = get_close_matches(field, _TYPES, n=1)
                remedy = f"did you mean {close[0]}?" if close else f"use some of {', '.join(_TYPES)}"
                yield Problem(field, "is no field of a request", remedy)
            elif not _has_type(value, _TYPES[field]):
                types_are_right = False
                types = " or ".join(_NAMES[each] for each in _TYPES[field])
                yield Problem(field, f"{json.dumps(value)[:60]} is not {types}", "change it")
        if ("prompt" in row) == ("messages" in row):
            yield Problem("prompt", "has to be given, or messages, and not both", "leave one of them")
        if row.get("json_object") is True and "json_schema" in row:
            yield Problem(
                "json_schema", "says more than json_object, which is given too", "leave one of them"
            )
        if types_are_right:
            yield from self._setting_problems(row)

    def _setting_problems(self, row: Mapping[str, Any]) -> Iterator[Problem]:
        stop = [row["stop"]] if isinstance(row.get("stop"), str) else row.get("stop", ())
        if not all(isinstance(each, str) for each in stop):
            yield Problem("stop", "has values that are no strings", "write a string or a list of strings")
            return
        # A line that sets its temperature to 0 may leave top-k, top-p and min-p to the flags.
        own = {name: row.get(name) for name in ("top_k", "top_p", "min_p")}
        yield from sampling_problems(
            row.get("max_tokens", self._defaults.max_tokens),
            {**vars(self._sampling(row)), **own},
            lambda name: _FIELDS.get(name, name),
            stop=stop,
            logprobs=row.get("logprobs"),
        )

    def request(self, row: Mapping[str, Any]) -> Request:
        """Return the request of a line without problems. Raises ConfigError, DataError."""
        stops = stops_of(self._source, self._tokenizer) if self._stops is None else self._stops
        self._stops, chat = stops, Stops()
        if "prompt" in row:
            ids = prompt_ids(self._tokenizer, row["prompt"])
        else:
            self._chat = self._chat or Chat(self._tokenizer, self._source.tokenizer, self._template)
            ids = self._chat.prompt_ids(row["messages"], "the line")
            chat = self._chat.stops
        stop, schema = row.get("stop", self._defaults.stop), self._schema(row)
        # A string may cut the JSON of a schema.
        texts = () if schema is not None else dict.fromkeys((*stops.texts, *chat.texts))
        request = Request(
            tuple(ids),
            row.get("max_tokens", self._defaults.max_tokens),
            self._sampling(row),
            stops.ids | chat.ids,
            (*((stop,) if isinstance(stop, str) else stop), *texts),
            row.get("logprobs", self._defaults.logprobs),
            schema,
            adapter=row.get("adapter"),
        )
        source = self._source
        check_request(request, source.shape, source.shape.longest_sequence, source.adapters)
        return request

    def _schema(self, row: Mapping[str, Any]) -> str | None:
        """Return the checked schema of a line. Raises ConfigError."""
        if "json_schema" not in row and not row.get("json_object"):
            return None
        schema = schema_text(row["json_schema"]) if "json_schema" in row else JSON_OBJECT
        self._grammars.check(schema)
        return schema

    def _sampling(self, row: Mapping[str, Any]) -> Sampling:
        values = {each.name: row[each.name] for each in fields(Sampling) if each.name in row}
        return replace(self._defaults.sampling, **values)


def _object(line: str) -> Mapping[str, Any] | str:
    """Return the JSON object of a line, or why it is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"is not JSON ({error})"
    return row if isinstance(row, dict) else "is not a JSON object"


def _has_type(value: Any, types: tuple[type, ...]) -> bool:
    return isinstance(value, types) and (bool in types or not isinstance(value, bool))
