"""A model's run folder, its export and texts to evaluate on, and transformers' figures for them."""

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from megalite.cli import convert
from tests.support.tiny import tiny_corpus, tiny_shape, tiny_tokenizer
from tests.unit.convert.exporting import lively_stage, save_stage

START = "<|endoftext|>"


@dataclass(frozen=True)
class Evaluated:
    """A run folder with one checkpoint, its export, and a .jsonl of documents shorter and longer than the model."""

    run: Path
    export: Path
    texts: Path

    def documents(self) -> list[str]:
        return [json.loads(line)["text"] for line in self.texts.read_text().splitlines()]


def write_evaluated(folder: Path) -> Evaluated:
    """Write a small random model with attention far from uniform, and seven documents."""
    run = folder / "run"
    (run / "tokenizer").mkdir(parents=True)
    tiny_tokenizer(run / "tokenizer")
    shape = replace(tiny_shape(layers=2), vocab_size=384)
    save_stage(run, shape, lively_stage(shape, scale=8.0))
    assert convert.run(["export", str(run), str(folder / "export")]) == 0
    corpus = tiny_corpus(12)
    documents = [corpus[0], "".join(corpus[:9]), *corpus[1:5], corpus[5] * 2]
    texts = folder / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": each}) + "\n" for each in documents))
    return Evaluated(run, folder / "export", texts)


@torch.no_grad()
def transformers_loss(export: Path, documents: list[str], *, window: int, stride: int) -> tuple[float, int]:
    """Return (negative log-likelihood, tokens) by transformers' logits, one window at a time.

    As in transformers' guide to perplexity: labels that an earlier window has scored are -100. The last window reads
    as many tokens as the others.
    """
    model, tokenizer = loaded(export)
    total, tokens = 0.0, 0
    for text in documents:
        ids = torch.tensor(tokenizer(START + text, add_special_tokens=False)["input_ids"])
        scored = 1
        while scored < len(ids):
            end = min(len(ids), scored + (stride if scored > 1 else window))
            begin = max(0, end - window - 1)
            part = ids[begin:end].unsqueeze(0)
            labels = part.clone()
            labels[:, : scored - begin] = -100
            # Not the model's own mean of losses, which is float32 for a float64 model too.
            logits = model(input_ids=part[:, :-1]).logits.flatten(0, 1)
            total += cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum").item()
            tokens += end - scored
            scored = end
    return total, tokens


@cache
def loaded(export: Path) -> tuple[Any, Any]:
    """Return transformers' float64 model and tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float64).eval()
    return model, AutoTokenizer.from_pretrained(export)


@torch.no_grad()
def transformers_choices(export: Path, context: str, choices: list[str]) -> list[float]:
    """Return the log-likelihood of each choice behind the context, by a plain loop over transformers' logits."""
    model, tokenizer = loaded(export)
    first = len(tokenizer(context)["input_ids"])
    found = []
    for choice in choices:
        ids = torch.tensor([tokenizer(f"{context} {choice}")["input_ids"]])
        log_probs = model(input_ids=ids[:, :-1]).logits[0].log_softmax(-1)
        found.append(sum(log_probs[at - 1, ids[0, at]].item() for at in range(first, ids.shape[1])))
    return found


def transformers_answer(export: Path, prompt: str, tokens: int) -> str:
    """Return transformers' greedy continuation of a prompt."""
    model, tokenizer = loaded(export)
    encoded = tokenizer(prompt, return_tensors="pt")
    ids = model.generate(**encoded, max_new_tokens=tokens, do_sample=False)[0]
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text[len(prompt) :]
