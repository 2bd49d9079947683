"""Settings that break a rule, the message, and the remedy: the rules of adapters, preferences and streams."""

from pathlib import Path

from tests.unit.config.rule_cases import Case
from tests.unit.config.runs import REMOVED

_LORA = {"adapter.kind": "lora", "model.weights": str(Path(__file__).parent / "small_llama")}

ADAPTER_CASES = [
    Case(
        "settings_belong_to_an_adapter",
        {"adapter.rank": 4},
        'adapter.rank: has no effect with adapter.kind = "none"; set adapter.kind = "lora", or delete the setting',
        _LORA,
    ),
    Case(
        "settings_belong_to_an_adapter",
        {**_LORA, "adapter.kind": "prefix", "adapter.dora": True},
        'adapter.dora: has no effect with adapter.kind = "prefix"; set adapter.kind = "lora", or delete the setting',
        {"adapter.kind": "lora"},
    ),
    Case(
        "sequences_fit_the_model",
        {**_LORA, "adapter.kind": "prefix", "adapter.tokens": 2040},
        "training.sequence_length: 16 is longer than model.max_position_embeddings - adapter.tokens = 8; "
        "use at most 8, or raise model.max_position_embeddings",
        {"training.sequence_length": 8},
    ),
    Case(
        "a_prefix_does_not_go_round",
        {**_LORA, "adapter.kind": "prefix", "parallel.context": 2, "parallel.context_method": "ring"},
        'parallel.context_method: "ring" has no place for the virtual tokens of an adapter, which every rank has; '
        'use "gather" or "ulysses"',
        {"parallel.context_method": "gather"},
    ),
    Case(
        "an_adapter_has_a_model",
        {"adapter.kind": "lora"},
        'adapter.kind: "lora" needs a pretrained model, whose weights stay as they are; set model.weights, '
        'or use "none"',
        _LORA,
    ),
    Case(
        "adapter_patterns_name_modules",
        {**_LORA, "adapter.targets": ["q_proj", "c_attn"]},
        'adapter.targets: "c_attn" names no linear of a layer; use '
        "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj",
        {"adapter.targets": ["q_proj", "*.2.mlp.up_proj"]},
    ),
    Case(
        "adapter_patterns_name_modules",
        {**_LORA, "adapter.modules_to_save": ["q_proj"]},
        'adapter.modules_to_save: "q_proj" names no module outside of the layers; use '
        "embed_tokens, norm, lm_head, or adapter.targets",
        {"adapter.modules_to_save": ["lm_head"]},
    ),
    Case(
        "adapter_patterns_name_modules",
        {**_LORA, "model.tie_word_embeddings": True, "adapter.modules_to_save": ["lm_head"]},
        'adapter.modules_to_save: "lm_head" is the embedding and the head at once (model.tie_word_embeddings); '
        "leave it out: PEFT would train two copies",
        {"adapter.modules_to_save": []},
    ),
    Case(
        "biases_are_trained_whole",
        {
            **_LORA,
            "model.attention_bias": True,
            "adapter.targets": ["q_proj"],
            "adapter.bias": "lora_only",
            "checkpoint.export": False,
        },
        'adapter.bias: "lora_only" with model.layers.0.self_attn.q_proj needs k_proj, v_proj too: their biases are '
        'one parameter; add them to adapter.targets, or use "none" or "all"',
        {"adapter.targets": ["q_proj", "k_proj", "v_proj"]},
    ),
    Case(
        "every_stage_trains_something",
        {**_LORA, "adapter.targets": ["*.0.self_attn.q_proj"], "parallel.pipeline": 2},
        "adapter.targets: adapts no linear of stage 1 of parallel.pipeline = 2; "
        "name linears in the layers of every stage",
        {"adapter.targets": ["*.self_attn.q_proj"]},
    ),
    Case(
        "added_tokens_have_trained_rows",
        {
            **_LORA,
            "tokenizer.path": "tokenizer.json",
            "tokenizer.vocab_size": REMOVED,
            "tokenizer.add_tokens": ["<a>"],
        },
        "tokenizer.add_tokens: are not supported with an adapter: their rows of the embedding would stay as they "
        'begin; use adapter.kind = "none", or leave them out',
        {"tokenizer.add_tokens": []},
    ),
    Case(
        "an_adapter_can_be_exported",
        {**_LORA, "model.family": "phi3"},
        "adapter.kind: PEFT's files cannot say it: phi3 holds an adapted linear in "
        "model.layers.0.self_attn.qkv_proj.weight, with others or transposed; set checkpoint.export = false; "
        "megalite convert export writes the model with its adapter merged",
        {"checkpoint.export": False},
    ),
]

