"""One rank of megatron-core's own GPT on the CPU: saves its weights as Megatron-LM does, and its outputs.

    python -m tests.support.megatron_core_model FOLDER SHAPE RANK RANKS

A process of its own, since megatron-core has to be told that the CPU is its device.
"""

import contextlib
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from megalite.topology.shape import ModelShape, RopeScaling
from tests.support.megatron_writer import Written, arguments_of
from tests.support.tiny import FAMILY_SHAPES, tiny_shape

PADDED = 128
SHAPES = {
    "llama": tiny_shape(),
    "llama tied": tiny_shape(tied=True),
    "llama 3": replace(tiny_shape(), rope_theta=500000.0, rope_scaling=RopeScaling("llama3", 8.0)),
    "one group": replace(tiny_shape(), num_key_value_heads=1),
    "qwen2": replace(FAMILY_SHAPES["qwen2"], sliding_window=None, full_attention_layers=0),
    "qwen3": replace(FAMILY_SHAPES["qwen3"], tie_word_embeddings=False),
    "gpt2": FAMILY_SHAPES["gpt2"],
    "gpt2, exact gelu": replace(FAMILY_SHAPES["gpt2"], family="llama", hidden_act="gelu"),
}


def input_ids() -> torch.Tensor:
    return torch.randint(101, (2, 9), generator=torch.Generator().manual_seed(0))


class _NoTracker:
    """Replaces the CUDA random states, which are unused without dropout."""

    def fork(self, *_: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def is_initialized(self) -> bool:
        return True


def build(
    shape: ModelShape,
    arguments: Namespace,
    ranks: int,
    *,
    pipeline: int = 1,
    parallel_output: bool = False,
    **settings: Any,
) -> torch.nn.Module:
    """Build this rank's part of megatron-core's model with random weights, also for norms and biases.

    settings: more fields of its TransformerConfig.
    """
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    tensor_parallel.get_cuda_rng_tracker = tensor_parallel.random.get_cuda_rng_tracker = _NoTracker
    parallel_state.initialize_model_parallel(ranks, pipeline)
    gated = arguments.swiglu
    config = TransformerConfig(
        num_layers=arguments.num_layers,
        hidden_size=arguments.hidden_size,
        num_attention_heads=arguments.num_attention_heads,
        num_query_groups=shape.num_key_value_heads,
        ffn_hidden_size=arguments.ffn_hidden_size,
        kv_channels=arguments.kv_channels,
        tensor_model_parallel_size=ranks,
        use_cpu_initialization=True,
        add_bias_linear=arguments.add_bias_linear,
        add_qkv_bias=arguments.add_qkv_bias,
        gated_linear_unit=gated,
        activation_func=torch.nn.functional.silu if gated else torch.nn.functional.gelu,
        bias_activation_fusion=arguments.bias_gelu_fusion and not gated,
        normalization=arguments.normalization,
        layernorm_epsilon=arguments.norm_epsilon,
        qk_layernorm=arguments.qk_layernorm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        pipeline_model_parallel_size=pipeline,
        **settings,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization=config.normalization, qk_layernorm=config.qk_layernorm),
        vocab_size=PADDED,
        max_sequence_length=shape.max_position_embeddings,
        position_embedding_type=arguments.position_embedding_type,
        rotary_base=arguments.rotary_base,
        rope_scaling=shape.rope_scaling is not None,
        share_embeddings_and_output_weights=shape.tie_word_embeddings,
        parallel_output=parallel_output,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    generator = torch.Generator()
    with torch.no_grad():
        for number, tensor in enumerate(model.parameters()):
            cut = getattr(tensor, "tensor_model_parallel", False)  # other tensors are replicated
            # A tied embedding is the first tensor of the first stage, and stands once more on the last.
            place = 0 if getattr(tensor, "shared_embedding", False) else number
            generator.manual_seed(
                1000 * place + (parallel_state.get_tensor_model_parallel_rank() if cut else 0)
            )
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(0.15 * noise + 1.0 * (tensor.dim() == 1))
    return model.eval()


def main(folder: Path, kind: str, rank: int, ranks: int) -> None:
    store = distributed.FileStore(str(folder / "meeting"), ranks)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    shape, how = SHAPES[kind], Written(ranks, padded=PADDED)
    scaled = {"use_rope_scaling": shape.rope_scaling is not None, "rope_scaling_factor": 8.0}
    arguments = arguments_of(shape, how, **scaled)
    model = build(shape, arguments, ranks)
    path = folder / "iter_0000007" / how.folder_of(rank, 0) / "model_optim_rng.pt"
    path.parent.mkdir(parents=True)
    state = {"args": arguments, "checkpoint_version": 3.0, "iteration": 7}
    torch.save({**state, "model": model.state_dict_for_save_checkpoint()}, path)
    ids = input_ids()
    length = ids.shape[1]
    later = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad():
        logits = model(ids, torch.arange(length).repeat(len(ids), 1), later)
    if rank == 0:
        torch.save(logits, folder / "logits.pt")
    distributed.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
