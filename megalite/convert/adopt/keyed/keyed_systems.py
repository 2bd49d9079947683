"""GPT-NeoX, axolotl, LLaMA-Factory and Hugging Face's Trainer: which of the four a YAML or JSON file belongs to."""

from collections.abc import Mapping

from megalite.convert.adopt.deepspeed_json import NAMES
from megalite.convert.adopt.keyed import axolotl, llama_factory, trainer
from megalite.convert.adopt.keyed.keyed_file import MAPPINGS, score
from megalite.convert.adopt.neox import system as neox
from megalite.convert.adopt.rules import KeyRule
from megalite.convert.adopt.sources import Source, System

_RULES: Mapping[str, Mapping[str, KeyRule]] = {
    neox.NAME: neox.RULES,
    trainer.NAME: trainer.RULES,
    llama_factory.NAME: llama_factory.RULES,
    axolotl.NAME: axolotl.RULES,
}


def recognised(source: Source) -> str | None:
    """Return the name of the system that knows most of a file's keys, the earlier one of two; None if none knows any.

    Raises ConfigError for a YAML or JSON file that is no mapping.
    """
    if source.suffix not in MAPPINGS:
        return None
    scores = {name: score(source, rules, hyphens=name == neox.NAME) for name, rules in _RULES.items()}
    if source.suffix == ".json" and scores[neox.NAME] == score(source, NAMES):
        scores[neox.NAME] = 0  # DeepSpeed's own JSON, beside another file
    best = max(scores, key=lambda name: scores[name])
    return best if scores[best] else None


NEOX = System(neox.NAME, lambda source: recognised(source) == neox.NAME, neox.read)
TRAINER = System(trainer.NAME, lambda source: recognised(source) == trainer.NAME, trainer.read)
LLAMA_FACTORY = System(
    llama_factory.NAME, lambda source: recognised(source) == llama_factory.NAME, llama_factory.read
)
AXOLOTL = System(axolotl.NAME, lambda source: recognised(source) == axolotl.NAME, axolotl.read)