_PAIRS = {"data.kind": "preference"}

PREFERENCE_CASES = [
    Case(
        "settings_of_conversations_need_some",
        {**_PAIRS, "data.packing": "greedy"},
        'data.packing: has no effect with data.kind = "preference"; delete it, or set data.kind = "instruct"',
        {"data.packing": REMOVED},
    ),
    Case(
        "conversations_have_no_settings_of_text",
        {**_PAIRS, "data.text_column": "prompt"},
        'data.text_column: has no effect with data.kind = "preference"; delete it, or set data.kind = "text"',
        {"data.text_column": REMOVED},
    ),
    Case(
        "settings_of_preferences_need_some",
        {"preference.beta": 0.2},
        'preference.beta: has no effect with data.kind = "text"; delete it, or set data.kind = "preference"',
        _PAIRS,
    ),
    Case(
        "micro_batches_hold_pairs",
        {**_PAIRS, "training.micro_batch_size": 1},
        "training.micro_batch_size: 1 is odd, but the chosen and the rejected answer of a pair are two rows of one "
        "micro batch; use 2",
        {"training.micro_batch_size": 2},
    ),
    Case(
        "micro_batches_hold_pairs",
        {**_PAIRS, "training.micro_batch_size": REMOVED, "training.micro_batches": 8},
        "training.global_batch_size: 8 gives micro batches of 1, but the chosen and the rejected answer of a pair are "
        "two rows of one micro batch; use 16",
        {"training.global_batch_size": 16},
    ),
    Case(
        "preferences_have_no_loss_of_tokens",
        {**_PAIRS, "training.z_loss": 0.001},
        "training.z_loss: 0.001 changes the loss of tokens, but preferences compare log-probabilities of answers; "
        "delete it",
        {"training.z_loss": REMOVED},
    ),
    Case(
        "preferences_have_no_loss_of_tokens",
        {**_PAIRS, "training.label_smoothing": 0.1},
        "training.label_smoothing: 0.1 changes the loss of tokens, but preferences compare log-probabilities of "
        "answers; delete it, or set preference.label_smoothing",
        {"training.label_smoothing": REMOVED, "preference.label_smoothing": 0.1},
    ),
    Case(
        "pairs_are_kept_whole",
        {**_PAIRS, "data.min_length": 3},
        "data.min_length: 3 would leave out one answer of a pair; delete it, or leave such pairs out of the data",
        {"data.min_length": REMOVED},
    ),
    Case(
        "label_smoothing_is_of_the_sigmoid",
        {**_PAIRS, "preference.loss": "ipo", "preference.label_smoothing": 0.1},
        'preference.label_smoothing: 0.1 has no effect with preference.loss = "ipo"; delete it, or set '
        'preference.loss = "sigmoid"',
        {"preference.loss": "sigmoid"},
    ),
    Case(
        "chunked_losses_of_pairs_have_a_frozen_head",
        {**_PAIRS, "model.chunked_loss": 4},
        "model.chunked_loss: 4 computes the head's gradient before the loss of the pair, which weighs it, is known; "
        'delete it, or set adapter.kind = "lora", which freezes the head',
        {"model.chunked_loss": REMOVED},
    ),
    Case(
        "chunked_losses_of_pairs_have_a_frozen_head",
        {**_PAIRS, "training.sequence_chunk": 4},
        "training.sequence_chunk: 4 computes the head's gradient before the loss of the pair, which weighs it, is "
        'known; delete it, or set adapter.kind = "lora", which freezes the head',
        {"training.sequence_chunk": REMOVED},
    ),
]

