"""The table of Megatron-LM's arguments: complete, and each rule's settings exist."""

from pathlib import Path

import pytest

from megalite.config.sections.describe import section_models, setting
from megalite.convert.adopt.account import Account, Outcome
from megalite.convert.adopt.megatron.arguments import answer_arguments, argument_key, arguments_of
from megalite.convert.adopt.megatron.experts import expert_defaults
from megalite.convert.adopt.megatron.rules import RULES, with_prefixes
from megalite.convert.adopt.rules import Reading

HERE = Path(__file__).parent
MODEL = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 32"
RUN = "--global-batch-size 8 --seq-length 32 --train-iters 100 --lr 1e-3 --data-path text --split 9,1,0"


def account_of(arguments: str) -> Account:
    keys, names, strays, repeated = arguments_of(f"{MODEL} {RUN} {arguments}".split())
    assert not strays and not repeated
    account = Account("Megatron-LM")
    answer_arguments(account, keys, names)
    return account


@pytest.mark.parametrize("program", ["megatron_lm_0.16.0", "megatron_deepspeed"])
def test_every_argument_of_the_programs_has_a_rule(program: str) -> None:
    """The lists: arguments.py of Megatron-LM core 0.16.0 with its dataclasses, and that of Megatron-DeepSpeed."""
    keys = {argument_key(name): name for name in (HERE / f"{program}.txt").read_text().split()}
    rules = with_prefixes(keys)
    assert len(keys) > 100 and [name for key, name in keys.items() if key not in rules] == []


