"""Write the README.md of an export: how to use it, how it was trained, how it was checked."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from megalite.checkpoint.manifest import Manifest
from megalite.convert.parity import TOLERANCE, PartDifference
from megalite.topology.parameters import parameter_count
from megalite.version import __version__

_CHAT_INPUTS = """messages = [{"role": "user", "content": "Hello"}]
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
)"""
# Marks the folder as an export of megalite, which a later export may replace.
_MARK = "<!-- written by megalite convert export -->"


def model_card(
    manifest: Manifest, dtype: str, comparisons: Sequence[PartDifference], averaged: Sequence[int] = ()
) -> str:
    """Return the card as Markdown with Hugging Face's front matter; averaged: the steps of the averaged checkpoints."""
    shape, layout, state = manifest.model, manifest.layout, manifest.trainer_state
    facts = {
        "parameters": f"{parameter_count(shape):,}"
        + (" (tied embeddings)" if shape.tie_word_embeddings else ""),
        "layers x hidden x heads (key-value heads)": f"{shape.num_hidden_layers} x {shape.hidden_size} x"
        f" {shape.num_attention_heads} ({shape.num_key_value_heads})",
        "vocabulary": f"{shape.vocab_size:,}",
        "type of the weights": dtype,
        "steps": f"{state['step']:,}",
        **({"weights": f"the average of steps {', '.join(map(str, averaged))}"} if len(averaged) > 1 else {}),
        "sequences": f"{state['samples']:,}",
        "tokens": f"{state['tokens']:,}",
        "layout": layout.text,
        **_training_facts(manifest),
    }
    is_chat = (manifest.config.get("data") or {}).get("kind", "text") != "text"
    asked = _CHAT_INPUTS if is_chat else 'inputs = tokenizer("Once", return_tensors="pt")'
    checks = "\n".join(
        f"| {check.what} | {check.absolute:.1e} | {check.relative:.1e} |" for check in comparisons
    )
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
- megalite
---
{_MARK}
# A {shape.family} model trained with megalite

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER)
model = AutoModelForCausalLM.from_pretrained(FOLDER)
{asked}
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0]))
```

## Training

| | |
|---|---|
{_rows(facts)}

## Check

Largest differences between transformers' modules with these files and the forward that trained the model
(an export with more than {TOLERANCE:g} relative is refused):

| | absolute | relative |
|---|---|---|
{checks}
"""


def adapter_card(manifest: Manifest, dtype: str, trained: int) -> str:
    """Return the card of an adapter as Markdown; trained: the number of its values."""
    shape, state, base = manifest.model, manifest.trainer_state, manifest.base
    of_all = parameter_count(shape)
    facts = {
        "trained parameters": f"{trained:,} of {of_all:,} ({trained / of_all:.2%})",
        "type of the weights": dtype,
        "steps": f"{state['step']:,}",
        "tokens": f"{state['tokens']:,}",
        **_training_facts(manifest),
    }
    weights = "BASE" if base is None else base.weights
    return f"""---
library_name: peft
base_model: {weights}
tags:
- megalite
---
{_MARK}
# An adapter of {weights} trained with megalite

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{weights}"), FOLDER)
```

| | |
|---|---|
{_rows(facts)}
"""


def quantised_card(card: str) -> str:
    """Return the card of a plain export with what int8 changes."""
    return f"""{card}
## int8

The projections of attention, MLPs and experts were then rounded to int8, one scale for each output channel, in the
form of compressed-tensors (`pip install compressed-tensors` for transformers). The check above is that of the weights
before.
"""


def is_our_card(path: Path) -> bool:
    """Whether the file was written by `model_card`."""
    return path.is_file() and _MARK in path.read_text(encoding="utf-8", errors="replace")


def _rows(facts: Mapping[str, str]) -> str:
    return "\n".join(f"| {name} | {value} |" for name, value in facts.items())


def _training_facts(manifest: Manifest) -> dict[str, str]:
    """Return the training settings to list, as far as the run's configuration has them, and the software."""
    facts = {}
    for section, name in (
        ("training", "sequence_length"),
        ("training", "global_batch_size"),
        ("training", "precision"),
        ("optimizer", "name"),
        ("optimizer", "learning_rate"),
        ("data", "source"),
        ("run", "seed"),
    ):
        value = (manifest.config.get(section) or {}).get(name)
        if value is not None:
            facts[f"`{section}.{name}`"] = str(value)
    return {
        **facts,
        "software": f"megalite {manifest.megalite}, torch {manifest.torch}; exported by {__version__}",
    }