_STREAM = {"data.streaming": True, "tokenizer.path": "tokenizer.json", "tokenizer.vocab_size": REMOVED}

_MEGATRON = {"data.order": "megatron"}

MEGATRON_CASES = [
    Case(
        "megatron_orders_documents",
        {**_MEGATRON, "data.kind": "instruct"},
        'data.order: "megatron" is for documents, but data.kind is "instruct"; delete it, or set data.kind = "text"',
        {"data.kind": "text"},
    ),
    Case(
        "megatron_orders_documents",
        {**_MEGATRON, **_STREAM},
        'data.streaming: true reads the text in its own order, not in that of data.order = "megatron"; set it to '
        "false, or delete data.order",
        {"data.streaming": False},
    ),
    Case(
        "megatron_orders_always_shuffle",
        {**_MEGATRON, "data.shuffle": False},
        'data.shuffle: false has no effect with data.order = "megatron", which shuffles; delete it, or delete '
        "data.order",
        {"data.shuffle": REMOVED},
    ),
    Case(
        "megatron_blends_keep_their_weights",
        {
            **_MEGATRON,
            "data.source": REMOVED,
            "data.blend": [{"source": "a", "weight": 1.0}, {"source": "b", "weight": 3.0}],
            "data.curriculum": [{"step": 3, "weights": [0.5, 0.5]}],
        },
        'data.curriculum: changes the weights, which data.order = "megatron" does not know; delete it, or delete '
        "data.order",
        {"data.curriculum": REMOVED},
    ),
    Case(
        "megatron_orders_have_a_number_of_samples",
        {**_MEGATRON, "training.steps": REMOVED, "training.epochs": 2.0},
        'training.steps: is required with data.order = "megatron", which depends on steps x global batch size; set it '
        "to Megatron's --train-iters, and delete training.epochs",
        {"training.steps": 20, "training.epochs": REMOVED},
    ),
    Case(
        "megatron_seeds_have_32_bits",
        {**_MEGATRON, "run.seed": 2**32},
        'run.seed: 4294967296 is more than data.order = "megatron" takes, a number of 32 bits; use Megatron\'s --seed, '
        "at most 4294967295",
        {"run.seed": 2**32 - 1},
    ),
    Case(
        "megatron_validations_have_a_size",
        {**_MEGATRON, "data.split": [969, 30, 1], "validation.samples": 8},
        'validation.every: is required with data.order = "megatron", whose validation samples depend on their number; '
        "set it to Megatron's --eval-interval",
        {"validation.every": 5},
    ),
    Case(
        "megatron_validations_have_a_size",
        {**_MEGATRON, "data.split": [969, 30, 1], "validation.every": 5},
        'validation.samples: is required with data.order = "megatron", whose validation samples depend on their '
        "number; set it to Megatron's --eval-iters x --global-batch-size",
        {"validation.samples": 8},
    ),
    Case(
        "megatron_validations_have_a_size",
        {
            **_MEGATRON,
            "training.global_batch_size": 8,
            "data.validation": "held",
            "validation.every": 5,
            "validation.samples": 9,
        },
        'validation.samples: 9 is no number of whole batches of 8, which data.order = "megatron" needs; use 16, a '
        "multiple of the global batch size",
        {"validation.samples": 16},
    ),
    Case(
        "megatron_validations_have_a_size",
        {
            **_MEGATRON,
            "training.micro_batch_size": 2,
            "training.micro_batches": 4,
            "data.validation": "held",
            "validation.every": 5,
            "validation.samples": 9,
        },
        'validation.samples: 9 is no number of whole batches of 8, which data.order = "megatron" needs; use 16, a '
        "multiple of the global batch size",
        {"validation.samples": 16},
    ),
    Case(
        "intervals_are_steps_or_epochs",
        {**_MEGATRON, "checkpoint.every": "1 epoch"},
        'checkpoint.every: "1 epoch" has no meaning with data.order = "megatron"; write a number of steps',
        {"checkpoint.every": 5},
    ),
    Case(
        "megatron_splits_or_names_validation",
        {
            **_MEGATRON,
            "data.split": [1.0],
            "data.validation": "held",
            "training.global_batch_size": 8,
            "validation.every": 5,
            "validation.samples": 8,
        },
        'data.split: is set together with data.validation, and Megatron takes one of them (data.order = "megatron"); '
        "delete one of them",
        {"data.split": REMOVED},
    ),
]

