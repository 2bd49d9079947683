"""A table of all settings: how a changed value acts on a run that goes on from a checkpoint."""

import re
from dataclasses import dataclass
from enum import Enum

from megalite.config.sections.shape_settings import shape_settings


class Rule(Enum):
    """The reaction to a setting that differs from the checkpoint's."""

    FREE = "nothing: it changes no number of the training but by rounding"
    NOTED = "a note, and the run is still the same one"
    SAID = "a note, and with the default run.folder an error: it is another run"
    CONTENT = "nothing by itself: the tokens that it makes are compared, by train.checkpoints.resume_check"
    PLACES = "compared by train.checkpoints.resume_check with the steps done: the places of later samples depend on it"
    REFUSED = "an error, unless checkpoint.resume_changed: the position in the data has no meaning any more"
    LOADED = "a note where the tensors of the checkpoint fit; else checkpoint.load refuses it"


@dataclass(frozen=True)
class Effect:
    """The rule of a setting, and what its change does to the run, for the note or the error."""

    rule: Rule
    text: str = ""


_NEXT_STEP = "counts from the next step on"
_OTHER_SAMPLES = "samples would be repeated or left out"
_OTHER_WEIGHTS = "from the next step on sets are sampled with these weights, each behind its last sample"
_NOT_LOADED = "no effect on the weights that are trained: these are the checkpoint's"
# The settings of a section after its name; `model` has those of the shape too.
_TABLE: tuple[tuple[Rule, str, str], ...] = (
    (Rule.FREE, "", "run: folder"),
    (Rule.FREE, "", "model: preset hf_config kernels chunked_loss"),
    (Rule.FREE, "", "parallel: tensor sequence context context_method pipeline data"),
    (Rule.FREE, "", "parallel: expert expert_tensor"),
    (Rule.FREE, "", "parallel: schedule virtual_stages layers_per_stage"),
    (Rule.FREE, "", "training: stop_after micro_batch_size micro_batches recompute recompute_layers"),
    (Rule.FREE, "", "training: recompute_ratio sequence_chunk offload_activations compile"),
    (Rule.FREE, "", "training: threads memory_limit empty_cache_every callbacks"),
    (Rule.FREE, "", "deepspeed: config native_optimizer"),
    (Rule.FREE, "", "data: workers loader_workers prefetch"),
    (Rule.FREE, "", "validation: every at_start patience minimum_improvement"),
    (Rule.FREE, "", "checkpoint: every async_save in_memory_every best keep_last keep_every resume export"),
    (Rule.FREE, "", "checkpoint: resume_changed export_like"),
    (Rule.FREE, "", "monitor: every console report_to project run_name entity group log_checkpoints"),
    (
        Rule.FREE,
        "",
        "monitor: tensorboard_folder csv_folder peak_tflops profile_steps profile_ranks trace_steps",
    ),
    (Rule.FREE, "", "monitor: layers_every"),
    (Rule.FREE, "", "monitor: self_check_every on_hang hang_seconds"),
    (Rule.FREE, "", "launch: rendezvous_seconds heartbeat_seconds collective_seconds bind_cores interface"),
    (Rule.FREE, "", "launch: grace_seconds restarts"),
    (
        Rule.NOTED,
        "the last step is another, and the learning rate decays up to it unless optimizer.decay_steps is set",
        "training: steps epochs",
    ),
    (
        Rule.NOTED,
        "from the next step on numbers are rounded to this type; the weights are read from the checkpoint's "
        "float32 masters where it has them",
        "training: precision accumulation tf32",
    ),
    (Rule.NOTED, "validation losses are of other samples than before", "validation: samples"),
    (Rule.NOTED, _NOT_LOADED, "model: weights initializer_range"),
    (Rule.NOTED, _NOT_LOADED, "adapter: path"),
    (
        Rule.SAID,
        "the order of the remaining samples and all random draws change; samples already seen may come again",
        "run: seed",
    ),
    (
        Rule.SAID,
        "the order of the remaining samples changes; samples already seen may come again",
        "data: shuffle",
    ),
    (
        Rule.SAID,
        "the tokens of the remaining samples attend to others than before; no sample comes again",
        "data: document_mask",
    ),
    (
        Rule.SAID,
        "the remaining steps have this size, and training.epochs as many steps as it takes; no sample comes again",
        "training: global_batch_size",
    ),
    (Rule.SAID, _NEXT_STEP, "model: embedding_dropout residual_dropout mlp_dropout attention_dropout"),
    (Rule.SAID, _NEXT_STEP, "model: max_position_embeddings"),
    (Rule.SAID, _NEXT_STEP, "adapter: dropout"),
    (Rule.SAID, _NEXT_STEP, "training: loss_scale initial_loss_scale_power loss_scale_window"),
    (Rule.SAID, _NEXT_STEP, "training: loss_scale_hysteresis minimum_loss_scale nonfinite nonfinite_limit"),
    (Rule.SAID, _NEXT_STEP, "training: loss_spike spike_window spike_deviations rollback_limit"),
    (Rule.SAID, _NEXT_STEP, "training: label_smoothing z_loss router_balance router_z router_bias_rate"),
    (Rule.SAID, _NEXT_STEP, "optimizer: learning_rate betas eps weight_decay gradient_clipping clip_value"),
    (Rule.SAID, _NEXT_STEP, "optimizer: schedule warmup_steps minimum_ratio decay_steps decay_fraction"),
    (Rule.SAID, _NEXT_STEP, "optimizer: decay_shape ema_decay groups warmup_ratio"),
    (Rule.SAID, _NEXT_STEP, "deepspeed: scheduler"),
    (Rule.SAID, _NEXT_STEP, "preference: loss beta label_smoothing"),
    (Rule.LOADED, _NEXT_STEP, "optimizer: name momentum"),
    (Rule.LOADED, _NEXT_STEP, "adapter: kind rank alpha targets modules_to_save bias rslora dora tokens"),
    (Rule.LOADED, _NEXT_STEP, "adapter: projection"),
    (Rule.CONTENT, "", "tokenizer: path vocab_size kind end_of_document add_tokens chat_template"),
    (
        Rule.CONTENT,
        "",
        "data: source blend validation split text_column pattern min_length train_on too_long",
    ),
    (Rule.PLACES, _OTHER_WEIGHTS, "data: curriculum"),
    (Rule.REFUSED, f"the samples are other documents, so {_OTHER_SAMPLES}", "data: kind"),
    (Rule.REFUSED, f"the text is read in another order, so {_OTHER_SAMPLES}", "data: streaming"),
    (Rule.REFUSED, f"the samples have another order, so {_OTHER_SAMPLES}", "data: order"),
    (Rule.REFUSED, f"the samples are divided elsewhere, so {_OTHER_SAMPLES}", "data: packing length_buckets"),
    (
        Rule.REFUSED,
        f"the samples are divided elsewhere, so {_OTHER_SAMPLES}",
        "training: sequence_length",
    ),
)

EFFECTS: dict[str, Effect] = {f"model.{name}": Effect(Rule.LOADED, _NEXT_STEP) for name in shape_settings()}
"""Setting -> what its change does."""
for _rule, _text, _names in _TABLE:
    _section, _keys = _names.split(": ")
    EFFECTS |= {f"{_section}.{_key}": Effect(_rule, _text) for _key in _keys.split()}
EFFECTS["data.blend.weight"] = Effect(Rule.PLACES, _OTHER_WEIGHTS)
# The other keys of DeepSpeed's JSON say how it computes.
EFFECTS["deepspeed"] = Effect(Rule.FREE)


def effect_of(key: str) -> Effect:
    """Return what a change of a setting does; key: as `flat` names it, such as optimizer.groups[2].weight_decay."""
    name = re.sub(r"\[\d+\]", "", key)
    while name and name not in EFFECTS:
        name = name.rpartition(".")[0]
    return EFFECTS[name]
