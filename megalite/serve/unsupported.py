"""Fields of OpenAI's interface that this server does not have; a neutral value of one asks for nothing."""

from collections.abc import Collection, Mapping
from typing import Any

from megalite.serve.errors import ApiError

# Field -> its values, beside null, that change nothing.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "dimensions": (),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}


def without_neutral(values: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return the fields of a request without unsupported ones that ask for nothing; ApiError for one that does.

    known: the fields that the request may have; null stands for the default of each.
    """
    kept = {}
    for name, value in values.items():
        if name in known:
            if value is not None:
                kept[name] = value
        elif name not in UNSUPPORTED:
            kept[name] = value
        elif value is not None and value not in UNSUPPORTED[name]:
            raise ApiError(
                400,
                f"{name}: this server does not support it; leave it out",
                param=name,
                code="unsupported_field",
            )
    return kept