MIXTURE = "--num-experts 8 --swiglu --disable-bias-linear"
SIGMOID = (
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 2e-3"
    " --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk 4 --moe-router-topk-scaling-factor 2.5"
    " --moe-shared-expert-intermediate-size 40"
)
# Arguments -> settings, or None where they are refused. Each differs from megalite's default or from Megatron-LM's.
ONE: dict[str, dict[str, object] | None] = {
    "--swiglu": {"model.gated_mlp": True, "model.hidden_act": "silu"},
    "--swiglu --hidden-size-is-above": None,
    "--num-query-groups 2 --group-query-attention": {"model.num_key_value_heads": 2},
    "--num-key-value-heads 2": {"model.num_key_value_heads": 2},
    "--no-bias-gelu-fusion": {"model.hidden_act": "gelu"},
    "--openai-gelu": {"model.hidden_act": "gelu_pytorch_tanh"},
    "--position-embedding-type rope --rotary-percent 0.25": {"model.partial_rotary_factor": 0.25},
    "--position-embedding-type rope --use-rope-scaling": {"model.rope_type": "llama3"},
    "--position-embedding-type alibi": None,
    "--position-embedding-type yarn": None,
    "--normalization rmsnorm --layernorm-epsilon 1e-6": {
        "model.norm": "rms_norm",
        "model.rms_norm_eps": 1e-6,
    },
    "--window-size (31,0)": {"model.sliding_window": 32},
    "--add-qkv-bias --disable-bias-linear": {"model.attention_bias": True, "model.mlp_bias": False},
    "--hidden-dropout 0.2": {"model.residual_dropout": 0.2, "model.embedding_dropout": 0.2},
    "--lr-warmup-fraction 0.1": {"optimizer.warmup_steps": 10},
    "--lr-warmup-samples 20": {"optimizer.warmup_steps": 3},
    "--lr-warmup-iters 0 --lr-warmup-samples 16": {"optimizer.warmup_steps": 2},
    "--lr-decay-samples 400": {"optimizer.decay_steps": 50},
    "--lr-decay-samples 400 --lr-decay-tokens 6400": {"optimizer.decay_steps": 25},
    "--train-tokens 1000": {"training.steps": 4},
    "--train-samples 79": {"training.steps": 9},
    "--lr-decay-style inverse-square-root": None,
    "--lr-decay-style WSD --lr-wsd-decay-iters 10": None,
    "--lr-decay-style WSD --lr-wsd-decay-style linear --lr-wsd-decay-iters 10": {
        "optimizer.schedule": "wsd",
        "optimizer.decay_shape": "linear",
        "optimizer.decay_fraction": 0.1,
    },
    "--min-lr 1e-4": {"optimizer.minimum_ratio": 0.1},
    "--lr-warmup-init 1e-5": None,
    "--start-weight-decay 0.1 --end-weight-decay 0.2 --weight-decay-incr-style cosine": None,
    "--start-weight-decay 0.1 --end-weight-decay 0.1": {"optimizer.weight_decay": 0.1},
    "--optimizer sgd --sgd-momentum 0.8": {"optimizer.name": "sgd", "optimizer.momentum": 0.8},
    "--optimizer muon": None,
    "--fp16 --loss-scale 128": {"training.loss_scale": 128.0},
    "--fp16 --initial-loss-scale 65536": {"training.initial_loss_scale_power": 16},
    "--fp16 --bf16": None,
    "--adam-beta1 0.8": {"optimizer.betas": [0.8, 0.999]},
    "--eod-mask-loss": None,
    "--reset-attention-mask": None,
    "--reset-position-ids": None,
    "--reset-attention-mask --reset-position-ids": {"data.document_mask": True},
    "--reset-attention-mask --use-rotary-position-embeddings": {"data.document_mask": True},
    "--recompute-granularity full --recompute-method block --recompute-num-layers 2": {
        "training.recompute": "full",
        "training.recompute_layers": 2,
    },
    "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2": {
        "parallel.virtual_stages": 2
    },
    "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1": {
        "parallel.layers_per_stage": [1, 3]
    },
    "--sequence-parallel --tensor-model-parallel-size 2": {"parallel.sequence": True},
    "--context-parallel-size 4 --cp-comm-type a2a": {
        "parallel.context": 4,
        "parallel.context_method": "ulysses",
    },
    "--context-parallel-size 2 --cp-comm-type p2p": {
        "parallel.context": 2,
        "parallel.context_method": "ring",
    },
    "--context-parallel-size 1 --cp-comm-type p2p": {"parallel.context": 1, "parallel.context_method": None},
    "--ds-sequence-parallel-size 2": {"parallel.context": 2, "parallel.context_method": "ulysses"},
    "--ds-sequence-parallel-size 1": {"parallel.context": 1, "parallel.context_method": None},
    "--eval-iters 5": {"validation.samples": 40},
    "--exit-duration-in-mins 90": {"training.stop_after": "90m"},
    "--vocab-file gpt2/vocab.json": {"tokenizer.path": "gpt2"},
    "--padded-vocab-size 512": {"model.vocab_size": 512},
    "--save a --load a": {"run.folder": "a", "checkpoint.resume": "auto"},
    "--save a --load b": None,
    "--valid-data-path c": {"data.validation": "c"},
    "--num-experts 1": {},
    "--num-experts 2": None,
    "--num-experts 2 --swiglu --disable-bias-linear --moe-expert-parallel-size 1": None,
    f"{MIXTURE}": {"model.num_experts": 8},
    f"--moe-aux-loss-coeff 0.01 {MIXTURE}": {"training.router_balance": 0.01},
    f"{MIXTURE} --moe-aux-loss-coeff 0 --moe-z-loss-coeff 1e-3": {
        "training.router_balance": None,
        "training.router_z": 0.001,
    },
    f"{MIXTURE} --moe-router-load-balancing-type none --moe-aux-loss-coeff 1": {
        "training.router_balance": None
    },
    f"{MIXTURE} --moe-router-load-balancing-type sinkhorn": None,
    f"{MIXTURE} --moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 1 1": None,
    f"{MIXTURE} --moe-router-pre-softmax --moe-ffn-hidden-size 48": {
        "model.norm_topk_prob": False,
        "model.moe_intermediate_size": 48,
    },
    f"{MIXTURE} --moe-layer-freq 2": {"model.mlp_only_layers": [1, 3]},
    f"{MIXTURE} --moe-layer-freq ([0]*1+[1]*3)": {"model.mlp_only_layers": [0]},
    f"{MIXTURE} --moe-layer-freq [1]*3": None,
    f"{MIXTURE} --moe-layer-freq [1]*99999999999": None,
    f"{MIXTURE} --moe-layer-freq __import__('os')": None,
    f"{MIXTURE} {SIGMOID}": {
        "model.router_scores": "sigmoid",
        "model.router_correction_bias": True,
        "model.norm_topk_prob": True,
        "model.n_group": 4,
        "model.topk_group": 2,
        "model.routed_scaling_factor": 2.5,
        "model.shared_intermediate_size": 40,
        "training.router_bias_rate": 0.002,
    },
    f"{MIXTURE} {SIGMOID.replace('-topk 4', '-topk 2')}": None,
    f"{MIXTURE} --moe-router-num-groups 4 --moe-router-group-topk 2": {"model.n_group": 4},
    f"{MIXTURE} --moe-router-num-groups 4 --moe-router-group-topk 1": None,
    f"{MIXTURE} --expert-model-parallel-size 4 --expert-tensor-parallel-size 1": {
        "parallel.expert": 4,
        "parallel.expert_tensor": 1,
    },
    f"{MIXTURE} --tensor-model-parallel-size 4 --expert-tensor-parallel-size 2": None,
    f"{MIXTURE} --moe-expert-capacity-factor 1.0": None,
    f"{MIXTURE} --moe-input-jitter-eps 0.01": None,
    f"{MIXTURE} --moe-of-tomorrow": None,
    "--expert-model-parallel-size 2 --moe-router-topk 2": {
        "parallel.expert": None,
        "model.num_experts_per_tok": None,
    },
    "--mtp-num-layers 1": None,
    "--lr-decay-style cosin": None,
    "--micro-batch-size many": None,
}


