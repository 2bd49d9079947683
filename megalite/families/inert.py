"""Keys of config.json that no decoder computes with: they are neither a setting nor worth a word."""

_BOOKKEEPING = (
    *("model_type", "architectures", "transformers_version", "dtype", "torch_dtype", "torchscript"),
    *("_name_or_path", "name_or_path", "_attn_implementation", "attn_implementation", "_commit_hash"),
    *("_attn_implementation_autoset", "_experts_implementation", "tokenizer_class", "use_bfloat16"),
    *("use_cache", "gradient_checkpointing", "cache_implementation", "pretraining_tp", "prefix"),
    *("return_dict", "output_hidden_states", "output_attentions", "tie_encoder_decoder"),
    # gpt-oss says these a second time, by other names.
    *("experts_per_token", "initial_context_length"),
    *("is_decoder", "is_encoder_decoder", "chunk_size_feed_forward", "base_model_tp_plan", "n_ctx"),
)
_TOKENS = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "unk_token_id"),
    *("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "bad_words_ids"),
    *("suppress_tokens", "begin_suppress_tokens"),
)
# generation_config.json holds them today.
_GENERATION = (
    *("max_length", "min_length", "max_new_tokens", "do_sample", "early_stopping", "num_beams"),
    *("num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p"),
    *("repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
    *("num_return_sequences", "output_scores", "return_dict_in_generate", "exponential_decay_length_penalty"),
    *("remove_invalid_values", "task_specific_params", "use_return_dict"),
)
# Heads other than the language model's.
_OTHER_HEADS = (
    *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "classifier_dropout"),
    *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
    *("summary_first_dropout", "summary_last_dropout", "pruned_heads", "cross_attention_hidden_size"),
    *("add_cross_attention", "tf_legacy_loss"),
)
# The loss of transformers' mixtures over all layers and a batch: training.router_balance is another one.
BATCH_BALANCE = ("output_router_logits", "router_aux_loss_coef")
INERT = frozenset({*BATCH_BALANCE, *_BOOKKEEPING, *_TOKENS, *_GENERATION, *_OTHER_HEADS})
