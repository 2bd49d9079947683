"""The model of benchmarks/start_up.py and the batch of a rank. Imports nothing, as peers import it."""

SEQUENCES_PER_RANK, SEQUENCE_LENGTH = 2, 128
MODEL = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": SEQUENCE_LENGTH,
    "tie_word_embeddings": True,
}
