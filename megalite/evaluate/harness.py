"""EleutherAI's lm_eval on a megalite checkpoint in place: the model "megalite" of its registry.

python -m megalite.evaluate.harness run --model megalite --model_args path=runs/first --tasks hellaswag
"""

import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, cast

from megalite.errors import ConfigError, MegaliteError, Problem

try:
    # Their own models register lazily, and only in an empty registry: so before ours.
    import lm_eval.models  # noqa: F401
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ImportError as missing:
    raise MegaliteError(f"lm_eval is not installed ({missing}); install it: pip install lm_eval") from missing

import numpy as np
import torch

from megalite.evaluate.answers import Wanted, answers
from megalite.evaluate.encoding import TextEncoder, pair_window
from megalite.evaluate.scoring import scores
from megalite.evaluate.windows import Window, rolling_windows
from megalite.generation.loaded import LoadedModel, load
from megalite.generation.prompts import Chat
from megalite.generation.prompts import chat_template as named_template
from megalite.generation.request import Sampling
from megalite.generation.stops import NO_STOPS

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_AS_HF = "as hf"
_KNOWN = {*_LENGTHS, "until", "do_sample", "temperature", "top_k", "top_p"}


@register_model("megalite")
class MegaliteLM(LM):  # type: ignore[misc, unused-ignore]
    """A model for lm_eval, with the figures of `--model hf` on its export.

    Every rank of the model's mesh must make the same calls.
    """

    def __init__(
        self,
        path: str | None = None,
        *,
        loaded: LoadedModel | None = None,
        dtype: str = "float32",
        device: str | None = None,
        batch_size: int | str = 8,
        max_batch_size: int | None = None,
        max_length: int | str | None = None,
        max_gen_toks: int | str = 256,
        add_bos_token: bool | str | None = _AS_HF,
        tokenizer: str | None = None,
        base: str | None = None,
        seed: int | str = 0,
    ):
        """Load the model of `path` (as `megalite.load`), or take a loaded one.

        device: "cpu"; otherwise the accelerator, if there is one.
        batch_size: windows of a forward pass, and texts generated at a time. max_batch_size: ignored.
        max_length: tokens read at once; None: the model's longest sequence. add_bos_token: whether the tokenizer's
        special tokens are added to texts; None: as the tokenizer does. By default as `hf` of this lm_eval does:
        up to 0.4.9 it adds none, later versions leave it to the tokenizer.
        Raises CheckpointError, DataError, and ConfigError for a value that is not usable.
        """
        super().__init__()
        if loaded is None:
            if path is None or dtype not in _DTYPES:
                problem = Problem(
                    "model_args", f"path={path}, dtype={dtype}", f"use path=RUN and dtype={'|'.join(_DTYPES)}"
                )
                raise ConfigError([problem], "the model of lm_eval")
            # lm_eval gives "cuda:0" on machines without a GPU too.
            device = "cpu" if device == "cpu" else None
            loaded = load(path, device=device, dtype=_DTYPES[dtype], tokenizer=tokenizer, base=base)
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            problem = Problem(
                "batch_size", f"{batch_size} is no number of sequences", "use 1 or more, such as 8"
            )
            raise ConfigError([problem], "the model of lm_eval")
        self.loaded, self.seed = loaded, int(seed)
        self.batch_size, self.max_gen_toks = int(batch_size), int(max_gen_toks)
        self.max_length = min(
            int(max_length or loaded.config.longest_sequence), loaded.config.longest_sequence
        )
        self.encoder = TextEncoder(loaded.tokenizer, _adds_start(add_bos_token, loaded.config.family))
        self._device = loaded.replica.mesh.device

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return the text of a conversation in the model's chat template; without the beginning of an answer, the
        last message is one that goes on."""
        text = self._chat.prompt_text(list(chat_history), prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].strip()
        return text[: text.rindex(last) + len(last)]

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the template's text, for lm_eval's record, and use it from now on; "" if none is asked for."""
        if not chat_template:
            return ""
        if isinstance(chat_template, str):
            self._chat = self._chat_of(chat_template)
        return self._chat.template.text

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer and its content, by which lm_eval keeps requests that it has built."""
        return f"{self.loaded.tokenizer.file.parent.name}__{self.loaded.tokenizer.sha256[:16]}"

    @cached_property
    def _chat(self) -> Chat:
        return self._chat_of(None)

    def _chat_of(self, name: str | None) -> Chat:
        source = self.loaded.source
        return Chat(self.loaded.tokenizer, source.tokenizer, named_template(source, name))

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether greedy decoding gives it."""
        windows = [
            pair_window(*self.encoder.pair(context, continuation), self.max_length)
            for context, continuation in (each.args for each in requests)
        ]
        found = scores(self.loaded.replica, windows, self.batch_size)
        answered = [(each.log_likelihood, each.is_greedy) for each in found]
        for request, answer in zip(requests, answered, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, answer)
        return answered

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Return the log-likelihood of each text, in windows that do not overlap."""
        windows: list[Window] = []
        counts = []
        for request in requests:
            ids = np.array(self.encoder.ids(request.args[0]), dtype=np.int64)
            cut = rolling_windows(
                ids, length=self.max_length, stride=self.max_length, prefix=self.encoder.start_id
            )
            before = len(windows)
            windows += cut
            counts.append(len(windows) - before)
        found = iter(scores(self.loaded.replica, windows, self.batch_size))
        return [sum(next(found).log_likelihood for _ in range(count)) for count in counts]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Return the generated text of each context, which ends before the first of its `until` strings."""
        by_tokens: defaultdict[int, list[tuple[int, Wanted]]] = defaultdict(list)
        for number, request in enumerate(requests):
            context, settings = request.args
            tokens = next((int(settings[name]) for name in _LENGTHS if name in settings), self.max_gen_toks)
            wanted = Wanted(context, _stops(settings), self._sampling(settings, number), continues=False)
            by_tokens[tokens].append((number, wanted))
        texts = [""] * len(requests)
        # Asked in the chat template, an answer ends as in training; lm_eval asks for the template before.
        stops = self._chat.stops if "_chat" in vars(self) else NO_STOPS
        for tokens, group in by_tokens.items():
            found = answers(
                self.loaded,
                [wanted for _, wanted in group],
                tokens,
                self.encoder,
                stops=stops,
                batch_size=self.batch_size,
            )
            for (number, _), text in zip(group, found, strict=True):
                texts[number] = text
                self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return texts

    def _sampling(self, settings: Mapping[str, Any], number: int) -> Sampling:
        if unknown := sorted(settings.keys() - _KNOWN):
            problem = Problem(
                "generation_kwargs", f"{', '.join(unknown)} is not supported", f"use {sorted(_KNOWN)}"
            )
            raise ConfigError([problem], "the model of lm_eval")
        temperature = float(settings.get("temperature") or 0.0)
        if settings.get("do_sample") is False:
            temperature = 0.0
        return Sampling(
            temperature,
            int(settings.get("top_k") or 0),
            float(settings.get("top_p") or 1.0),
            self.seed * 1_000_003 + number,
        )


def _adds_start(add_bos_token: bool | str | None, family: str) -> bool | None:
    """Return the value of add_bos_token; ConfigError for what is none."""
    if add_bos_token != _AS_HF:
        if add_bos_token not in (True, False, None, "None"):
            problem = Problem("add_bos_token", f"{add_bos_token} is neither true nor false", "leave it out")
            raise ConfigError([problem], "the model of lm_eval")
        return add_bos_token if isinstance(add_bos_token, bool) else None
    from lm_eval.models.huggingface import HFLM

    default = cast(bool | None, inspect.signature(HFLM.__init__).parameters["add_bos_token"].default)
    # Where it adds none, it makes an exception for Gemma.
    return True if default is False and family.startswith("gemma") else default


def _stops(settings: Mapping[str, Any]) -> tuple[str, ...]:
    stops = settings.get("until") or ()
    return (stops,) if isinstance(stops, str) else tuple(stops)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