STREAMING_CASES = [
    Case(
        "streams_are_one_set_of_documents",
        {**_STREAM, "data.kind": "instruct"},
        'data.streaming: is for documents, but data.kind is "instruct"; set it to false, or data.kind = "text"',
        {"data.streaming": False},
    ),
    Case(
        "streams_are_one_set_of_documents",
        {**_STREAM, "data.source": REMOVED, "data.blend": [{"source": "a.jsonl", "weight": 1.0}]},
        "data.blend: has several data sets, but data.streaming reads one; name all files as data.source, or set "
        "data.streaming = false",
        {"data.blend": REMOVED, "data.source": "a.jsonl"},
    ),
    Case(
        "intervals_are_steps_or_epochs",
        {**_STREAM, "checkpoint.every": "2 epochs"},
        'checkpoint.every: "2 epochs" has no meaning with data.streaming = true; write a number of steps',
        {"checkpoint.every": 5},
    ),
    Case(
        "streams_are_not_split",
        {**_STREAM, "data.split": [0.9, 0.1]},
        "data.split: needs a pass over all documents, which data.streaming does not make; delete it, and name other "
        "text as data.validation",
        {"data.split": REMOVED, "data.validation": "held-out.jsonl"},
    ),
    Case(
        "streams_have_a_tokenizer",
        {"data.streaming": True},
        "data.streaming: needs an existing tokenizer; train one on a part of the text (megalite tokenizer train), and "
        "set tokenizer.path",
        _STREAM,
    ),
    Case(
        "streams_have_a_last_step",
        {**_STREAM, "training.steps": REMOVED, "training.epochs": 2.0},
        "training.steps: is required with data.streaming, since the length of the text is not known; set it, and "
        "delete training.epochs",
        {"training.steps": 20, "training.epochs": REMOVED},
    ),
    Case(
        "one_thread_reads_a_stream",
        {**_STREAM, "data.loader_workers": 2},
        "data.loader_workers: 2 threads cannot read a stream in order; use 1",
        {"data.loader_workers": 1},
    ),
    Case(
        "batch_numbers_agree",
        {
            "training.micro_batch_size": "auto",
            "training.global_batch_size": REMOVED,
            "training.micro_batches": 2,
        },
        'training.global_batch_size: training.micro_batch_size = "auto" depends on the memory, on which the global '
        "batch must not depend; set it",
        {"training.micro_batch_size": "auto", "training.global_batch_size": 8},
    ),
    Case(
        "memory_limits_a_choice",
        {"training.memory_limit": 8.0},
        'training.memory_limit: has an effect only on training.micro_batch_size = "auto" without '
        "training.micro_batches; delete it",
        {"training.memory_limit": REMOVED},
    ),
    Case(
        "the_warmup_is_said_once",
        {"optimizer.warmup_steps": 5, "optimizer.warmup_ratio": 0.1},
        "optimizer.warmup_ratio: 0.1 is set together with optimizer.warmup_steps = 5 (run.toml); set only one of them",
        {"optimizer.warmup_steps": 0},
    ),
    Case(
        "the_stable_rate_follows_the_warmup",
        {"optimizer.schedule": "wsd", "optimizer.warmup_ratio": 0.55, "optimizer.decay_fraction": 0.5},
        "optimizer.decay_fraction: 0.5 of 10 steps begins the decay after step 5, before the end of the warm-up of "
        "6 steps (optimizer.warmup_ratio = 0.55 of 10); use at most 0.4, or optimizer.warmup_steps 5",
        {"optimizer.schedule": "wsd", "optimizer.warmup_ratio": 0.5, "optimizer.decay_fraction": 0.5},
    ),
]
