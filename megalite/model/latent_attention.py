"""Multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1), trained with its heads written out."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.model.attention import SelfAttention
from megalite.model.context import StepContext
from megalite.model.dropout import LayerMasks
from megalite.model.norms import Norm
from megalite.model.options import ModelOptions
from megalite.ops.rotary import Rotation
from megalite.parallel.collectives import column_input
from megalite.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.experts import MixtureShape
from megalite.topology.shape import ModelShape

# Both of transformers' classes fix it, whatever rms_norm_eps of config.json says.
_EPS = 1e-6


class LatentSelfAttention(SelfAttention):
    """Self-attention whose keys and values come from one low-rank vector a token, and one rotated key for all heads.

    The vectors are whole on every rank of tp, each for its own positions with sequence parallelism, so that only they
    are gathered; the heads made of them are split. Values are padded with zeros to the keys' width, which all kernels
    want. Rotated values are interleaved pairs, as in DeepSeek's files.
    """

    def add_projections(self, shape: ModelShape, mesh: ParallelMesh, options: ModelOptions) -> None:
        assert isinstance(shape, MixtureShape) and shape.latent is not None
        latent, self.mesh = shape.latent, mesh
        hidden, heads, nope = shape.hidden_size, self.heads, latent.qk_nope_head_dim
        self.key_parts = (nope, latent.qk_rope_head_dim)
        self.value_parts = (nope, latent.v_head_dim)
        self.latent_parts = (latent.kv_lora_rank, latent.qk_rope_head_dim)
        alone = ParallelMesh.single(mesh.device)

        def down(outputs: int) -> ColumnParallelLinear:
            return self._column(hidden, outputs, alone, options, bias=shape.attention_bias)

        self.q_proj: ColumnParallelLinear | None = None
        if latent.q_lora_rank is None:
            self.q_proj = self._column(hidden, heads * latent.qk_head_dim, mesh, options)
        else:
            self.q_a_proj = down(latent.q_lora_rank)
            self.q_a_layernorm = Norm(latent.q_lora_rank, _EPS, options)
            self.q_b_proj = self._column(latent.q_lora_rank, heads * latent.qk_head_dim, mesh, options)
        self.kv_a_proj_with_mqa = down(sum(self.latent_parts))
        self.kv_a_layernorm = Norm(latent.kv_lora_rank, _EPS, options)
        self.kv_b_proj = self._column(latent.kv_lora_rank, heads * sum(self.value_parts), mesh, options)
        self.o_proj = RowParallelLinear(
            heads * latent.v_head_dim,
            hidden,
            mesh=mesh,
            dtype=options.dtype,
            bias=shape.attention_output_bias,
            gradients=options.weight_gradients,
        )

    def _column(
        self, inputs: int, outputs: int, mesh: ParallelMesh, options: ModelOptions, *, bias: bool = False
    ) -> ColumnParallelLinear:
        return ColumnParallelLinear(
            inputs,
            outputs,
            mesh=mesh,
            dtype=options.dtype,
            bias=bias,
            gradients=options.weight_gradients,
        )

    def project(
        self, hidden_states: Tensor, rotation: Rotation | None, context: StepContext, masks: LayerMasks
    ) -> tuple[Tensor, Tensor, Tensor]:
        adapters = context.adapters
        if self.q_proj is not None:
            query = self.q_proj(hidden_states, None, adapters)
        else:
            compressed = self.q_a_layernorm(self.q_a_proj(hidden_states, None, adapters))
            query = self.q_b_proj(compressed, None, adapters)
        query = query.unflatten(-1, (self.heads, -1))
        vectors = self.kv_a_proj_with_mqa(hidden_states, None, adapters)
        compressed, rotating = vectors.split(self.latent_parts, dim=-1)
        both = self.kv_b_proj(self.kv_a_layernorm(compressed), None, adapters)
        key, value = both.unflatten(-1, (self.heads, -1)).split(self.value_parts, dim=-1)
        # Each rank's heads use the one rotated key, so that its gradient is the sum over tp.
        shared = column_input(rotating, self.mesh).unsqueeze(2)
        if rotation is not None:
            unrotated, turning = query.split(self.key_parts, dim=-1)
            turning, shared = self.rotary.rotate(turning, shared, rotation._replace(interleaved=True))
            query = torch.cat((unrotated, turning), dim=-1)
        key = torch.cat((key, shared.expand(-1, -1, self.heads, -1)), dim=-1)
        return query, key, F.pad(value, (0, key.shape[-1] - value.shape[-1]))

    def joined(self, attended: Tensor) -> Tensor:
        return attended[..., : self.value_parts[1]].flatten(2)
