"""Rules on how a model is cut: tensor and pipeline parallelism, chunks, layers a stage, ranks."""

from tests.unit.config.rule_cases import Case
from tests.unit.config.runs import REMOVED

LAYOUT_CASES = [
    Case(
        "tensor_divides_attention_heads",
        {"parallel.tensor": 3, "model.num_key_value_heads": 3, "model.num_attention_heads": 8},
        "parallel.tensor: 3 does not divide model.num_attention_heads = 8; use 1",
        {"parallel.tensor": 1, "model.num_key_value_heads": 4},
        also=("model.num_key_value_heads",),
    ),
    Case(
        "tensor_fits_key_value_heads",
        {"parallel.tensor": 6, "model.num_attention_heads": 12},
        "parallel.tensor: 6 neither divides model.num_key_value_heads = 4 nor is a multiple of it; "
        "use one of [1, 2, 4, 12]",
        {"parallel.tensor": 12},
    ),
    Case(
        "zero_3_splits_no_shared_head",
        {"parallel.tensor": 8, "deepspeed.zero_optimization.stage": 3},
        "deepspeed.zero_optimization.stage: 3 (run.toml) cannot partition copies of key-value "
        "heads, but parallel.tensor = 8 is more than model.num_key_value_heads = 4; use 1 or "
        "2, or parallel.tensor 4",
        {"parallel.tensor": 4},
    ),
    Case(
        "sequence_parallel_divides_the_length",
        {"parallel.sequence": True, "parallel.tensor": 4, "training.sequence_length": 18},
        "training.sequence_length: 18 is not divisible by parallel.tensor = 4, as parallel.sequence = true requires; "
        "use 16 or 20, or parallel.sequence = false",
        {"training.sequence_length": 20},
    ),
    Case(
        "context_divides_the_length",
        {"parallel.context": 4, "training.sequence_length": 20},
        "training.sequence_length: 20 is not divisible by 2 * parallel.context 4 = 8: a rank takes two equal blocks; "
        "use 16 or 24, or parallel.context 2",
        {"training.sequence_length": 24},
    ),
    Case(
        "context_divides_the_length",
        {
            "parallel.context": 2,
            "parallel.tensor": 4,
            "parallel.sequence": True,
            "training.sequence_length": 20,
        },
        "training.sequence_length: 20 is not divisible by parallel.context 2 * parallel.tensor 4, as "
        "parallel.sequence = true requires; use 16 or 24, or parallel.context 1",
        {"training.sequence_length": 16},
    ),
    Case(
        "context_divides_the_length_buckets",
        {
            "parallel.context": 8,
            "training.sequence_length": 32,
            "data.kind": "instruct",
            "data.packing": "none",
            "data.length_buckets": 4,
        },
        "data.length_buckets: makes batches of multiples of 8 positions, but parallel.context = 8 cuts multiples of "
        "16; delete it, or lower parallel.context",
        {"data.length_buckets": REMOVED},
    ),
    Case(
        "ulysses_divides_the_heads",
        {"parallel.context": 8, "parallel.tensor": 2, "parallel.context_method": "ulysses"},
        'parallel.context_method: "ulysses" gives each of parallel.context = 8 ranks equally many heads, but there '
        'are model.num_attention_heads 8 / parallel.tensor 2 = 4; use "gather" or "ring", or parallel.context 1 or 2 '
        "or 4",
        {"parallel.context": 4},
    ),
    Case(
        "compiled_layers_hold_no_collectives",
        {"parallel.context": 2, "training.compile": True},
        "training.compile: true does not work with parallel.context = 2: collectives are not compiled; use "
        "parallel.context 1, or training.compile = false",
        {"training.compile": False},
    ),
    Case(
        "tensor_fits_intermediate_size",
        {"parallel.tensor": 4, "model.intermediate_size": 3},
        "parallel.tensor: 4 ranks cannot share model.intermediate_size = 3; use at most 3",
        {"parallel.tensor": 2},
    ),
    Case(
        "tensor_fits_vocabulary",
        {"parallel.tensor": 4, "model.vocab_size": 3, "tokenizer.vocab_size": 3},
        "parallel.tensor: 4 ranks cannot share model.vocab_size = 3; use at most 3",
        {"parallel.tensor": 2},
    ),
    Case(
        "query_heads_share_key_value_heads",
        {"model.num_key_value_heads": 3},
        "model.num_key_value_heads: 3 does not divide model.num_attention_heads = 8; use one of [1, 2, 4, 8]",
        {"model.num_key_value_heads": 2},
    ),
    Case(
        "heads_fill_hidden_size",
        {"model.hidden_size": 50},
        "model.num_attention_heads: 8 does not divide model.hidden_size = 50; use one of [1, 2, 5, 10, 25, 50], "
        "or set model.head_dim",
        {"model.head_dim": 6},
    ),
    Case(
        "head_dim_is_even",
        {"model.head_dim": 7},
        "model.head_dim: 7 is odd, but rotary embeddings rotate pairs; use 8",
        {"model.head_dim": 8},
    ),
    Case(
        "head_dim_is_even",
        {"model.hidden_size": 40},
        "model.hidden_size: 40 / model.num_attention_heads 8 = 5 is an odd head_dim; rotary "
        "embeddings rotate pairs: use 48, or set model.head_dim",
        {"model.hidden_size": 48},
    ),
    Case(
        "chunks_suit_the_schedule",
        {"parallel.virtual_stages": 2, "parallel.schedule": "interleaved_1f1b"},
        "parallel.virtual_stages: 2 chunks per stage need at least 2 stages, but parallel.pipeline is 1; "
        'use "auto", or parallel.pipeline 2 or more',
        {"parallel.pipeline": 2},
    ),
    Case(
        "chunks_suit_the_schedule",
        {"parallel.virtual_stages": 2, "parallel.schedule": "zbv"},
        "parallel.virtual_stages: 2 chunks per stage need at least 2 stages, but parallel.pipeline is 1; "
        'use "auto", or parallel.pipeline 2 or more',
        {"parallel.virtual_stages": "auto"},
    ),
    Case(
        "chunks_suit_the_schedule",
        {"parallel.pipeline": 2, "parallel.virtual_stages": 2},
        'parallel.virtual_stages: is 2, but parallel.schedule "1f1b" runs 1 chunk per stage; use "auto", '
        'or parallel.schedule "interleaved_1f1b"',
        {"parallel.schedule": "interleaved_1f1b"},
    ),
    Case(
        "chunks_suit_the_schedule",
        {"parallel.pipeline": 2, "parallel.virtual_stages": 2, "training.global_batch_size": 10},
        'parallel.virtual_stages: is 2, but parallel.schedule "1f1b" runs 1 chunk per stage; use "auto", '
        'or parallel.schedule "looped_bfs"',
        {"parallel.schedule": "looped_bfs"},
    ),
    Case(
        "chunks_suit_the_schedule",
        {"parallel.pipeline": 2, "parallel.virtual_stages": 1, "parallel.schedule": "zbv"},
        'parallel.virtual_stages: is 1, but parallel.schedule "zbv" runs 2 chunks per stage; use "auto", '
        'or parallel.schedule "interleaved_zero_bubble"',
        {"parallel.virtual_stages": "auto"},
    ),
    Case(
        "every_chunk_has_a_layer",
        {"parallel.pipeline": 5, "training.global_batch_size": 10},
        "parallel.pipeline: 5 stages cannot each have one of model.num_hidden_layers = 4; use at most 4",
        {"parallel.pipeline": 4},
    ),
    Case(
        "every_chunk_has_a_layer",
        {"parallel.pipeline": 4, "parallel.schedule": "dualpipev", "training.global_batch_size": 16},
        "parallel.pipeline: 4 stages * parallel.virtual_stages 2 = 8 chunks cannot each have one of "
        'model.num_hidden_layers = 4; use at most 2, or parallel.schedule "1f1b"',
        {"parallel.schedule": "1f1b"},
    ),
    Case(
        "every_chunk_has_a_layer",
        {"parallel.pipeline": 2, "parallel.virtual_stages": 3, "parallel.schedule": "looped_bfs"},
        "parallel.pipeline: 2 stages * parallel.virtual_stages 3 = 6 chunks cannot each have one of "
        "model.num_hidden_layers = 4; use parallel.virtual_stages 2",
        {"parallel.virtual_stages": 2},
    ),
    Case(
        "every_chunk_has_a_layer",
        {"parallel.pipeline": 3, "parallel.schedule": "zbv", "model.num_hidden_layers": 2},
        "parallel.pipeline: 3 stages * parallel.virtual_stages 2 = 6 chunks cannot each have one of "
        'model.num_hidden_layers = 2; use at most 2 and parallel.schedule "1f1b"',
        {"parallel.pipeline": 2, "parallel.schedule": "1f1b"},
    ),
    Case(
        "layers_per_stage_cover_the_model",
        {"parallel.pipeline": 2, "parallel.layers_per_stage": [1, 2]},
        "parallel.layers_per_stage: 1 + 2 = 3 is not model.num_hidden_layers = 4; "
        "give numbers whose sum is 4",
        {"parallel.layers_per_stage": [1, 3]},
    ),
    Case(
        "layers_per_stage_cover_the_model",
        {"parallel.pipeline": 2, "parallel.layers_per_stage": [1, 2, 1]},
        "parallel.layers_per_stage: has 3 numbers, but parallel.pipeline is 2; give 2 numbers",
        {"parallel.layers_per_stage": [2, 2]},
    ),
    Case(
        "layers_per_stage_cover_the_model",
        {"parallel.pipeline": 2, "parallel.schedule": "zbv", "parallel.layers_per_stage": [2, 2]},
        "parallel.layers_per_stage: has 2 numbers, but parallel.pipeline 2 * parallel.virtual_stages 2 = 4 "
        "chunks; give 4 numbers",
        {"parallel.layers_per_stage": [1, 1, 1, 1]},
    ),
    Case(
        "balanced_layers_know_the_vocabulary",
        {"parallel.pipeline": 2, "parallel.layers_per_stage": "auto", "tokenizer": {"path": "tok"}},
        'parallel.layers_per_stage: "auto" needs the size of the vocabulary, which decides what the head costs; '
        "set model.vocab_size or tokenizer.vocab_size to a number",
        {"model.vocab_size": 300},
    ),
    Case(
        "ranks_make_whole_replicas",
        {"parallel.tensor": 2, "parallel.pipeline": 2},
        "parallel.data: tensor 2 x pipeline 2 = 4 does not divide the 6 ranks that were started; "
        "start 4 or 8 ranks",
        {},
        world_size=6,
        cured_world_size=8,
    ),
    Case(
        "ranks_fill_the_layout",
        {"parallel.tensor": 2, "parallel.data": 2},
        "parallel.data: tensor 2 x pipeline 1 x data 2 = 4, not the 8 ranks that were started; "
        'use "auto", or start 4 ranks',
        {"parallel.data": "auto"},
        world_size=8,
        cured_world_size=8,
    ),
]
