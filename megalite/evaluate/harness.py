"""A megalite model in place as a model of EleutherAI's lm_eval."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain, islice
from typing import Any

from megalite.errors import ConfigError, MegaliteError, Problem

try:
    from lm_eval.api.model import LM
except ImportError as missing:
    raise MegaliteError(
        f"lm_eval is not installed ({missing}); install it: pip install 'megalite[evaluate]'"
    ) from missing

import numpy as np

from megalite.evaluate.answers import TextPrompt, answers
from megalite.evaluate.calls import call_on_ranks
from megalite.evaluate.encoding import TextEncoder, pair_windows
from megalite.evaluate.scoring import scores
from megalite.evaluate.windows import Window, rolling_windows
from megalite.generation.loaded import LoadedModel
from megalite.generation.prompts import Chat
from megalite.generation.prompts import chat_template as named_template
from megalite.generation.request import Sampling
from megalite.generation.stops import NO_STOPS

_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_KNOWN = {*_LENGTHS, "until", "do_sample", "temperature", "top_k", "top_p"}


class MegaliteLM(LM):  # type: ignore[misc, unused-ignore]
    """A model for lm_eval, with the figures of `--model hf` on its export.

    Every rank of the model's mesh must make the same calls; with `leads` rank 0 alone does.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        batch_size: int = 8,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        seed: int = 0,
        leads: bool = False,
    ):
        """Take a model of `megalite.load`.

        batch_size: windows of a forward pass, and texts generated at a time. max_gen_toks: new tokens of a text whose
        task names no number. add_bos_token: whether the tokenizer's special tokens are added to texts; None: as the
        tokenizer does, like `hf`. seed: of sampled texts. leads: this is rank 0, and the others are in `calls.follow`.
        """
        super().__init__()
        self.loaded, self.seed = loaded, seed
        self.batch_size, self.max_gen_toks = batch_size, max_gen_toks
        self.max_length = loaded.config.longest_sequence
        self.encoder = TextEncoder(loaded.tokenizer, add_bos_token)
        self._leads = leads
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
        pairs = self._totals(
            pair_windows(*self.encoder.pair(context, continuation), self.max_length)
            for context, continuation in (request.args for request in requests)
        )
        for request, pair in zip(requests, pairs, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, pair)
        return pairs

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Return the log-likelihood of each text, in windows that do not overlap."""
        texts = (np.array(self.encoder.ids(request.args[0]), dtype=np.int64) for request in requests)
        length, start = self.max_length, self.encoder.start_id
        totals = self._totals(
            rolling_windows(ids, length=length, stride=length, prefix=start) for ids in texts
        )
        return [log_likelihood for log_likelihood, _ in totals]

    def _totals(self, windows: Iterable[Iterable[Window]]) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each text, cut into windows, and whether greedy decoding gives all of it."""
        cut = [[*of_text] for of_text in windows]
        scored = iter(self._call(scores, [*chain.from_iterable(cut)], self.batch_size))
        found = ([*islice(scored, len(of_text))] for of_text in cut)
        return [(sum(each.log_likelihood for each in of), all(each.is_greedy for each in of)) for of in found]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Return the generated text of each context, which ends before the first of its `until` strings."""
        numbers_of: defaultdict[int, list[int]] = defaultdict(list)
        prompts = []
        for number, request in enumerate(requests):
            context, settings = request.args
            tokens = next((int(settings[name]) for name in _LENGTHS if name in settings), self.max_gen_toks)
            numbers_of[tokens].append(number)
            prompts.append(TextPrompt(context, _stops(settings), self._sampling(settings, number)))
        texts = [""] * len(requests)
        # Asked in the chat template, an answer ends as in training; lm_eval asks for the template before.
        stops = self._chat.stops if "_chat" in vars(self) else NO_STOPS
        for tokens, numbers in numbers_of.items():
            group = [prompts[number] for number in numbers]
            answered = self._call(answers, group, tokens, self.encoder.adds_start, stops, self.batch_size)
            for number, text in zip(numbers, answered, strict=True):
                texts[number] = text
                self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return texts

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if self._leads:
            return call_on_ranks(self.loaded, function, *arguments)
        return function(self.loaded, *arguments)

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


def _stops(settings: Mapping[str, Any]) -> tuple[str, ...]:
    stops = settings.get("until") or ()
    return (stops,) if isinstance(stops, str) else tuple(stops)
