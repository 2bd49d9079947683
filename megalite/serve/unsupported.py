"""Fields of OpenAI's interface without effect here, and those that this server does not have."""

from collections.abc import Collection, Mapping
from typing import Any

from megalite.serve.errors import UNSUPPORTED_CODE, ApiError

NO_EFFECT: Mapping[str, type] = {
    "metadata": dict,
    "prediction": dict,
    "prompt_cache_key": str,
    "prompt_cache_retention": str,
    "safety_identifier": str,
    "service_tier": str,
    "store": bool,
}
"""Fields that change the cost, the speed or the records of OpenAI's service, never the answer: with their types."""

# Field -> its values, beside null, that change nothing.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "dimensions": (),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
_INSTEAD = {
    "functions": "send tools instead",
    "function_call": "send tool_choice instead",
    "use_beam_search": "search with transformers' model.generate(num_beams=N) on the export",
}


def without_neutral(values: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return the fields of a request without those that ask for nothing; ApiError for an unsupported one that does.

    known: the fields that the request may have; null stands for the default of each.
    """
    kept = {}
    for name, value in values.items():
        if name in known:
            if value is not None:
                kept[name] = value
        elif name in NO_EFFECT:
            if value is not None and not isinstance(value, NO_EFFECT[name]):
                message = f"{name}: the value is not of the type {NO_EFFECT[name].__name__}; leave it out"
                raise ApiError(400, message, param=name, code="invalid_value")
        elif name not in _UNSUPPORTED:
            kept[name] = value
        elif value is not None and value not in _UNSUPPORTED[name]:
            raise ApiError(
                400,
                f"{name}: this server does not support it; {_INSTEAD.get(name, 'leave it out')}",
                param=name,
                code=UNSUPPORTED_CODE,
            )
    return kept