@pytest.mark.parametrize("arguments", ONE)
def test_arguments_become_these_settings(arguments: str) -> None:
    account, expected = account_of(arguments), ONE[arguments]
    refused = [answer.key for answer in account.with_outcome(Outcome.REFUSED) if answer.numbers]
    if expected is None:
        assert refused and set(refused) <= set(arguments.split()) and account.changes_numbers
        return
    assert not refused
    said = {key: value for answer in account.answers for key, value in answer.settings.items()}
    assert {key: said.get(key) for key in expected} == expected
    for key in account.settings:
        assert key.startswith("deepspeed.") or setting(".".join(key.split(".")[:2])).description


def test_layout_arguments_that_cannot_be_taken_keep_the_numbers() -> None:
    account = account_of("--hybrid-context-parallel --use-megatron-fsdp --exit-interval 10")
    refused = account.with_outcome(Outcome.REFUSED)
    assert [answer.key for answer in refused] == [
        "--hybrid-context-parallel",
        "--use-megatron-fsdp",
        "--exit-interval",
    ]
    assert not account.changes_numbers and all(answer.remedy for answer in refused)


def test_a_gated_mlp_without_a_width_has_that_of_megatron() -> None:
    assert account_of("").settings["model.intermediate_size"] == 256
    # int(4 * 1024 * 2 / 3 / 64) * 64
    gated = "--num-layers 1 --hidden-size 1024 --num-attention-heads 8 --max-position-embeddings 8 --swiglu"
    keys, names, _, _ = arguments_of(gated.split())
    account = Account("Megatron-LM")
    answer_arguments(account, keys, names)
    assert account.settings["model.intermediate_size"] == 2688


def test_a_mixture_has_the_defaults_of_megatron() -> None:
    gated = f"{MIXTURE} --normalization RMSNorm --position-embedding-type rope --bf16"
    account = account_of(gated)
    settings = account.settings
    assert (settings["model.family"], settings["model.num_experts_per_tok"]) == ("mixtral", 2)
    assert settings["model.moe_intermediate_size"] == settings["model.intermediate_size"]
    assert settings["model.norm_topk_prob"] is True and "checkpoint.export" not in settings
    sigmoid = account_of(f"{gated} --moe-router-score-function sigmoid --moe-router-enable-expert-bias")
    assert sigmoid.settings["checkpoint.export"] is False
    keys = dict.fromkeys(["moe-router-enable-expert-bias"])
    reading = Reading(sigmoid, keys)
    expert_defaults(reading)
    assert sigmoid.settings["training.router_bias_rate"] == 0.001


def test_every_rule_gives_one_answer_to_a_switch_and_to_a_number() -> None:
    for value in (None, "3", "x", ""):
        for key in RULES:
            account = Account("Megatron-LM")
            answer_arguments(account, {key: value}, {key: f"--{key}"})
            assert [answer.key for answer in account.answers] == [f"--{key}"]
            assert all(name.split(".")[0] in section_models() for name in account.settings)
