"""A model, tokens, text and a tokenizer, as small as possible while every mistake still shows."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalite.families.fields import EXPERT_SETTINGS, LATENT_SETTINGS
from megalite.families.registry import FAMILIES
from megalite.topology.experts import ExpertShape, LatentAttention, MixtureShape
from megalite.topology.shape import ModelShape, RopeScaling

if TYPE_CHECKING:
    from megalite.parallel.step_batch import StepBatch

SEQUENCE_LENGTH = 12
END_OF_DOCUMENT = "<|endoftext|>"


def tiny_shape(*, tied: bool = False, layers: int = 4) -> ModelShape:
    """Return a shape whose sizes hide no mistake: a prime vocabulary, grouped key-value heads, all sizes different.

    Fits tensor parallelism up to 4.
    """
    return ModelShape(
        vocab_size=101,
        hidden_size=48,
        intermediate_size=76,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=6,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )


def _of(family: str, **changes: Any) -> ModelShape:
    return replace(tiny_shape(), family=family, **FAMILIES[family].defaults | changes)


# Every family, and every choice within one that its files can say.
FAMILY_SHAPES = {
    "llama with biases": _of("llama", attention_bias=True, attention_output_bias=True, mlp_bias=True),
    "llama 3": _of("llama", rope_theta=500.0, rope_scaling=RopeScaling("llama3", 4.0, 1.0, 4.0, 16)),
    "llama, linear scaling": _of("llama", tie_word_embeddings=True, rope_scaling=RopeScaling("linear", 2.5)),
    "mistral": _of("mistral", sliding_window=5),
    "mistral without window": _of("mistral"),
    "ministral": _of("ministral", sliding_window=5, full_attention_layers=1, full_attention_every=3),
    "qwen2": _of("qwen2", sliding_window=4, full_attention_layers=2),
    "qwen2 tied": _of("qwen2", tie_word_embeddings=True),
    "qwen3": _of("qwen3", tie_word_embeddings=True),
    "qwen3 with biases": _of("qwen3", attention_bias=True, attention_output_bias=True),
    "phi3": _of("phi3", rope_theta=500.0, sliding_window=5),
    "phi3, a part of each head": _of("phi3", tie_word_embeddings=True, partial_rotary_factor=0.7),
    # With a small epsilon, norms of outputs near zero amplify float32's rounding, transformers' as much as ours.
    "olmo2": _of("olmo2", rms_norm_eps=0.01),
    "olmo2 with biases": _of("olmo2", rms_norm_eps=0.1, attention_bias=True, attention_output_bias=True),
    "granite": _of(
        "granite",
        tie_word_embeddings=True,
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        embedding_multiplier=3.0,
        residual_multiplier=0.6,
        logits_scaling=0.5,
        attention_multiplier=0.3,
    ),
    "smollm3": _of("smollm3", tie_word_embeddings=True, no_rope_every=2),
    "smollm3 with windows": _of(
        "smollm3", mlp_bias=True, sliding_window=5, full_attention_every=4, no_rope_every=3
    ),
    "gpt2": _of("gpt2", num_key_value_heads=8, tie_word_embeddings=True),
    "gpt2 untied": _of("gpt2", num_key_value_heads=8),
    "gpt_neox": _of("gpt_neox", num_key_value_heads=8, partial_rotary_factor=0.4, rope_theta=500.0),
    "gpt_neox, blocks in turn": _of(
        "gpt_neox",
        num_key_value_heads=8,
        norm_placement="pre",
        partial_rotary_factor=0.7,
        tie_word_embeddings=True,
        hidden_act="gelu_pytorch_tanh",
        rope_scaling=RopeScaling("linear", 2.5),
    ),
    "phi": _of("phi", partial_rotary_factor=0.7, rope_theta=500.0),
    "starcoder2": _of("starcoder2", tie_word_embeddings=True, sliding_window=5, rope_theta=500.0),
    "starcoder2 without biases": _of(
        "starcoder2", attention_bias=False, attention_output_bias=False, mlp_bias=False
    ),
    "gemma": _of("gemma", tie_word_embeddings=True, attention_bias=True, attention_output_bias=True),
    "gemma2": _of(
        "gemma2",
        tie_word_embeddings=True,
        sliding_window=5,
        full_attention_every=2,
        query_pre_attn_scalar=13,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=0.75,
    ),
    "gemma3": _of(
        "gemma3_text",
        tie_word_embeddings=True,
        sliding_window=4,
        full_attention_every=3,
        query_pre_attn_scalar=10,
        rope_theta=1000.0,
        rope_scaling=RopeScaling("linear", 8.0),
        rope_local_base_freq=100.0,
    ),
}


def mixture_of(family: str, **changes: Any) -> ModelShape:
    """Return a mixture of five experts; changes: fields of ModelShape, ExpertShape and LatentAttention."""
    experts = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
    settings = {**vars(tiny_shape()), "family": family, **FAMILIES[family].defaults, **experts, **changes}
    own = {name: settings.pop(setting) for name, setting in EXPERT_SETTINGS.items() if setting in settings}
    sizes = {name: settings.pop(name) for name in LATENT_SETTINGS if name in settings}
    latent = LatentAttention(**sizes) if sizes else None
    if latent is not None:
        settings |= {"num_key_value_heads": settings["num_attention_heads"], "head_dim": latent.qk_head_dim}
    return MixtureShape(**settings, experts=ExpertShape(**own), latent=latent)


def _yarn(mscale: float, mscale_all_dim: float) -> RopeScaling:
    length = {"original_max_position_embeddings": 16}
    return RopeScaling("yarn", 4.0, **length, mscale=mscale, mscale_all_dim=mscale_all_dim)


# Widths that differ, and keys wider than values.
_LATENT = {"kv_lora_rank": 14, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
_GROUPED = {"num_experts": 6, "shared_intermediate_size": 40, "first_k_dense_replace": 1}

# Every family of mixtures, and every choice within one that its files can say.
MIXTURE_SHAPES = {
    "mixtral": mixture_of("mixtral", intermediate_size=20, sliding_window=5),
    "mixtral without window": mixture_of("mixtral", intermediate_size=20, tie_word_embeddings=True),
    "granitemoe": mixture_of(
        "granitemoe",
        intermediate_size=20,
        tie_word_embeddings=True,
        attention_bias=True,
        attention_output_bias=True,
        embedding_multiplier=3.0,
        residual_multiplier=0.6,
        logits_scaling=0.5,
        attention_multiplier=0.3,
    ),
    "granitemoeshared": mixture_of(
        "granitemoeshared", intermediate_size=20, shared_intermediate_size=28, attention_multiplier=0.3
    ),
    "olmoe": mixture_of("olmoe", intermediate_size=20),
    "olmoe, weights that sum to 1, biases": mixture_of(
        "olmoe",
        intermediate_size=20,
        norm_topk_prob=True,
        attention_bias=True,
        attention_output_bias=True,
    ),
    "qwen3_moe": mixture_of("qwen3_moe", head_dim=8),
    "gpt_oss": mixture_of(
        "gpt_oss",
        head_dim=8,
        intermediate_size=20,
        sliding_window=5,
        full_attention_every=2,
        swiglu_limit=0.7,
        rope_theta=500.0,
        rope_scaling=RopeScaling("yarn", 4.0, original_max_position_embeddings=16, truncate=False),
    ),
    "gpt_oss without windows and biases of attention": mixture_of(
        "gpt_oss",
        intermediate_size=20,
        attention_bias=False,
        attention_output_bias=False,
        tie_word_embeddings=True,
    ),
    "qwen3_moe, dense layers, windows, biases": mixture_of(
        "qwen3_moe",
        mlp_only_layers=(3,),
        decoder_sparse_step=2,
        norm_topk_prob=False,
        sliding_window=5,
        tie_word_embeddings=True,
        attention_bias=True,
        attention_output_bias=True,
    ),
    "deepseek_v2": mixture_of(
        "deepseek_v2",
        **_LATENT | _GROUPED,
        q_lora_rank=9,
        **{"n_group": 3, "topk_group": 2, "routed_scaling_factor": 3.0},
        rope_scaling=_yarn(1.2, 0.7),
    ),
    "deepseek_v2, one query projection, biases": mixture_of(
        "deepseek_v2",
        **_LATENT,
        shared_intermediate_size=20,
        tie_word_embeddings=True,
        attention_bias=True,
        attention_output_bias=True,
    ),
    "deepseek_v3": mixture_of(
        "deepseek_v3",
        **_LATENT | _GROUPED,
        q_lora_rank=9,
        **{"n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5},
        rope_scaling=_yarn(1.0, 1.0),
    ),
    "deepseek_v3, one query projection, no groups": mixture_of(
        "deepseek_v3", **_LATENT, shared_intermediate_size=20, norm_topk_prob=False, rope_theta=500.0
    ),
}


def tiny_batch(
    shape: ModelShape, sequences: int, *, sequence_length: int = SEQUENCE_LENGTH, step: int = 0
) -> "StepBatch":
    """The sequences of one global batch, a pure function of the arguments.

    The loss mask counts one token of the first row and all of the last, as a float32 weight; every third row
    ends in two ignored labels.
    """
    import torch

    from megalite.parallel.step_batch import StepBatch

    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(shape.vocab_size, (sequences, sequence_length + 1), generator=generator)
    counted = torch.linspace(1, sequence_length, sequences).round().unsqueeze(1)
    order = torch.rand(sequences, sequence_length, generator=generator).argsort(dim=1)
    labels = ids[:, 1:].clone()
    labels[::3, -2:] = -100
    positions = torch.arange(sequence_length).repeat(sequences, 1)
    samples = torch.arange(sequences) + step * sequences
    return StepBatch(ids[:, :-1].contiguous(), positions, labels, (order < counted).float(), samples)


def padded(batch: "StepBatch") -> "StepBatch":
    """The same rows, of which two of three end in padding, as a loader gives them."""
    import torch

    rows, length = batch.input_ids.shape
    lengths = length - length // 3 * (torch.arange(rows) % 3)
    padding = torch.arange(length) >= lengths.unsqueeze(1)
    ids, labels = batch.input_ids.masked_fill(padding, 0), batch.labels.masked_fill(padding, -100)
    mask = batch.loss_mask.masked_fill(padding, 0)
    return replace(batch, input_ids=ids, labels=labels, loss_mask=mask, lengths=lengths)


def in_documents(batch: "StepBatch", *, end_of_document_id: int = 0) -> "StepBatch":
    """The same rows cut into documents of 1 to S tokens, four on average, as a loader gives them."""
    import torch

    from megalite.data.batches.documents import document_ids_and_positions

    ends = torch.rand(
        batch.input_ids.shape, generator=torch.Generator().manual_seed(int(batch.sample_indices[0]))
    )
    ids, labels = batch.input_ids.clone(), batch.labels.clone()
    ids[ends < 0.25] = end_of_document_id
    following = labels[:, :-1]
    following[following >= 0] = ids[:, 1:][following >= 0]
    documents, positions = document_ids_and_positions(ids.numpy(), labels.numpy(), end_of_document_id)
    return replace(
        batch,
        input_ids=ids,
        labels=labels,
        position_ids=torch.from_numpy(positions),
        document_ids=torch.from_numpy(documents),
    )


def tiny_corpus(documents: int = 40) -> list[str]:
    """Short texts of recurring words, which a model learns within twenty steps, and of bytes beyond ASCII."""
    subjects = ("the tensor", "a pipeline", "the gradient", "one rank", "das Maß", "每个阶段")
    verbs = ("waits for", "sends", "divides", "sums")
    objects = ("the weights", "a micro batch", "its peers", "nothing at all")

    def sentence(document: int, line: int) -> str:
        subject, verb = subjects[(document + line) % 6], verbs[(document * line) % 4]
        return f"{subject} {verb} {objects[(document + 3 * line) % 4]}."

    return [
        " ".join(sentence(document, line) for line in range(3 + document % 5)) + "\n"
        for document in range(documents)
    ]


def tiny_tokenizer(folder: Path, *, vocab_size: int = 384, special: Sequence[str] = ()) -> Path:
    """A byte-level BPE tokenizer of `tiny_corpus`; the path of its tokenizer.json, written into `folder`.

    special: further special tokens, within the vocabulary.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT, *special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(tiny_corpus(), trainer)
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path
