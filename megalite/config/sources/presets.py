"""Model shapes by name: five of our own, and those that the files in families/ hold."""

from difflib import get_close_matches
from typing import Any

from megalite.config.sections.schema import ModelConfig
from megalite.config.sections.toml import shown
from megalite.config.sections.unchecked import SettingsDraft
from megalite.families.family import sizes
from megalite.families.registry import FAMILIES

# With a vocabulary of 16k they have about 3, 17, 98, 300 and 704 million parameters. With GPT-2's of 50k the last three
# are the Small, Medium and Large of GPT-3 (Brown et al. 2020, table 2.1) as Llamas: 124, 335 and 757 million.
_OURS = {
    "tiny": sizes(128, 352, 4, 4, 2, 2048, tie_word_embeddings=True),
    "small": sizes(384, 1024, 6, 6, 6, 2048, tie_word_embeddings=True),
    "medium": sizes(768, 2048, 12, 12, 12, 4096, tie_word_embeddings=True),
    "large": sizes(1024, 2816, 24, 16, 8, 4096, tie_word_embeddings=True),
    "xlarge": sizes(1536, 4096, 24, 16, 16, 4096, tie_word_embeddings=True),
}
_REQUIRED = [name for name, info in ModelConfig.model_fields.items() if info.is_required()]
PRESETS: dict[str, dict[str, Any]] = {
    name: {"family": family, **settings}
    for family, presets in (("llama", _OURS), *((each, FAMILIES[each].presets) for each in FAMILIES))
    for name, settings in presets.items()
}


def apply_preset(draft: SettingsDraft) -> None:
    """Put the shape of model.preset behind the keys that [model] has; the name itself goes, as it has done its work."""
    name = draft.take_out("model", "preset")
    if name is None:
        return
    if name not in (PRESETS if isinstance(name, str) else ()):
        close = get_close_matches(str(name), PRESETS, n=1)
        remedy = f"did you mean {close[0]}?" if close else "megalite config presets lists all"
        draft.problem("model.preset", f"there is no preset {shown(name)}", remedy)
        draft.incomplete.add("model")
        return
    if draft.has("model", "hf_config"):
        draft.problem("model.preset", "is set together with model.hf_config", "set only one of them")
    draft.set_behind("model", PRESETS[name], f"preset {name}", named_by="model.preset")


def require_shape(draft: SettingsDraft) -> None:
    """One problem instead of one a key where [model] has nothing of a shape."""
    if isinstance(draft.values.get("model", {}), dict) and not any(
        draft.has("model", key) for key in _REQUIRED
    ):
        if "model" not in draft.incomplete:
            remedy = (
                'set model.preset, for example "tiny" (megalite config presets lists all), model.hf_config, '
                "or model.hidden_size and the other sizes"
            )
            draft.problem("model", "has no shape", remedy)
        draft.incomplete.add("model")
